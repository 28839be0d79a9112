// SPDX-License-Identifier: Apache-2.0
// Converts TensorRT's tensor descriptions to a call. `num_inputs` must have passed expect_inputs().
#pragma once

#include "kv_injection_attention/tensors.h"
#include "tensorrt_abi/nvinfer.h"

namespace dflash::kv_injection {

// Addresses of a call's tensors; null as long as only shapes are known.
struct Addresses {
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
};

Params call_params(const Attributes& attributes, const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                   const nvinfer1::PluginTensorDesc& output, const Addresses& at = {});

// The call at the largest shapes of the profile. The output's shape is derived from qkv, not taken from TensorRT's
// bounds.
Params largest_call(const Attributes& attributes, const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs);

nvinfer1::DataType output_type(const Attributes& attributes, nvinfer1::DataType qkv);

// Whether this input's dtype is consistent with the preceding inputs.
bool is_type_supported(Input input, nvinfer1::DataType type, nvinfer1::DataType qkv);

}  // namespace dflash::kv_injection
