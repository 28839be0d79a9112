// SPDX-License-Identifier: Apache-2.0
#include "paged_attention/attend.h"

namespace dflash {

AttentionKernels avx2_attention(CacheType type) { return attention_kernels<4>(type); }

}  // namespace dflash
