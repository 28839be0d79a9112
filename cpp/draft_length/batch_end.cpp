// SPDX-License-Identifier: Apache-2.0
#include "draft_length/batch_end.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <stdexcept>
#include <utility>

namespace dflash {

namespace {

// Seconds [B, K + 1] of steps over 1 .. B requests.
Matrix by_size(size_t batch_size, const std::vector<double>& sizes, const Matrix& seconds) {
  Matrix found(batch_size, seconds.cols);
  size_t next = 0;  // the first size that is not below n
  for (size_t n = 1; n <= batch_size; ++n) {
    while (next + 1 < sizes.size() && sizes[next] < n) ++next;
    const size_t before = next == 0 ? 0 : next - 1;
    const double width = sizes[next] - sizes[before];
    const double share = width > 0 ? std::clamp((n - sizes[before]) / width, 0.0, 1.0) : 0.0;
    for (size_t k = 0; k < seconds.cols; ++k) {
      found[n - 1][k] = (1 - share) * seconds[before][k] + share * seconds[next][k];
    }
  }
  return found;
}

// When requests begin, in steps, that take so many each: B at once, each other one in the place of
// the first that ends.
std::vector<double> begins(const std::vector<double>& steps, size_t B) {
  std::priority_queue<double, std::vector<double>, std::greater<>> ends;
  std::vector<double> found;
  for (const double each : steps) {
    double begin = 0.0;
    if (ends.size() == B) {
      begin = ends.top();
      ends.pop();
    }
    found.push_back(begin);
    ends.push(begin + each);
  }
  return found;
}

// Seconds until requests have ended that end at these steps, B of them at once, of length k; `ends`
// are put in order.
double total(std::vector<double>& ends, const Matrix& seconds, size_t B, size_t k) {
  std::sort(ends.begin(), ends.end());
  double sum = 0.0, begin = 0.0;
  for (size_t i = 0; i < ends.size(); ++i) {
    sum += (ends[i] - begin) * seconds[std::min(B, ends.size() - i) - 1][k];
    begin = ends[i];
  }
  return sum;
}

}  // namespace

std::vector<double> seconds_to_end(const std::vector<double>& remaining, const Matrix& reached,
                                   const std::vector<double>& sizes, const Matrix& seconds) {
  const size_t N = remaining.size(), K = reached.cols;
  if (N == 0 || reached.rows != N || seconds.cols != K + 1 || seconds.rows != sizes.size() ||
      sizes.empty() || sizes.back() < 1 || sizes.back() > N) {
    throw std::invalid_argument(
        "expected remaining [N], reached [N, K], sizes [S] up to N, and seconds [S, K + 1]");
  }
  const size_t B = static_cast<size_t>(sizes.back());
  const Matrix prices = by_size(B, sizes, seconds);
  Matrix speeds(K + 1, N);  // tokens a step
  for (size_t i = 0; i < N; ++i) {
    speeds[0][i] = 1.0;
    for (size_t k = 0; k < K; ++k) speeds[k + 1][i] = speeds[k][i] + reached[i][k];
  }

  std::vector<double> found, steps(N), ends(N);
  for (size_t k = 0; k <= K; ++k) {
    for (size_t i = 0; i < N; ++i) steps[i] = std::max(remaining[i] / speeds[k][i], 1.0);
    const std::vector<double> begin = begins(steps, B);
    for (size_t i = 0; i < N; ++i) ends[i] = begin[i] + steps[i];
    std::vector<double> order = ends;
    std::sort(order.begin(), order.end());
    const double turn = order[N - B / 2 - 1];  // the step at which B / 2 of them run, or fewer

    std::vector<std::pair<size_t, double>> left;  // requests, and tokens of each
    for (size_t i = 0; i < N; ++i) {
      if (ends[i] > turn) left.emplace_back(i, (ends[i] - turn) * speeds[k][i]);
      ends[i] = std::min(ends[i], turn);
    }
    const double first = total(ends, prices, B, k);
    double best = 0.0;
    for (size_t then = 0; then <= K; ++then) {
      std::vector<double> rest;
      for (const auto& [i, tokens] : left) rest.push_back(tokens / speeds[then][i]);
      const double last = total(rest, prices, B, then);
      best = then == 0 ? last : std::min(best, last);
    }
    found.push_back(first + best);
  }
  return found;
}

}  // namespace dflash
