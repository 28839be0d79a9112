// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/launch.cuh"

#include <algorithm>

#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/kernel/architecture.h"
#include "kv_injection_attention/kernel/wgmma_launch_config.h"

namespace dflash::kv_injection {

template <int D>
cudaError_t launch_head_dim(const Params& params, const LaunchConfig& config);  // head_dim_*.cu
template <int D>
cudaError_t launch_short(const Params& params, const LaunchConfig& config);  // head_dim_*.cu
template <int D>
cudaError_t launch_wgmma_head_dim(const Params& params, const LaunchConfig& config);  // wgmma_*.cu
template <int D>
cudaError_t launch_ahead_head_dim(const Params& params, const LaunchConfig& config);  // wgmma_*.cu

namespace {

// Properties of the current GPU that the launch depends on.
struct Gpu {
  int sms;
  int sm_bytes, reserved_bytes, cta_bytes;  // shared memory: per SM, reserved per CTA, maximum per CTA
  int major, minor;                         // compute capability

  int compute_capability() const { return 10 * major + minor; }
};

cudaError_t query_device(Gpu& gpu) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  get(gpu.sms, cudaDevAttrMultiProcessorCount);
  get(gpu.sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(gpu.reserved_bytes, cudaDevAttrReservedSharedMemoryPerBlock);
  get(gpu.cta_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(gpu.major, cudaDevAttrComputeCapabilityMajor);
  get(gpu.minor, cudaDevAttrComputeCapabilityMinor);
  return error;
}

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

using Launch = cudaError_t(const Params&, const LaunchConfig&);

cudaError_t launch_both(Launch attention, Launch combine, const Params& p, const LaunchConfig& config) {
  const cudaError_t error = attention(p, config);
  return error == cudaSuccess ? combine(p, config) : error;
}

cudaError_t launch_mma(const Params& p, const Gpu& gpu) {
  const int limit = shared_limit(gpu.sm_bytes, gpu.reserved_bytes, gpu.cta_bytes);
  const int ctas = resident_ctas(gpu, make_launch_config(p, 1, limit).shared_bytes);
  const LaunchConfig config = make_launch_config(p, ctas, limit);
  switch (p.head_dim) {
    case 64:
      return launch_both(launch_head_dim<64>, launch_combine<64>, p, config);
    case 96:
      return launch_both(launch_head_dim<96>, launch_combine<96>, p, config);
    case 128:
      return launch_both(launch_head_dim<128>, launch_combine<128>, p, config);
    case 256:
      return launch_both(launch_head_dim<256>, launch_combine<256>, p, config);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_short(const Params& p, const Gpu& gpu) {
  if (!short_fits(p)) return cudaErrorNotSupported;
  const LaunchConfig config = make_short_launch_config(p, gpu.sms, gpu.cta_bytes);
  return p.head_dim == 64 ? launch_short<64>(p, config) : launch_short<128>(p, config);
}

#ifdef DFLASH_HAS_WGMMA
bool has_wgmma(const Params& p, const Gpu& gpu) { return gpu.major == 9 && gpu.minor == 0 && wgmma_fits(p); }

cudaError_t launch_wgmma(const Params& p, const Gpu& gpu) {
  const LaunchConfig config = make_wgmma_launch_config(p, gpu.sms);
  return p.head_dim == 64 ? launch_both(launch_wgmma_head_dim<64>, launch_combine<64>, p, config)
                          : launch_both(launch_wgmma_head_dim<128>, launch_combine<128>, p, config);
}

cudaError_t launch_ahead(const Params& p, const Gpu& gpu) {
  const LaunchConfig config = make_wgmma_launch_config(p, gpu.sms, true);
  return p.head_dim == 64 ? launch_both(launch_ahead_head_dim<64>, launch_combine<64>, p, config)
                          : launch_both(launch_ahead_head_dim<128>, launch_combine<128>, p, config);
}
#else
bool has_wgmma(const Params&, const Gpu&) { return false; }
cudaError_t launch_wgmma(const Params&, const Gpu&) { return cudaErrorNotSupported; }
cudaError_t launch_ahead(const Params&, const Gpu&) { return cudaErrorNotSupported; }
#endif

cudaError_t launch_kernel(const Params& p, const Gpu& gpu, Kernel kernel) {
  if (kernel == Kernel::kShort || (kernel == Kernel::kBest && short_pays(p))) return launch_short(p, gpu);
  const bool wgmma_available = has_wgmma(p, gpu);
  if (kernel == Kernel::kAhead) {
    return wgmma_available && wgmma_ahead_fits(p) ? launch_ahead(p, gpu) : cudaErrorNotSupported;
  }
  if (kernel == Kernel::kWgmma) return wgmma_available ? launch_wgmma(p, gpu) : cudaErrorNotSupported;
  return wgmma_available && kernel == Kernel::kBest && wgmma_pays(p) ? launch_wgmma(p, gpu) : launch_mma(p, gpu);
}

}  // namespace

int32_t compute_capability() {
  Gpu gpu{};
  if (query_device(gpu) == cudaSuccess) return gpu.compute_capability();
  cudaGetLastError();
  return 0;
}

const char* launch(const Params& p, Kernel kernel) {
  if (p.batch == 0) return nullptr;
  Gpu gpu{};
  cudaError_t error = query_device(gpu);
  if (error == cudaSuccess) {
    const char* lacks = lacking(p, gpu);
    if (lacks != nullptr) return lacks;
    error = launch_kernel(p, gpu, kernel);
  }
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, which the caller gets from us
  return cudaGetErrorString(error);
}

}  // namespace dflash::kv_injection
