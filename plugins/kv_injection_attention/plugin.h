// SPDX-License-Identifier: Apache-2.0
// The DFlashKVInjectionAttention plugin for TensorRT; tensors.h defines its inputs and output.
#pragma once

#include "kv_injection_attention/fields.h"
#include "kv_injection_attention/tensors.h"
#include "tensorrt_abi/nvinfer.h"

namespace dflash::kv_injection {

inline constexpr char kPluginName[] = "DFlashKVInjectionAttention";
// 1 had q, k and v as three inputs; 2 had dense caches; 3 had no bias; 4 had neither a number of pages nor checksums.
inline constexpr char kPluginVersion[] = "5";
inline constexpr char kPluginNamespace[] = "dflash_trt";

class AttentionPlugin final : public nvinfer1::IPluginV3,
                              public nvinfer1::IPluginV3OneCore,
                              public nvinfer1::IPluginV3OneBuild,
                              public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit AttentionPlugin(const Attributes& attributes);
  AttentionPlugin(const AttentionPlugin& other);
  AttentionPlugin& operator=(const AttentionPlugin&) = delete;

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  AttentionPlugin* clone() noexcept override;

  // Core.
  const char* getPluginName() const noexcept override { return kPluginName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  // Build.
  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                          const nvinfer1::DimsExprs* shape_inputs, int32_t num_shape_inputs,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
  // Large enough for every B and S of the profile, because a small batch may need more than a large one.
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t num_outputs) const noexcept override;

  // Run time.
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                        const nvinfer1::PluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  AttentionPlugin* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  Attributes attributes_;
  SerializedFields serialized_;
  // Set by onShapeChange; enqueue gets neither.
  int32_t num_inputs_ = 0;
  size_t workspace_bytes_ = 0;
};

}  // namespace dflash::kv_injection
