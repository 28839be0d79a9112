// SPDX-License-Identifier: Apache-2.0
// Stands in for the kernel in a build without nvcc.
#include "kv_injection_attention/kernel.h"

namespace dflash::kv_injection {

const char* launch(const Params&) {
  return "this library was built without CUDA; build it with nvcc: "
         "cmake -S plugins -B build/plugins -DDFLASH_CUDA=ON && cmake --build build/plugins";
}

}  // namespace dflash::kv_injection
