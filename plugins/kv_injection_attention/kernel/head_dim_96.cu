// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/head_dim.cuh"

namespace dflash::kv_injection {

template cudaError_t launch_head_dim<96>(const Params&, const Gpu&, const LaunchConfig&);
template cudaError_t launch_combine<96>(const Params&, const Gpu&, const LaunchConfig&);

}  // namespace dflash::kv_injection
