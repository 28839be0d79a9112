// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/descs.h"

#include <algorithm>
#include <array>

namespace dflash::kv_injection {
namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

ElementType element_type(DataType type) {
  switch (type) {
    case DataType::kHALF:
      return ElementType::kF16;
    case DataType::kBF16:
      return ElementType::kBF16;
    case DataType::kFP8:
      return ElementType::kF8E4M3;
    case DataType::kFLOAT:
      return ElementType::kF32;
    case DataType::kINT32:
      return ElementType::kI32;
    case DataType::kINT64:
      return ElementType::kI64;
    default:
      return ElementType::kOther;
  }
}

TensorView tensor_of(const nvinfer1::Dims& dims, DataType type, const void* data) {
  TensorView tensor{.type = element_type(type),
                    .rank = std::clamp(dims.nbDims, 0, TensorView::kMaxRank),
                    .shape = {},
                    .data = const_cast<void*>(data)};
  std::copy_n(dims.d, tensor.rank, tensor.shape.begin());
  return tensor;
}

}  // namespace

Params call_params(const Attributes& attributes, const PluginTensorDesc* inputs, int32_t num_inputs,
                   const PluginTensorDesc& output, const Addresses& at) {
  std::array<TensorView, kMaxInputs> tensors;
  for (int32_t i = 0; i < num_inputs; ++i) {
    tensors[i] = tensor_of(inputs[i].dims, inputs[i].type, at.inputs ? at.inputs[i] : nullptr);
  }
  const TensorView out = tensor_of(output.dims, output.type, at.outputs ? at.outputs[0] : nullptr);
  return make_params(attributes, {tensors.data(), static_cast<size_t>(num_inputs)}, out);
}

Params largest_call(const Attributes& attributes, const DynamicPluginTensorDesc* inputs, int32_t num_inputs) {
  const auto at_max = [](const DynamicPluginTensorDesc& tensor) {
    PluginTensorDesc desc = tensor.desc;
    desc.dims = tensor.max;
    return desc;
  };
  std::array<PluginTensorDesc, kMaxInputs> descs;
  std::transform(inputs, inputs + num_inputs, descs.begin(), at_max);
  PluginTensorDesc out = descs[kQkv];
  out.dims.d[std::max(0, out.dims.nbDims - 1)] = output_width(attributes);
  out.type = output_type(attributes, out.type);
  return call_params(attributes, descs.data(), num_inputs, out);
}

DataType output_type(const Attributes& attributes, DataType qkv) {
  return attributes.fp8_output != 0 ? DataType::kFP8 : qkv;
}

bool is_type_supported(Input input, DataType type, DataType qkv) {
  switch (input) {
    case kQkv:
      return type == DataType::kBF16 || type == DataType::kHALF;
    case kRope:
    case kSinks:
      return type == DataType::kFLOAT;
    case kContextPointers:
    case kContextLayout:
      return type == DataType::kINT64;
    case kPageTable:
    case kSlotIds:
    case kContextLengths:
      return type == DataType::kINT32;
    default:
      return type == qkv;
  }
}

}  // namespace dflash::kv_injection
