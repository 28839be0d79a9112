// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/params.h"

namespace dflash {

// The tokens before a row.
struct History {
  std::span<const int64_t> prompt;
  std::span<const int64_t> output;
};

// Throws std::invalid_argument unless all ids are in [0, end).
void check_ids(const char* what, std::span<const int64_t> ids, int64_t end);

// Counts of each token of a vocabulary in a history.
class TokenCounts {
 public:
  // Throws std::invalid_argument for a negative id or an output id outside the vocabulary. A prompt may contain ids
  // beyond the logits (images, a padded embedding), which cannot be emitted.
  TokenCounts(int64_t vocab, const History& history);

  void add_output(int64_t token);

  // The tokens of the history and `others`, each once, and then how often each of them is in the output: 0, in the
  // prompt only; -1, in `others` only. Leaves out others beyond the vocabulary.
  std::vector<int64_t> table(std::span<const int64_t> others) const;

  // Applies the penalties to a row [V] of logits, in double, rounded once to float32.
  void penalise(std::span<float> row, const SamplerParams& params) const;

 private:
  static constexpr int32_t kNotInHistory = -1;  // 0: only in the prompt

  void add_to_history(int64_t token);

  std::vector<int32_t> in_output_;       // [V]
  std::vector<int64_t> history_tokens_;  // each token once
};

}  // namespace dflash
