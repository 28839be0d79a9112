// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/params.h"
#include "sampling/penalties.h"

namespace dflash {

struct Logits {
  std::span<const float> row(int64_t index) const { return {data + index * vocab, static_cast<size_t>(vocab)}; }

  const float* data;  // [rows, V]
  int64_t rows;
  int64_t vocab;
};

// Distributions that proposals were drawn from. Row r has probability probabilities[r * width + j] for tokens[r * width
// + j], distinct within a row, and 0 for every other token.
struct ProposalDistributions {
  std::span<const int64_t> tokens;        // [K, width]
  std::span<const double> probabilities;  // [K, width]
  size_t width = 0;                       // 0: no distributions, each proposal had probability 1
};

// Returns the tokens that one verify step emits: the accepted prefix of `proposals` [K] and one more token, the
// correction of the first rejected proposal or the bonus token (docs/sampling.md).
//
// Row r of `logits` [K + 1, V] is for output position `position` + r. Its token is a function of the row's filtered
// distribution and of u(seed, position + r) only; the proposal is accepted if it is that token. `history` is read only
// with a penalty; its output then has `position` tokens.
//
// Throws std::invalid_argument. Rows after the last emitted token are not read.
std::vector<int64_t> verify_block(const Logits& logits, std::span<const int64_t> proposals, const SamplerParams& params,
                                  uint64_t position, const History& history,
                                  const ProposalDistributions& distributions = {});

// Does the same for the answer of a running request, whose history is counted if it has a penalty; adds the emitted
// tokens to `counts`. Ends before the first row that has no distribution (`largest`), as if the rows from there on and
// the proposals that they follow did not exist; there may be fewer rows than proposals.
std::vector<int64_t> accept_block(const Logits& logits, std::span<const int64_t> proposals, const SamplerParams& params,
                                  uint64_t position, TokenCounts* counts, const ProposalDistributions& distributions);

// Fills `out` [V] with the distribution that verify_block samples from, given a row [V] of logits.
void token_probabilities(std::span<const float> logits, const SamplerParams& params, const History& history,
                         std::span<double> out);

// log softmax(logits[r])[tokens[r]] of the target's raw logits: no penalty, temperature or filter.
std::vector<double> token_logprobs(const Logits& logits, std::span<const int64_t> tokens);

}  // namespace dflash
