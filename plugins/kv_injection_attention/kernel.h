// SPDX-License-Identifier: Apache-2.0
// The CUDA kernel, as its callers see it.
#pragma once

#include <cstddef>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Bytes of scratch that launch() needs on any GPU. Plain arithmetic: needs no CUDA.
size_t workspace_size(const Params& params);

enum class Kernel {
  kBest,   // of those that the GPU, the build and the call allow
  kMma,    // attention.cuh: mma.sync, everywhere
  kShort,  // short_attention() of attention.cuh: calls that short_fits(), best with short contexts
  kWgmma,  // wgmma_attention.cuh: GPUs of compute capability 9.0, calls that wgmma_fits()
  kAhead,  // the same with products ahead: calls that wgmma_ahead_fits()
};

// The current GPU's compute capability, as architecture.h counts it; 0 without a GPU, its driver or kernels.
int32_t compute_capability();

// Starts the attention on params.stream and returns at once: no allocation, no synchronisation, capturable.
// `params` has passed check_params and check_workspace. Gives nullptr, or what the GPU lacks, or CUDA's text of what
// went wrong.
const char* launch(const Params& params, Kernel kernel = Kernel::kBest);

}  // namespace dflash::kv_injection
