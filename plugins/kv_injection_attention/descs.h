// SPDX-License-Identifier: Apache-2.0
// From TensorRT's tensor descriptions to the call. expect_inputs() has passed `num_inputs`.
#pragma once

#include "kv_injection_attention/tensors.h"
#include "tensorrt_abi/nvinfer.h"

namespace dflash::kv_injection {

// Addresses of a call's tensors; null while only shapes are known.
struct Addresses {
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
};

Params call_params(const Attributes& attributes, const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                   const nvinfer1::PluginTensorDesc& output, const Addresses& at = {});

// The call at the largest shapes of the profile. The output follows from qkv, not from the bounds that TensorRT gives.
Params largest_call(const Attributes& attributes, const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs);

nvinfer1::DataType output_type(const Attributes& attributes, nvinfer1::DataType qkv);

// Whether this input's dtype fits those of the inputs before it.
bool is_type_supported(Input input, nvinfer1::DataType type, nvinfer1::DataType qkv);

}  // namespace dflash::kv_injection
