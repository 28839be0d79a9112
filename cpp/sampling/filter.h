// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "sampling/params.h"

namespace dflash {

// top-k, then top-p of the remaining tokens, then min-p, as one threshold: tokens with less weight are removed.
//
//     top-k   fewer than k tokens weigh more
//     top-p   tokens that weigh more have less than top_p of the mass
//     min-p   the weight is at least min_p of the largest
//
// Tokens of equal weight are kept or removed together. The most likely token is always kept.
uint64_t lowest_kept_weight(std::span<const uint64_t> weights, const SamplerParams& params);

// Sum of the weights that are at least `lowest`.
uint64_t mass_from(std::span<const uint64_t> weights, uint64_t lowest);

}  // namespace dflash
