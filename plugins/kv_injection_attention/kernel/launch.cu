// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/launch.cuh"

#include <algorithm>

#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/kernel/architecture.h"
#include "kv_injection_attention/kernel/wgmma_launch_config.h"

namespace dflash::kv_injection {

template <int D>
cudaError_t launch_head_dim(const Params& params, const Gpu& gpu, const LaunchConfig& config);  // head_dim_*.cu
template <int D>
cudaError_t launch_wgmma_head_dim(const Params& params, const Gpu& gpu, const LaunchConfig& config);  // wgmma_*.cu

namespace {

// Number of CTAs with `shared_bytes` of shared memory that the GPU runs at once, at most two per SM.
int resident_ctas(const Gpu& gpu, int shared_bytes) {
  return gpu.sms * std::clamp(gpu.sm_bytes / (shared_bytes + gpu.reserved_bytes), 1, 2);
}

// Error message if the GPU lacks what the call needs, else nullptr.
const char* lacking(const Params& p, const Gpu& gpu) {
  if (p.cache_dtype == DType::kF8E4M3 && gpu.compute_capability() < kFirstFp8) {
    return "expected a GPU of compute capability 8.9 or newer for an FP8 cache, found an older one";
  }
  return gpu.cta_bytes < kSharedBudget ? "expected a GPU with 99 KB of shared memory for a CTA, found less" : nullptr;
}

cudaError_t launch_mma(const Params& p, const Gpu& gpu) {
  const int limit = shared_limit(gpu.sm_bytes, gpu.reserved_bytes, gpu.cta_bytes);
  const int ctas = resident_ctas(gpu, make_launch_config(p, 1, limit).shared_bytes);
  const LaunchConfig config = make_launch_config(p, ctas, limit);
  switch (p.head_dim) {
    case 64:
      return launch_both(launch_head_dim<64>, launch_combine<64>, p, gpu, config);
    case 96:
      return launch_both(launch_head_dim<96>, launch_combine<96>, p, gpu, config);
    case 128:
      return launch_both(launch_head_dim<128>, launch_combine<128>, p, gpu, config);
    case 256:
      return launch_both(launch_head_dim<256>, launch_combine<256>, p, gpu, config);
    default:
      return cudaErrorInvalidValue;
  }
}

#ifdef DFLASH_HAS_WGMMA
bool is_wgmma_available(const Params& p, const Gpu& gpu) { return has_wgmma(gpu) && wgmma_fits(p); }

cudaError_t launch_wgmma(const Params& p, const Gpu& gpu) {
  const LaunchConfig config = make_wgmma_launch_config(p, gpu.sms);
  return p.head_dim == 64 ? launch_both(launch_wgmma_head_dim<64>, launch_combine<64>, p, gpu, config)
                          : launch_both(launch_wgmma_head_dim<128>, launch_combine<128>, p, gpu, config);
}
#else
bool is_wgmma_available(const Params&, const Gpu&) { return false; }
cudaError_t launch_wgmma(const Params&, const Gpu&) { return cudaErrorNotSupported; }
#endif

cudaError_t launch_kernel(const Params& p, const Gpu& gpu, Kernel kernel) {
#ifdef DFLASH_EXPERIMENTAL_KERNELS
  if (kernel == Kernel::kShort) return launch_short(p, gpu);
#ifdef DFLASH_HAS_WGMMA
  if (kernel == Kernel::kAhead) return launch_ahead(p, gpu);
#endif
#endif
  const bool wgmma_available = is_wgmma_available(p, gpu);
  switch (kernel) {
    case Kernel::kBest:
      return wgmma_available && wgmma_pays(p) ? launch_wgmma(p, gpu) : launch_mma(p, gpu);
    case Kernel::kMma:
      return launch_mma(p, gpu);
    case Kernel::kWgmma:
      return wgmma_available ? launch_wgmma(p, gpu) : cudaErrorNotSupported;
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace

int32_t compute_capability() {
  const Gpu* gpu = nullptr;
  if (current_gpu(gpu) == cudaSuccess) return gpu->compute_capability();
  cudaGetLastError();
  return 0;
}

bool dflash_experimental_kernels() {
#ifdef DFLASH_EXPERIMENTAL_KERNELS
  return true;
#else
  return false;
#endif
}

const char* dflash_launch_attention(const Params& p, Kernel kernel) {
  if (p.batch == 0) return nullptr;
  const Gpu* gpu = nullptr;
  cudaError_t error = current_gpu(gpu);
  if (error == cudaSuccess) {
    const char* lacks = lacking(p, *gpu);
    if (lacks != nullptr) return lacks;
    error = launch_kernel(p, *gpu, kernel);
  }
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, which the caller gets from us
  return cudaGetErrorString(error);
}

}  // namespace dflash::kv_injection
