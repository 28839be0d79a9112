// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash {

// This thread's memory for `count` floats, aligned for any vector, its contents undefined. A later call with the same
// `use` may move it. Kernels take theirs from here: a std::vector of their own would be compiled for their instruction
// set and, as a weak symbol, be the one that the linker keeps for all machines. In oneDNN: a primitive's scratchpad, in
// its library mode.
float* scratch(int64_t count, int use = 0);

inline constexpr int kScratchUses = 2;

}  // namespace dflash
