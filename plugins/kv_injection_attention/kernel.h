// SPDX-License-Identifier: Apache-2.0
// Host interface of the CUDA kernel. Programs that link the library call the exported functions, without TensorRT.
#pragma once

#include <cstddef>

#include "common/export.h"
#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Scratch bytes that launch() needs on any GPU. Plain arithmetic without CUDA calls.
size_t workspace_size(const Params& params);

enum class Kernel {
  kBest,   // the best one that the GPU, the build and the call allow
  kMma,    // attention.cuh: mma.sync, on every supported GPU
  kWgmma,  // wgmma_attention.cuh: compute capability 9.0, for calls that pass wgmma_fits()
  // No GPU has run these two, so only builds with DFLASH_EXPERIMENTAL_KERNELS have them.
  kShort,  // short_attention() in attention.cuh: for calls that pass short_fits(), intended for short contexts
  kAhead,  // kWgmma with the next step's products computed ahead: for calls that pass wgmma_ahead_fits()
};

// Architectures that the kernels were compiled for, as in "80 90a 90-virtual"; empty without CUDA.
DFLASH_EXPORT const char* dflash_cuda_architectures();

// Whether the kernels that no GPU has run are compiled.
DFLASH_EXPORT bool dflash_experimental_kernels();

// Compute capability of the current GPU as 10 * major + minor; 0 without a GPU, a driver or compiled kernels.
int32_t compute_capability();

// Starts the attention on params.stream and returns at once: no allocation, no synchronisation, capturable.
// `params` must have passed check_params and check_workspace. Returns nullptr, a message about what the GPU lacks, or
// CUDA's error string.
DFLASH_EXPORT const char* dflash_launch_attention(const Params& params, Kernel kernel);

}  // namespace dflash::kv_injection
