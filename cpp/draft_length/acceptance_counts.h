// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "draft_length/matrix.h"

namespace dflash {

// How often the draft token at each of K positions holds where all before it did: of all requests,
// and of the one in each slot. Older passes fade.
class AcceptanceCounts {
 public:
  explicit AcceptanceCounts(size_t num_positions);

  // A step: of the request in each slot how many drafts it verified, and how many it accepted.
  void observe(const std::vector<int64_t>& slots, const std::vector<int64_t>& proposed,
               const std::vector<int64_t>& accepted);

  // The slot's next request is another one.
  void release(int64_t slot);

  // P(1) .. P(K) [B, K]: the share of each slot's passes that accept position i and all before it.
  // What is seldom judged there is taken to hold as often as for all requests together; where they
  // are to differ like_earlier_ones, as for one of those that have ended.
  Matrix reached(const std::vector<int64_t>& slots, bool like_earlier_ones) const;

  // 1 + P(1) + .. + P(k) by k = 0 .. K, of all requests together.
  std::vector<double> expected_tokens() const;

  size_t num_positions() const { return pooled_.size(); }

 private:
  struct Count {
    void fade();
    void see(bool has_held);
    double share(double guess, double weight) const;

    double judged = 0.0;
    double accepted = 0.0;
  };
  using Counts = std::vector<Count>;  // by position

  std::vector<double> pooled_shares() const;

  Counts pooled_;
  std::unordered_map<int64_t, Counts> own_;  // by slot
  std::deque<Counts> ended_;
};

}  // namespace dflash
