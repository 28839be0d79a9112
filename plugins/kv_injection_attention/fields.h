// SPDX-License-Identifier: Apache-2.0
// The node's attributes as TensorRT's plugin fields.
#pragma once

#include <array>

#include "kv_injection_attention/tensors.h"
#include "tensorrt_abi/nvinfer.h"

namespace dflash::kv_injection {

inline constexpr int32_t kNumAttributes = 14;

// Version of the serialised attributes; raised with any change of their names, types or meaning.
inline constexpr int32_t kFormatVersion = 3;  // 1: dense caches were inputs; 2: neither a bias nor an FP8 output

// The attributes' names and types, without values: what the ONNX parser asks the creator for.
const nvinfer1::PluginFieldCollection& attribute_names();

// Reads the attributes: of a node in the build phase; at run time of an engine, which also holds a
// format_version. Throws std::invalid_argument if one is missing, unknown, given twice, of another
// type or out of range.
Attributes parse_fields(const nvinfer1::PluginFieldCollection* fields, nvinfer1::TensorRTPhase phase);

// The fields of an engine. They point into this object, which therefore stays where it is.
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
