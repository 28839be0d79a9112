// SPDX-License-Identifier: Apache-2.0
// Converts Python's tensors to a call without copying. Throws std::invalid_argument that names the tensor.
#pragma once

#include <nanobind/ndarray.h>

#include <vector>

#include "kv_injection_attention/tensors.h"

using Array = nanobind::ndarray<>;
using Inputs = std::vector<nanobind::ndarray<nanobind::ro>>;  // in the node's order

// `device` is nanobind::device::cpu::value or cuda::value; all tensors must be on it.
dflash::kv_injection::Params call_params(const dflash::kv_injection::Attributes& attributes, const Inputs& inputs,
                                         const Array& out, int device);

// The inputs in the order of AppendInput.
dflash::kv_injection::AppendParams append_params(const Inputs& inputs, const Array& k_cache, const Array& v_cache,
                                                 int device);

// Address of a dense CUDA tensor of any dtype.
void* workspace_address(const Array& workspace);
