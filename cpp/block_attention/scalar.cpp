// SPDX-License-Identifier: Apache-2.0
#include "block_attention/attend.h"

namespace dflash {

void attend_head_scalar(const BlockAttention& attention, int64_t request, int64_t kv_head) {
  Head(attention, request, kv_head).attend();
}

}  // namespace dflash
