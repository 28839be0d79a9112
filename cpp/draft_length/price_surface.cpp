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
// No price is below this share of the scale, and no relation surer than that variance.
constexpr double kLowest = 0.02;
constexpr double kLeast = 1e-9;

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

Estimate estimate_prices(const std::vector<Place>& places, const std::vector<Relation>& known,
                         double scale, const std::vector<Place>& asked) {
  const size_t P = places.size(), N = known.size(), M = asked.size();
  for (const Relation& relation : known) {
    for (const Term& term : relation.terms) {
      if (term.place >= P)
        throw std::invalid_argument("expected terms of the places, found others");
    }
  }
  Matrix between(P, P);
  for (size_t i = 0; i < P; ++i) {
    for (size_t j = 0; j <= i; ++j)
      between[i][j] = between[j][i] = covariance(places[i], places[j]);
  }

  // Cholesky: L L^T = K(known, known) + noise.
  Matrix lower(N, N);
  for (size_t i = 0; i < N; ++i) {
    for (size_t j = 0; j <= i; ++j) {
      double sum = 0.0;
      for (const Term& a : known[i].terms) {
        for (const Term& b : known[j].terms) sum += a.weight * b.weight * between[a.place][b.place];
      }
      if (j < i) {
        lower[i][j] = forward(lower, j, lower[i], sum);
      } else {
        const double own = sum + known[i].variance / square(scale);
        lower[i][i] = std::sqrt(std::max(own - dot(lower[i], lower[i], i), kLeast));
      }
    }
  }

  std::vector<double> residuals(N);  // L^-1 (what was found - what the mean says)
  for (size_t i = 0; i < N; ++i) {
    double mean = 0.0;
    for (const Term& term : known[i].terms) mean += term.weight * scale;
    residuals[i] = forward(lower, i, residuals.data(), known[i].seconds - mean);
  }
  Estimate found{std::vector<double>(M), Matrix(M, M)};
  Matrix across(M, N);  // (L^-1 K(known, asked))^T
  std::vector<double> to_places(P);
  for (size_t i = 0; i < M; ++i) {
    for (size_t j = 0; j < P; ++j) to_places[j] = covariance(places[j], asked[i]);
    for (size_t j = 0; j < N; ++j) {
      double sum = 0.0;
      for (const Term& term : known[j].terms) sum += term.weight * to_places[term.place];
      across[i][j] = forward(lower, j, across[i], sum);
    }
    found.seconds[i] = std::max(scale + dot(across[i], residuals.data(), N), kLowest * scale);
    for (size_t j = 0; j <= i; ++j) {
      const double known_of_both = dot(across[i], across[j], N);
      found.covariance[i][j] = found.covariance[j][i] =
          (covariance(asked[i], asked[j]) - known_of_both) * square(scale);
    }
  }
  return found;
}

}  // namespace dflash
