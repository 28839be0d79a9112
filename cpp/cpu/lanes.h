// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash {

inline constexpr int64_t kLanes = 16;  // floats of a vector (cpu/vectors.h), whatever registers there are

}  // namespace dflash
