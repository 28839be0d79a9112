// SPDX-License-Identifier: Apache-2.0
// The node's attributes as TensorRT's plugin fields.
#pragma once

#include <array>

#include "kv_injection_attention/tensors.h"
#include "tensorrt_abi/nvinfer.h"

namespace dflash::kv_injection {

inline constexpr int32_t kNumAttributes = 14;

// Version of the serialised attributes; incremented when their names, types or meaning change. 1 had dense
// caches as inputs; 2 had neither a bias nor an FP8 output.
inline constexpr int32_t kFormatVersion = 3;

// Names and types of the attributes, without values, which the ONNX parser queries from the creator.
const nvinfer1::PluginFieldCollection& attribute_names();

// Reads the attributes of a node (build phase) or of an engine (run time), which also holds a format_version. Throws
// std::invalid_argument if an attribute is missing, unknown, duplicated, of the wrong type or out of range.
Attributes parse_fields(const nvinfer1::PluginFieldCollection* fields, nvinfer1::TensorRTPhase phase);

// The fields serialised into an engine. They point into this object, so it cannot be moved or copied.
class SerializedFields {
 public:
  explicit SerializedFields(const Attributes& attributes);
  SerializedFields(const SerializedFields&) = delete;
  SerializedFields& operator=(const SerializedFields&) = delete;

  const nvinfer1::PluginFieldCollection* collection() const { return &collection_; }

 private:
  Attributes attributes_;
  std::array<nvinfer1::PluginField, kNumAttributes + 1> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

}  // namespace dflash::kv_injection
