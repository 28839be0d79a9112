// SPDX-License-Identifier: Apache-2.0
#include "sampling/penalties.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace dflash {

void check_ids(const char* what, std::span<const int64_t> ids, int64_t end) {
  for (const int64_t id : ids) {
    if (id >= 0 && id < end) continue;
    throw std::invalid_argument(std::string("expected ") + what + " in [0, " + std::to_string(end) + "), found " +
                                std::to_string(id));
  }
}

TokenCounts::TokenCounts(int64_t vocab, const History& history)
    : in_output_(static_cast<size_t>(vocab), kNotInHistory) {
  check_ids("prompt_ids", history.prompt, std::numeric_limits<int64_t>::max());
  check_ids("output_ids", history.output, vocab);
  for (const int64_t token : history.prompt) {
    if (token < vocab) add_to_history(token);
  }
  for (const int64_t token : history.output) add_output(token);
}

void TokenCounts::add_to_history(int64_t token) {
  int32_t& count = in_output_[static_cast<size_t>(token)];
  if (count != kNotInHistory) return;
  count = 0;
  history_tokens_.push_back(token);
}

void TokenCounts::add_output(int64_t token) {
  add_to_history(token);
  ++in_output_[static_cast<size_t>(token)];
}

std::vector<int64_t> TokenCounts::table(std::span<const int64_t> others) const {
  std::vector<int64_t> tokens = history_tokens_;
  for (const int64_t token : others) {
    const bool is_new = token >= 0 && token < std::ssize(in_output_) &&
                        in_output_[static_cast<size_t>(token)] == kNotInHistory &&
                        std::find(tokens.begin() + std::ssize(history_tokens_), tokens.end(), token) == tokens.end();
    if (is_new) tokens.push_back(token);
  }
  const size_t size = tokens.size();
  tokens.resize(2 * size);
  for (size_t i = 0; i < size; ++i) tokens[size + i] = in_output_[static_cast<size_t>(tokens[i])];
  return tokens;
}

void TokenCounts::penalise(std::span<float> row, const SamplerParams& params) const {
  for (const int64_t token : history_tokens_) {
    const int32_t count = in_output_[static_cast<size_t>(token)];
    double logit = row[static_cast<size_t>(token)];
    logit = logit < 0 ? logit * params.repetition_penalty : logit / params.repetition_penalty;
    logit -= params.frequency_penalty * count;
    if (count > 0) logit -= params.presence_penalty;
    row[static_cast<size_t>(token)] = static_cast<float>(logit);
  }
}

}  // namespace dflash
