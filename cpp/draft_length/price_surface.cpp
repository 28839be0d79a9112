// SPDX-License-Identifier: Apache-2.0
#include "draft_length/price_surface.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace dflash {

namespace {

// Standard deviations, as shares of the typical price, at the number of requests asked for.
constexpr double kFixed = 1.0;
constexpr double kByRequest = 1.0;
constexpr double kByToken = 1.5;
constexpr double kDrafting = 0.7;
constexpr double kDraftingByRequest = 0.7;
// The smooth rest, and over which share of all lengths, and how many doublings of the requests, it
// changes.
constexpr double kBend = 0.2;
constexpr double kBendLengths = 0.25;
constexpr double kBendDoublings = 1.5;
// What each place has by itself.
constexpr double kOwn = 0.02;

constexpr double square(double x) { return x * x; }

double covariance(const Place& a, const Place& b) {
  const double requests = a.requests * b.requests;
  double sum =
      square(kFixed) + requests * (square(kByRequest) + square(kByToken) * a.share * b.share);
  if (a.drafting && b.drafting) sum += square(kDrafting) + square(kDraftingByRequest) * requests;
  if (a.drafting == b.drafting) {
    const double doublings = std::log2(a.requests / b.requests) / kBendDoublings;
    const double lengths = (a.share - b.share) / kBendLengths;
    sum += square(kBend) * std::exp(-(square(doublings) + square(lengths)) / 2);
    if (doublings == 0.0 && lengths == 0.0) sum += square(kOwn);
  }
  return sum;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

double dot(const double* a, const double* b, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Solves L y = x in place, for row `row` of L where those before it are done.
double forward(const Matrix& lower, size_t row, const double* solved, double x) {
  return (x - dot(lower[row], solved, row)) / lower[row][row];
}

}  // namespace

Estimate estimate_prices(const std::vector<Price>& known, const std::vector<Place>& asked) {
  const size_t N = known.size(), M = asked.size();
  if (N == 0) throw std::invalid_argument("expected a price at least");
  std::vector<double> prices;
  for (const Price& price : known) prices.push_back(price.seconds);
  const double scale = median(prices);

  // Cholesky: L L^T = K(known, known) + noise.
  Matrix lower(N, N);
  for (size_t i = 0; i < N; ++i) {
    for (size_t j = 0; j < i; ++j) {
      lower[i][j] = forward(lower, j, lower[i], covariance(known[i].place, known[j].place));
    }
    const double own =
        covariance(known[i].place, known[i].place) + known[i].variance / square(scale);
    lower[i][i] = std::sqrt(own - dot(lower[i], lower[i], i));
  }

  std::vector<double> residuals(N);  // L^-1 (prices - scale)
  for (size_t i = 0; i < N; ++i) {
    residuals[i] = forward(lower, i, residuals.data(), prices[i] - scale);
  }
  Estimate found{std::vector<double>(M), Matrix(M, M)};
  Matrix across(M, N);  // (L^-1 K(known, asked))^T
  const double least = *std::min_element(prices.begin(), prices.end()) / 4;
  for (size_t i = 0; i < M; ++i) {
    for (size_t j = 0; j < N; ++j) {
      across[i][j] = forward(lower, j, across[i], covariance(known[j].place, asked[i]));
    }
    found.seconds[i] = std::max(scale + dot(across[i], residuals.data(), N), least);
    for (size_t j = 0; j <= i; ++j) {
      const double known_of_both = dot(across[i], across[j], N);
      found.covariance[i][j] = found.covariance[j][i] =
          (covariance(asked[i], asked[j]) - known_of_both) * square(scale);
    }
  }
  return found;
}

}  // namespace dflash
