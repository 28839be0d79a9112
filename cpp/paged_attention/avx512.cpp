// SPDX-License-Identifier: Apache-2.0
#include "paged_attention/attend.h"

namespace dflash {

AttentionKernels avx512_attention(CacheType type) { return attention_kernels<8>(type); }

}  // namespace dflash
