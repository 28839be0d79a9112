// SPDX-License-Identifier: Apache-2.0
#include "paged_attention/attend.h"

namespace dflash {

AttentionKernels scalar_attention(CacheType type) { return attention_kernels<3>(type); }

}  // namespace dflash
