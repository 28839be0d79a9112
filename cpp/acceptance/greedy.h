// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace dflash {

// Length of the longest prefix of `proposals` [K] that equals the target's own greedy choices.
//
// `verified` [K + 1] holds the target's argmax after the anchor and after each proposal, so
// verified[i] is the token that plain greedy decoding emits where proposals[i] stands, and
// verified[accepted] is the bonus token (DFlash, arXiv 2602.06036, section 3).
//
// Throws std::invalid_argument unless verified.size() == proposals.size() + 1.
int64_t accept_greedy(std::span<const int64_t> proposals, std::span<const int64_t> verified);

}  // namespace dflash
