// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

NB_MODULE(_C, module) {
  bind_kv_injection(module);
  bind_packing(module);
  bind_paged_attention(module);
  bind_linear(module);
  bind_rms_norm(module);
  bind_sampling(module);
  bind_decoding(module);
}
