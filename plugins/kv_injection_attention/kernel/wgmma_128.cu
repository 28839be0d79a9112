// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/wgmma_launch.cuh"

namespace dflash::kv_injection {

template cudaError_t launch_wgmma_head_dim<128>(const Params&, const Gpu&, const LaunchConfig&);

}  // namespace dflash::kv_injection
