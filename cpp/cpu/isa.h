// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace dflash {

// Corresponds to oneDNN's cpu_isa_t. Each set has its own translation units, whereas oneDNN generates code.
enum class Isa { kAvx512, kAvx2, kScalar };

// Names of the instruction sets that this build has kernels for and this CPU supports, best first.
std::vector<std::string> usable_isas();

// Parses a name; "best" is the first of usable_isas(). Throws std::invalid_argument unless `name` is usable.
Isa isa_named(std::string_view name);

// Whether the CPU also has AVX512-BF16.
bool has_avx512_bf16();

}  // namespace dflash
