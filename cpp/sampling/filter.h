// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "sampling/params.h"

namespace dflash {

// top-k, then top-p of what it leaves, then min-p, as one number: tokens that weigh less go.
//
//     top-k   fewer than k tokens weigh more
//     top-p   tokens that weigh more have less than top_p of the mass
//     min-p   the weight is at least min_p of the largest
//
// Tokens of equal weight stay or go together. The most likely token always stays.
uint64_t lowest_kept_weight(std::span<const uint64_t> weights, const SamplerParams& params);

// The sum of weights that are at least `lowest`.
uint64_t mass_from(std::span<const uint64_t> weights, uint64_t lowest);

}  // namespace dflash
