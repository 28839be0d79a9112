// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sampling/params.h"
#include "sampling/penalties.h"
#include "sampling/sampling.h"

namespace dflash {

// Why no token follows.
enum class Ending { kNone, kStop, kLength, kError };

// Leading proposals that equal the target's own `choices` after the last token and after each proposal, and the choice
// after them. There may be fewer choices than that, since the logits after them are not finite.
std::span<const int64_t> accept_chosen(std::span<const int64_t> choices, std::span<const int64_t> proposals);

// The answer to one request as it grows: its tokens, and what each pass of the target added.
class Answer {
 public:
  struct Pass {
    double time;
    int32_t first_token;  // place in the answer
    int32_t first_draft;  // place in the drafts of all passes
    int32_t num_accepted;
    bool is_forced;  // a grammar forced the drafts
  };

  // The answer ends with one of the stop ids or the `max_tokens`-th token. `prompt` is read only with a penalty.
  Answer(const SamplerParams& params, std::vector<int64_t> prompt, int64_t max_tokens, std::vector<int64_t> stop_ids);

  // Tokens that a pass emits after the answer so far, by its logits (accept_block). Changes only the counts of tokens.
  std::vector<int64_t> accept(const Logits& logits, std::span<const int64_t> proposals,
                              const ProposalDistributions& distributions);

  // With a penalty: how often each token of the prompt, the answer so far and `others` is in them (TokenCounts::table).
  std::vector<int64_t> table_of_counts(int64_t vocab, std::span<const int64_t> others);

  // Appends the tokens of a pass, up to one that ends the answer. Without a token, logits were not finite: an error.
  Ending append(double time, std::span<const int64_t> drafts, bool is_forced, std::span<const int64_t> tokens);

  // Shortens the answer to `num_tokens`, at least one of which is the last pass's.
  void cut(int64_t num_tokens);

  int64_t num_left() const { return max_tokens_ - static_cast<int64_t>(tokens_.size()); }
  std::span<const int64_t> tokens() const { return tokens_; }
  std::span<const Pass> passes() const { return passes_; }
  std::span<const int64_t> tokens(size_t pass) const { return part(pass, tokens_, &Pass::first_token); }
  std::span<const int64_t> drafts(size_t pass) const { return part(pass, drafts_, &Pass::first_draft); }

 private:
  std::span<const int64_t> part(size_t pass, std::span<const int64_t> all, int32_t Pass::* first) const;
  TokenCounts* counts(int64_t vocab);

  SamplerParams params_;
  std::vector<int64_t> prompt_;
  int64_t max_tokens_;
  std::vector<int64_t> stop_ids_;  // ascending
  std::vector<int64_t> tokens_;
  std::vector<int64_t> drafts_;
  std::vector<Pass> passes_;
  std::optional<TokenCounts> counts_;  // with a penalty: how often each token occurs, in the first `num_counted_`
  size_t num_counted_ = 0;
  int64_t vocab_ = 0;
};

}  // namespace dflash
