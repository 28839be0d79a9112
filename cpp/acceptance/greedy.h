// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dflash {

// Length of the longest prefix of `proposals` [K] that equals the target's own greedy choices.
//
// `verified` [K + 1] holds the target's argmax after the anchor and after each proposal, so
// verified[i] is the token that plain greedy decoding emits where proposals[i] stands, and
// verified[accepted] is the bonus token (DFlash, arXiv 2602.06036, section 3).
//
// Throws std::invalid_argument unless verified.size() == proposals.size() + 1.
int64_t accept_greedy(std::span<const int64_t> proposals, std::span<const int64_t> verified);

// The argmax of each row, and whether the logit that stands there is finite; a NaN is its row's
// argmax, as in NumPy.
struct Choices {
  std::vector<int64_t> tokens;
  std::vector<bool> are_finite;
};

// Of rows [rows, vocab] of FLOAT logits, or of BF16 ones as their bits. Throws
// std::invalid_argument where vocab is 0.
Choices argmax_and_finite(const float* logits, size_t rows, size_t vocab);
Choices argmax_and_finite(const uint16_t* logits, size_t rows, size_t vocab);

}  // namespace dflash
