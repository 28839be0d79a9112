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
  out.dims.d[2] = output_width(attributes);
  return call_params(attributes, descs.data(), num_inputs, out);
}

bool is_type_supported(int32_t input, const DynamicPluginTensorDesc* tensors) {
  const DataType type = tensors[input].desc.type, block = tensors[kQkv].desc.type;
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
      return type == block;
  }
}

}  // namespace dflash::kv_injection
