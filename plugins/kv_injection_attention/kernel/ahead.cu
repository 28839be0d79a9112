// SPDX-License-Identifier: Apache-2.0
// Launches the sm_90a kernel with products computed ahead, which no GPU has run.
#include "kv_injection_attention/kernel/launch.cuh"
#include "kv_injection_attention/kernel/wgmma_attention.cuh"

namespace dflash::kv_injection {
namespace {

template <int D, class T>
cudaError_t launch_format(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  if (config.tile_rows == 64) {
    return start_attention(wgmma_attention<D, 64, T, true, true>, p, gpu, config, kWgmmaShared);
  }
  if constexpr (wgmma_rows(D, 80) == 80) {
    return start_attention(wgmma_attention<D, 80, T, true, true>, p, gpu, config, kWgmmaShared);
  }
  return cudaErrorInvalidValue;
}

template <int D>
cudaError_t launch_head_dim(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  return p.block_dtype == DType::kF16 ? launch_format<D, F16>(p, gpu, config) : launch_format<D, BF16>(p, gpu, config);
}

}  // namespace

cudaError_t launch_ahead(const Params& p, const Gpu& gpu) {
  if (!has_wgmma(gpu) || !wgmma_ahead_fits(p)) return cudaErrorNotSupported;
  const LaunchConfig config = make_wgmma_launch_config(p, gpu.sms, true);
  return p.head_dim == 64 ? launch_both(launch_head_dim<64>, launch_combine<64>, p, gpu, config)
                          : launch_both(launch_head_dim<128>, launch_combine<128>, p, gpu, config);
}

}  // namespace dflash::kv_injection
