// SPDX-License-Identifier: Apache-2.0
// Host interface of the CUDA kernel.
#pragma once

#include <cstddef>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Scratch bytes that launch() needs on any GPU. Plain arithmetic without CUDA calls.
size_t workspace_size(const Params& params);

enum class Kernel {
  kBest,   // the best one that the GPU, the build and the call allow
  kMma,    // attention.cuh: mma.sync, on every supported GPU
  kShort,  // short_attention() in attention.cuh: for calls that pass short_fits(), intended for short contexts
  kWgmma,  // wgmma_attention.cuh: compute capability 9.0, for calls that pass wgmma_fits()
  kAhead,  // kWgmma with the next step's products computed ahead: for calls that pass wgmma_ahead_fits()
};

// Compute capability of the current GPU as 10 * major + minor; 0 without a GPU, a driver or compiled kernels.
int32_t compute_capability();

// Starts the attention on params.stream and returns at once: no allocation, no synchronisation, capturable.
// `params` must have passed check_params and check_workspace. Returns nullptr, a message about what the GPU lacks, or
// CUDA's error string.
const char* launch(const Params& params, Kernel kernel = Kernel::kBest);

}  // namespace dflash::kv_injection
