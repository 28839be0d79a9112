// SPDX-License-Identifier: Apache-2.0
// In the place of the kernels in a plugin library: a GPU of the compute capability that DFLASH_TEST_GPU says, which runs
// nothing.
#include <cstdlib>

#include "kv_injection_attention/append.h"
#include "kv_injection_attention/kernel.h"

namespace dflash::kv_injection {

int32_t compute_capability() { return std::atoi(std::getenv("DFLASH_TEST_GPU")); }
bool dflash_experimental_kernels() { return false; }
const char* dflash_launch_attention(const Params&, Kernel) { return "no kernels"; }
const char* dflash_launch_append(const AppendParams&) { return "no kernels"; }

}  // namespace dflash::kv_injection
