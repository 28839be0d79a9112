// SPDX-License-Identifier: Apache-2.0
#include "draft_length/acceptance_counts.h"

#include <algorithm>
#include <stdexcept>

namespace dflash {

namespace {

// Weight of older steps against the next one: a memory of about 50 steps.
constexpr double kDecay = 0.98;
// Passes' weight of the guess that a position holds as often as the one before it, and the guess
// for the first one.
constexpr double kPrior = 2.0;
constexpr double kFirst = 0.5;
// Passes' weight of the guess that one request's drafts hold as often as others'.
constexpr double kPooled = 6.0;
// Requests that are remembered.
constexpr size_t kMaxEnded = 32;

}  // namespace

void AcceptanceCounts::Count::fade() {
  judged *= kDecay;
  accepted *= kDecay;
}

void AcceptanceCounts::Count::see(bool has_held) {
  judged += 1.0;
  accepted += has_held;
}

double AcceptanceCounts::Count::share(double guess, double weight) const {
  return (accepted + weight * guess) / (judged + weight);
}

AcceptanceCounts::AcceptanceCounts(size_t num_positions) : pooled_(num_positions) {
  if (num_positions == 0) throw std::invalid_argument("expected a position at least");
}

// A request's own counts fade at all positions, because what it did not look at becomes less
// certain; those of all together only where one looked: what is seldom reached would else be
// believed for ever.
void AcceptanceCounts::observe(const std::vector<int64_t>& slots,
                               const std::vector<int64_t>& proposed,
                               const std::vector<int64_t>& accepted) {
  if (slots.size() != proposed.size() || slots.size() != accepted.size()) {
    throw std::invalid_argument("expected slots, proposed and accepted of one length");
  }
  int64_t looked_at = 0;
  for (const int64_t length : proposed) looked_at = std::max(looked_at, length);
  looked_at = std::min(looked_at, static_cast<int64_t>(num_positions()));
  for (int64_t position = 0; position < looked_at; ++position) pooled_[position].fade();

  for (size_t i = 0; i < slots.size(); ++i) {
    Counts& own = own_.try_emplace(slots[i], num_positions()).first->second;
    for (Count& count : own) count.fade();
    const int64_t judged = std::min({accepted[i] + 1, proposed[i], looked_at});
    for (int64_t position = 0; position < judged; ++position) {
      own[position].see(position < accepted[i]);
      pooled_[position].see(position < accepted[i]);
    }
  }
}

void AcceptanceCounts::release(int64_t slot) {
  const auto found = own_.find(slot);
  if (found == own_.end()) return;
  if (found->second.front().judged >= kPooled) {
    ended_.push_back(std::move(found->second));
    if (ended_.size() > kMaxEnded) ended_.pop_front();
  }
  own_.erase(found);
}

Matrix AcceptanceCounts::reached(const std::vector<int64_t>& slots, bool like_earlier_ones) const {
  const std::vector<double> pooled = pooled_shares();
  Matrix reached(slots.size(), num_positions());
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto own = own_.find(slots[i]);
    const Counts* earlier =
        like_earlier_ones && !ended_.empty() ? &ended_[slots[i] % ended_.size()] : nullptr;
    double share = 1.0;
    for (size_t position = 0; position < num_positions(); ++position) {
      double guess = pooled[position];
      if (earlier != nullptr) guess = (*earlier)[position].share(guess, kPooled);
      if (own != own_.end()) guess = own->second[position].share(guess, kPooled);
      share *= guess;
      reached[i][position] = share;
    }
  }
  return reached;
}

std::vector<double> AcceptanceCounts::expected_tokens() const {
  std::vector<double> tokens{1.0};
  double reached = 1.0;
  for (const double share : pooled_shares()) {
    reached *= share;
    tokens.push_back(tokens.back() + reached);
  }
  return tokens;
}

std::vector<double> AcceptanceCounts::pooled_shares() const {
  std::vector<double> shares;
  double share = kFirst;
  for (const Count& count : pooled_) shares.push_back(share = count.share(share, kPrior));
  return shares;
}

}  // namespace dflash
