// SPDX-License-Identifier: Apache-2.0
// Both kernels of one head_dim on the params' stream; instantiated once in each head_dim_*.cu, which build apart.
#pragma once

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/attention.cuh"
#include "kv_injection_attention/kernel/combine.cuh"
#include "kv_injection_attention/kernel/start.cuh"

namespace dflash::kv_injection {

template <int D, class T, bool kBytes>
cudaError_t launch_attention(const Params& p, const Plan& plan) {
  auto* kernel = attention<D, T, kBytes>;
  const auto allow = [&](cudaFuncAttribute what, int value) {
    return cudaFuncSetAttribute(kernel, what, value);
  };
  // The same at every launch: this plan's own bytes would forbid a larger plan that another thread is about to launch.
  cudaError_t error = allow(cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBudget);
  if (error != cudaSuccess) return error;
  error = allow(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return start(kernel, attention_grid(p, plan), p.stream, p, plan);
}

template <int D, class T>
cudaError_t launch_both(const Params& p, const Plan& plan) {
  const bool bytes = p.cache_dtype == DType::kF8E4M3;
  const cudaError_t error =
      bytes ? launch_attention<D, T, true>(p, plan) : launch_attention<D, T, false>(p, plan);
  if (error != cudaSuccess || plan.ranges == 1) return error;
  return start(combine<D, T>, combine_grid(p, plan), p.stream, p, plan);
}

template <int D>
cudaError_t launch_head_dim(const Params& p, const Plan& plan) {
  return p.block_dtype == DType::kF16 ? launch_both<D, F16>(p, plan)
                                      : launch_both<D, BF16>(p, plan);
}

}  // namespace dflash::kv_injection
