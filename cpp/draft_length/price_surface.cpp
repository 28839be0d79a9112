// SPDX-License-Identifier: Apache-2.0
#include "draft_length/price_surface.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace dflash {

namespace {

// Standard deviations at the number of requests asked for: as shares of a step without drafts
constexpr double kFixed = 1.0;
constexpr double kByRequest = 1.0;
// and of what whole blocks add to it, or of another such step where that is more: what is nearly
// free may not be so for more requests.
constexpr double kByToken = 1.5;
constexpr double kDrafting = 0.7;
constexpr double kDraftingByRequest = 0.7;
// The smooth rest, as a share of the step itself, and over which share of all lengths, and how many
// doublings of the requests, it changes.
constexpr double kBend = 0.2;
constexpr double kBendLengths = 0.25;
constexpr double kBendDoublings = 1.5;
// What each place has by itself.
constexpr double kOwn = 0.02;
// No price is below this share of a plain step, and no relation surer than that variance.
constexpr double kLowest = 0.02;
constexpr double kLeast = 1e-9;

constexpr double square(double x) { return x * x; }

// What is expected where nothing is known but the scale: of what drafts add, drafting's share is
// what variances say.
double mean(const Place& place, const Scale& scale) {
  constexpr double drafting = square(kDrafting) + square(kDraftingByRequest);
  constexpr double share = drafting / (drafting + square(kByToken));
  const double drafts = place.drafting ? share + (1 - share) * place.share : 0.0;
  return scale.plain + drafts * (scale.whole - scale.plain);
}

double covariance(const Place& a, const Place& b, const Scale& scale) {
  const double requests = a.requests * b.requests;
  double drafts = requests * square(kByToken) * a.share * b.share;
  if (a.drafting && b.drafting) drafts += square(kDrafting) + square(kDraftingByRequest) * requests;
  double bend = 0.0;
  if (a.drafting == b.drafting) {
    const double doublings = std::log2(a.requests / b.requests) / kBendDoublings;
    const double lengths = (a.share - b.share) / kBendLengths;
    bend = square(kBend) * std::exp(-(square(doublings) + square(lengths)) / 2);
    if (doublings == 0.0 && lengths == 0.0) bend += square(kOwn);
  }
  return square(scale.plain) * (square(kFixed) + requests * square(kByRequest)) +
         square(std::max(scale.whole - scale.plain, scale.plain)) * drafts +
         mean(a, scale) * mean(b, scale) * bend;
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
                         const Scale& scale, const std::vector<Place>& asked) {
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
      between[i][j] = between[j][i] = covariance(places[i], places[j], scale);
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
        const double own = sum + known[i].variance - dot(lower[i], lower[i], i);
        lower[i][i] = std::sqrt(std::max(own, kLeast * square(scale.plain)));
      }
    }
  }

  std::vector<double> residuals(N);  // L^-1 (what was found - what the mean says)
  for (size_t i = 0; i < N; ++i) {
    double expected = 0.0;
    for (const Term& term : known[i].terms)
      expected += term.weight * mean(places[term.place], scale);
    residuals[i] = forward(lower, i, residuals.data(), known[i].seconds - expected);
  }
  Estimate found{std::vector<double>(M), Matrix(M, M)};
  Matrix across(M, N);  // (L^-1 K(known, asked))^T
  std::vector<double> to_places(P);
  for (size_t i = 0; i < M; ++i) {
    for (size_t j = 0; j < P; ++j) to_places[j] = covariance(places[j], asked[i], scale);
    for (size_t j = 0; j < N; ++j) {
      double sum = 0.0;
      for (const Term& term : known[j].terms) sum += term.weight * to_places[term.place];
      across[i][j] = forward(lower, j, across[i], sum);
    }
    const double seconds = mean(asked[i], scale) + dot(across[i], residuals.data(), N);
    found.seconds[i] = std::max(seconds, kLowest * scale.plain);
    for (size_t j = 0; j <= i; ++j) {
      const double known_of_both = dot(across[i], across[j], N);
      found.covariance[i][j] = found.covariance[j][i] =
          covariance(asked[i], asked[j], scale) - known_of_both;
    }
  }
  return found;
}

}  // namespace dflash
