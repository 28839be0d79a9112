// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash {

// Thread-local memory for `count` floats, uninitialised, aligned for any vector. A later call with the same `use` may
// move it. Kernels must not use std::vector: its code would be compiled for their instruction set as a weak symbol,
// which the linker might keep for all machines. Corresponds to a primitive's scratchpad in oneDNN's library mode.
float* scratch(int64_t count, int use = 0);

inline constexpr int kScratchUses = 2;

}  // namespace dflash
