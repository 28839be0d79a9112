// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "draft_length/matrix.h"

namespace dflash {

// A step: the number of requests as a multiple of that asked for, the share of the block that each
// verifies, and whether there is drafting.
struct Place {
  double requests;
  double share;
  bool drafting;
};

// Seconds that a step takes, about: without drafts, and of whole blocks.
struct Scale {
  double plain;
  double whole;
};

// Of the price of one of the known places.
struct Term {
  size_t place;
  double weight;
};

// What steps have shown: that a sum of prices is this many seconds, and the variance of it. A price
// by itself, or two that stand in a ratio.
struct Relation {
  std::vector<Term> terms;
  double seconds;
  double variance;
};

struct Estimate {
  std::vector<double> seconds;  // [M]
  Matrix covariance;            // [M, M]
};

// Prices of steps as a surface over requests and drafts: what some steps took says what others
// will. A Gaussian process (Rasmussen and Williams 2006, chapter 2): a step costs something by
// itself, for each request, for each token, and for drafting, by itself and for each request;
// beyond that it bends smoothly, and each place a little by itself. Each of these has a scale of
// its own: blocks may take ten times as long as plain steps, and say little of those. What is not
// known of a price is known, too: its covariance. What is known are linear functions of prices, of
// those at `places`.
Estimate estimate_prices(const std::vector<Place>& places, const std::vector<Relation>& known,
                         const Scale& scale, const std::vector<Place>& asked);

}  // namespace dflash
