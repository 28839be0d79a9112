// SPDX-License-Identifier: Apache-2.0
#include "acceptance/greedy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/vectors.h"

namespace dflash {

namespace {

// Values of a block, in which the argmax is looked for once its block is known.
constexpr size_t kBlock = 1024;
// Vectors at once: comparisons wait for each other.
constexpr size_t kVectors = 4;

struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  bool has_nan = false;

  void update(float x) {
    value = x > value ? x : value;
    has_nan |= x != x;
  }
  bool is_at(float x) const { return has_nan ? x != x : x == value; }
};

template <typename Logit>
Largest largest(const Logit* logits, size_t count) {
  Floats best[kVectors];
  Ints nans[kVectors]{};
  for (Floats& each : best) each = Floats{} - std::numeric_limits<float>::infinity();
  constexpr size_t kStep = kVectors * kLanes;
  const size_t whole = count - count % kStep;
  for (size_t i = 0; i < whole; i += kStep) {
    for (size_t j = 0; j < kVectors; ++j) {
      const Floats x = load(logits + i + j * kLanes);
      best[j] = max(x, best[j]);
      nans[j] |= x != x;
    }
  }
  Largest found;
  for (size_t j = 0; j < kVectors; ++j) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      found.update(best[j][lane]);
      found.has_nan |= nans[j][lane] != 0;
    }
  }
  for (size_t i = whole; i < count; ++i) found.update(to_float(logits[i]));
  return found;
}

bool any_lane(Ints mask) {
  bool found = false;
  for (int64_t lane = 0; lane < kLanes; ++lane) found |= mask[lane] != 0;
  return found;
}

// Where the largest value stands first, or the first NaN.
template <typename Logit>
const Logit* find_first(const Logit* begin, const Logit* end, const Largest& best) {
  constexpr int64_t kStep = kVectors * kLanes;
  for (; end - begin >= kStep; begin += kStep) {
    Ints matches{};
    for (int64_t at = 0; at < kStep; at += kLanes) {
      const Floats x = load(begin + at);
      matches |= best.has_nan ? x != x : x == best.value;
    }
    if (any_lane(matches)) break;
  }
  return std::find_if(begin, end, [&](Logit logit) { return best.is_at(to_float(logit)); });
}

template <typename Logit>
Choices choose(const Logit* logits, size_t rows, size_t vocab) {
  if (vocab == 0) throw std::invalid_argument("expected a logit at least in each row, found none");
  Choices choices;
  for (const Logit* row = logits; row != logits + rows * vocab; row += vocab) {
    Largest best;
    size_t block = 0;
    for (size_t begin = 0; begin < vocab && !best.has_nan; begin += kBlock) {
      const Largest found = largest(row + begin, std::min(kBlock, vocab - begin));
      if (found.has_nan || found.value > best.value) best = found, block = begin;
    }
    choices.tokens.push_back(find_first(row + block, row + vocab, best) - row);
    choices.are_finite.push_back(!best.has_nan && std::isfinite(best.value));
  }
  return choices;
}

}  // namespace

Choices argmax_and_finite(const float* logits, size_t rows, size_t vocab) {
  return choose(logits, rows, vocab);
}

Choices argmax_and_finite(const uint16_t* logits, size_t rows, size_t vocab) {
  return choose(logits, rows, vocab);
}

int64_t accept_greedy(std::span<const int64_t> proposals, std::span<const int64_t> verified) {
  if (verified.size() != proposals.size() + 1) {
    throw std::invalid_argument("expected one verified token more than proposals (" +
                                std::to_string(proposals.size() + 1) + "), found " +
                                std::to_string(verified.size()));
  }
  return std::ranges::mismatch(proposals, verified).in1 - proposals.begin();
}

}  // namespace dflash
