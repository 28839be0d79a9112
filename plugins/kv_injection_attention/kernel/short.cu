// SPDX-License-Identifier: Apache-2.0
// Launches short_attention(), which no GPU has run.
#include "kv_injection_attention/kernel/attention.cuh"
#include "kv_injection_attention/kernel/launch.cuh"

namespace dflash::kv_injection {
namespace {

template <int D, class T>
cudaError_t launch_format(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  const bool fp8 = p.cache_dtype == DType::kF8E4M3;
  return start_attention(fp8 ? short_attention<D, T, true> : short_attention<D, T, false>, p, gpu, config,
                         config.shared_limit);
}

template <int D>
cudaError_t launch_head_dim(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  return p.block_dtype == DType::kF16 ? launch_format<D, F16>(p, gpu, config) : launch_format<D, BF16>(p, gpu, config);
}

}  // namespace

cudaError_t launch_short(const Params& p, const Gpu& gpu) {
  if (!short_fits(p)) return cudaErrorNotSupported;
  const LaunchConfig config = make_short_launch_config(p, gpu.sms, gpu.cta_bytes);
  return p.head_dim == 64 ? launch_head_dim<64>(p, gpu, config) : launch_head_dim<128>(p, gpu, config);
}

}  // namespace dflash::kv_injection
