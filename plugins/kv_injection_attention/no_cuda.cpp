// SPDX-License-Identifier: Apache-2.0
// Replaces the kernel in a build without nvcc.
#include "kv_injection_attention/append.h"
#include "kv_injection_attention/kernel.h"

namespace dflash::kv_injection {

static const char* without_cuda() {
  return "this library was built without CUDA; build it with nvcc: "
         "cmake -S plugins -B build/plugins -DDFLASH_CUDA=ON && cmake --build build/plugins";
}

int32_t compute_capability() { return 0; }
bool dflash_experimental_kernels() { return false; }
const char* dflash_launch_attention(const Params&, Kernel) { return without_cuda(); }
const char* dflash_launch_append(const AppendParams&) { return without_cuda(); }

}  // namespace dflash::kv_injection
