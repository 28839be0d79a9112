// SPDX-License-Identifier: Apache-2.0
#include "decoding/answer.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace dflash {

std::span<const int64_t> accept_chosen(std::span<const int64_t> choices, std::span<const int64_t> proposals) {
  size_t count = 0;
  while (count < choices.size() && count < proposals.size() && proposals[count] == choices[count]) ++count;
  return choices.first(std::min(count + 1, choices.size()));
}

Answer::Answer(const SamplerParams& params, std::vector<int64_t> prompt, int64_t max_tokens,
               std::vector<int64_t> stop_ids)
    : params_(params), prompt_(std::move(prompt)), max_tokens_(max_tokens), stop_ids_(std::move(stop_ids)) {
  if (max_tokens < 0) throw std::invalid_argument("expected max_tokens >= 0, found " + std::to_string(max_tokens));
  std::ranges::sort(stop_ids_);
}

std::vector<int64_t> Answer::accept(const Logits& logits, std::span<const int64_t> proposals,
                                    const ProposalDistributions& distributions) {
  std::vector<int64_t> emitted =
      accept_block(logits, proposals, params_, tokens_.size(), counts(logits.vocab), distributions);
  num_counted_ += emitted.size();
  return emitted;
}

std::vector<int64_t> Answer::table_of_counts(int64_t vocab, std::span<const int64_t> others) {
  const TokenCounts* known = counts(vocab);
  if (known == nullptr) throw std::invalid_argument("expected an answer with a penalty, found one without");
  return known->table(others);
}

Ending Answer::append(double time, std::span<const int64_t> drafts, bool is_forced, std::span<const int64_t> tokens) {
  if (tokens.empty()) return Ending::kError;
  if (num_left() < 1) throw std::invalid_argument("expected an answer that goes on, found its last token");
  const auto is_stop = [this](int64_t token) { return std::ranges::binary_search(stop_ids_, token); };
  auto taken = std::min(static_cast<int64_t>(tokens.size()), num_left());
  const auto stop = std::ranges::find_if(tokens.first(static_cast<size_t>(taken)), is_stop) - tokens.begin();
  const bool stops = stop < taken;
  if (stops) taken = stop + 1;
  passes_.push_back({.time = time,
                     .first_token = static_cast<int32_t>(tokens_.size()),
                     .first_draft = static_cast<int32_t>(drafts_.size()),
                     .num_accepted = static_cast<int32_t>(taken < std::ssize(tokens) ? taken : taken - 1),
                     .is_forced = is_forced});
  drafts_.insert(drafts_.end(), drafts.begin(), drafts.end());
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.begin() + taken);
  if (!stops && num_left() > 0) return Ending::kNone;
  counts_.reset();
  return stops ? Ending::kStop : Ending::kLength;
}

void Answer::cut(int64_t num_tokens) {
  if (passes_.empty() || num_tokens <= passes_.back().first_token || num_tokens > std::ssize(tokens_)) {
    throw std::invalid_argument("expected a number of tokens that ends in the last pass, found " +
                                std::to_string(num_tokens));
  }
  if (num_tokens == std::ssize(tokens_)) return;
  tokens_.resize(static_cast<size_t>(num_tokens));
  counts_.reset();
  passes_.back().num_accepted = static_cast<int32_t>(num_tokens) - passes_.back().first_token;
}

std::span<const int64_t> Answer::part(size_t pass, std::span<const int64_t> all, int32_t Pass::* first) const {
  const auto begin = static_cast<size_t>(passes_[pass].*first);
  const size_t end = pass + 1 < passes_.size() ? static_cast<size_t>(passes_[pass + 1].*first) : all.size();
  return all.subspan(begin, end - begin);
}

TokenCounts* Answer::counts(int64_t vocab) {
  if (!params_.has_penalties()) return nullptr;
  if (!counts_ || num_counted_ > tokens_.size() || vocab_ != vocab) {  // not all tokens of a pass need be appended
    counts_.emplace(vocab, History{.prompt = prompt_, .output = {}});
    num_counted_ = 0;
    vocab_ = vocab;
  }
  check_ids("output_ids", tokens().subspan(num_counted_), vocab);
  for (; num_counted_ < tokens_.size(); ++num_counted_) counts_->add_output(tokens_[num_counted_]);
  return &*counts_;
}

}  // namespace dflash
