// SPDX-License-Identifier: Apache-2.0
#include "bindings/kv_injection_call.h"

#include <cstdint>
#include <stdexcept>
#include <string>

namespace nb = nanobind;
namespace attention = dflash::kv_injection;

static attention::ElementType element_type(const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return dtype == nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  if (is(Code::Float, 16)) return attention::ElementType::kF16;
  if (is(Code::Bfloat, 16)) return attention::ElementType::kBF16;
  if (is(Code::Float8_E4M3FN, 8)) return attention::ElementType::kF8E4M3;
  if (is(Code::Float, 32)) return attention::ElementType::kF32;
  if (is(Code::Int, 32)) return attention::ElementType::kI32;
  if (is(Code::Int, 64)) return attention::ElementType::kI64;
  return attention::ElementType::kOther;
}

static std::string device_name(int device) {
  if (device == nb::device::cpu::value) return "CPU";
  return device == nb::device::cuda::value ? "CUDA" : "DLPack device " + std::to_string(device);
}

template <typename AnyArray>
static bool is_dense(const AnyArray& array) {
  if (array.size() == 0) return true;
  int64_t stride = 1;
  for (size_t axis = array.ndim(); axis-- > 0;) {
    if (array.shape(axis) != 1 && array.stride(axis) != stride) return false;
    stride *= static_cast<int64_t>(array.shape(axis));
  }
  return true;
}

template <typename AnyArray>
static attention::TensorView tensor_of(const char* name, const AnyArray& array, int device) {
  const auto refuse = [&](const std::string& problem) {
    throw std::invalid_argument(std::string(name) + ": " + problem);
  };
  if (array.device_type() != device) {
    refuse("expected a " + device_name(device) + " tensor, found a " + device_name(array.device_type()) + " tensor");
  }
  if (array.ndim() > attention::TensorView::kMaxRank) refuse("expected at most 8 dimensions");
  if (!is_dense(array)) refuse("expected a dense row-major tensor, found strides");
  attention::TensorView tensor{.type = element_type(array.dtype()),
                               .rank = static_cast<int32_t>(array.ndim()),
                               .shape = {},
                               .data = const_cast<void*>(static_cast<const void*>(array.data()))};
  for (size_t axis = 0; axis < array.ndim(); ++axis) {
    tensor.shape[axis] = static_cast<int64_t>(array.shape(axis));
  }
  return tensor;
}

attention::Params call_params(const attention::Attributes& attributes, const Inputs& inputs, const Array& out,
                              int device) {
  attention::expect_inputs(attributes, static_cast<int32_t>(inputs.size()));
  std::vector<attention::TensorView> tensors;
  for (const auto& input : inputs) {
    const auto index = static_cast<int32_t>(tensors.size());
    tensors.push_back(tensor_of(attention::input_name(input_at(attributes, index)), input, device));
  }
  return make_params(attributes, tensors, tensor_of("out", out, device));
}

attention::AppendParams append_params(const Inputs& inputs, const Array& k_cache, const Array& v_cache, int device) {
  std::vector<attention::TensorView> tensors;
  for (const auto& input : inputs) {
    const auto index = static_cast<int32_t>(tensors.size());
    tensors.push_back(tensor_of(attention::append_input_name(index), input, device));
  }
  return make_append_params(tensors, tensor_of("k_cache", k_cache, device), tensor_of("v_cache", v_cache, device));
}

void* workspace_address(const Array& workspace) {
  return tensor_of("workspace", workspace, nb::device::cuda::value).data;
}
