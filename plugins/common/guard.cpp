// SPDX-License-Identifier: Apache-2.0
#include "common/guard.h"

#include <cstdio>

namespace dflash {

void report(const char* where, const char* what) noexcept {
  std::fprintf(stderr, "[dflash_trt] %s: %s\n", where, what);
}

}  // namespace dflash
