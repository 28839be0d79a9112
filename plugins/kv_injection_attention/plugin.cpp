// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/plugin.h"

#include <algorithm>
#include <stdexcept>

#include "common/guard.h"
#include "common/text.h"
#include "kv_injection_attention/check.h"
#include "kv_injection_attention/descs.h"
#include "kv_injection_attention/kernel.h"

namespace dflash::kv_injection {
namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr int32_t kSuccess = 0, kFailure = -1;
// More than any GPU has: if the size cannot be computed, the build must fail, whereas 0 would let it continue.
constexpr size_t kImpossibleSize = size_t{1} << 60;

void expect_counts(const Attributes& attributes, int32_t num_inputs, int32_t num_outputs) {
  if (num_outputs != 1) throw std::invalid_argument(text("expected 1 output, found ", num_outputs));
  expect_inputs(attributes, num_inputs);
}

void refuse(const Problem& problem) {
  if (problem) throw std::invalid_argument(*problem);
}

}  // namespace

AttentionPlugin::AttentionPlugin(const Attributes& attributes) : attributes_(attributes), serialized_(attributes) {}

AttentionPlugin::AttentionPlugin(const AttentionPlugin& other) : AttentionPlugin(other.attributes_) {
  num_inputs_ = other.num_inputs_;
  workspace_bytes_ = other.workspace_bytes_;
}

nvinfer1::IPluginCapability* AttentionPlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

AttentionPlugin* AttentionPlugin::clone() noexcept {
  return guard("clone", static_cast<AttentionPlugin*>(nullptr), [&] { return new AttentionPlugin(*this); });
}

int32_t AttentionPlugin::getOutputDataTypes(DataType* outputs, int32_t num_outputs, const DataType* inputs,
                                            int32_t num_inputs) const noexcept {
  return guard("getOutputDataTypes", kFailure, [&] {
    expect_counts(attributes_, num_inputs, num_outputs);
    outputs[0] = output_type(attributes_, inputs[kQkv]);
    return kSuccess;
  });
}

int32_t AttentionPlugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                                         const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                                         int32_t num_outputs, nvinfer1::IExprBuilder& builder) noexcept {
  return guard("getOutputShapes", kFailure, [&] {
    expect_counts(attributes_, num_inputs, num_outputs);
    outputs[0] = inputs[kQkv];
    outputs[0].d[std::max(0, outputs[0].nbDims - 1)] = builder.constant(output_width(attributes_));
    return kSuccess;
  });
}

bool AttentionPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                                int32_t num_inputs, int32_t num_outputs) noexcept {
  return guard("supportsFormatCombination", false, [&] {
    expect_counts(attributes_, num_inputs, num_outputs);
    const PluginTensorDesc& tensor = tensors[position].desc;
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
    const DataType qkv = tensors[kQkv].desc.type;
    if (position == num_inputs) return tensor.type == output_type(attributes_, qkv);
    if (position == kContextPointers) refuse(check_gpu(attributes_.fp8_cache != 0, compute_capability()));
    return is_type_supported(input_at(attributes_, position), tensor.type, qkv);
  });
}

int32_t AttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                         const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
  return guard("configurePlugin", kFailure, [&] {
    expect_counts(attributes_, num_inputs, num_outputs);
    refuse(check_sizes(largest_call(attributes_, inputs, num_inputs)));
    return kSuccess;
  });
}

size_t AttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                         const DynamicPluginTensorDesc*, int32_t num_outputs) const noexcept {
  return guard("getWorkspaceSize", kImpossibleSize, [&] {
    expect_counts(attributes_, num_inputs, num_outputs);
    const Params largest = largest_call(attributes_, inputs, num_inputs);
    refuse(check_sizes(largest));
    size_t bytes = 0;
    for (Params p = largest; p.batch > 0; --p.batch) {
      for (p.block = largest.block; p.block > 0; --p.block) bytes = std::max(bytes, workspace_size(p));
    }
    return bytes;
  });
}

int32_t AttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t num_inputs,
                                       const PluginTensorDesc* outputs, int32_t num_outputs) noexcept {
  return guard("onShapeChange", kFailure, [&] {
    expect_counts(attributes_, num_inputs, num_outputs);
    const Params p = call_params(attributes_, inputs, num_inputs, outputs[0]);
    refuse(check_sizes(p));
    num_inputs_ = num_inputs;
    workspace_bytes_ = workspace_size(p);
    return kSuccess;
  });
}

int32_t AttentionPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                                 const void* const* inputs, void* const* outputs, void* workspace,
                                 cudaStream_t stream) noexcept {
  return guard("enqueue", kFailure, [&] {
    expect_counts(attributes_, num_inputs_, 1);
    const Addresses at{.inputs = inputs, .outputs = outputs};
    Params p = call_params(attributes_, input_descs, num_inputs_, output_descs[0], at);
    refuse(check_params(p));
    p.workspace = workspace;
    p.workspace_bytes = workspace_bytes_;  // TensorRT passes as many bytes as getWorkspaceSize returned
    refuse(check_workspace(p));
    p.stream = stream;
    if (const char* error = dflash_launch_attention(p, Kernel::kBest)) throw std::runtime_error(error);
    return kSuccess;
  });
}

AttentionPlugin* AttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

const nvinfer1::PluginFieldCollection* AttentionPlugin::getFieldsToSerialize() noexcept {
  return serialized_.collection();
}

}  // namespace dflash::kv_injection
