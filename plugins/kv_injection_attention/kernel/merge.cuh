// SPDX-License-Identifier: Apache-2.0
// The teams of a CTA attend to different keys with the same rows. They store their results in shared memory, and all
// threads of the CTA merge and write them.
//
// Merging in registers instead would unroll to thousands of instructions that run once, because registers cannot be
// indexed. On an H100, warps that did so spent half of a short call waiting for instructions.
#pragma once

#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/primitives.cuh"
#include "kv_injection_attention/kernel/result.cuh"

namespace dflash::kv_injection {

// The values of a team's threads: [value][thread of the team], with a padding word between warps, so that lanes that
// read a row rarely conflict in a bank. A thread stores its values one after another.
class TeamResults {
 public:
  DFLASH_DEVICE TeamResults(Shared begin, int threads, int values, int team)
      : begin_(begin + team * results_bytes(threads, values)), step_((threads + kResultsPadding) * 4) {}

  DFLASH_DEVICE Shared at(int value, int thread) const { return begin_ + value * step_ + (thread + thread / 32) * 4; }
  DFLASH_DEVICE float load(int value, int thread) const { return as_float(ld_shared(at(value, thread))); }

  // Stores the values of a thread one after another.
  class Writer {
   public:
    DFLASH_DEVICE Writer(const TeamResults& results, int thread) : next_(results.at(0, thread)), step_(results.step_) {}
    DFLASH_DEVICE void store(float value) {
      st_shared(next_, as_bits(value));
      next_ += step_;
    }

   private:
    Shared next_;
    int step_;
  };

 private:
  Shared begin_;
  int step_;
};

// Merges the results that `teams` teams stored at `results` for `rows` rows of the CTA, from `first_row` of the kv head
// on, and writes them. All threads must call. Row locates a row's values: kValues per thread, kSumThreads threads that
// share the sum, at most kMostTeams teams. `threads` is the size of a team; kAllThreads that of the CTA, if it is a
// constant of the kernel.
template <class Row, int kAllThreads = 0, int D, class T, bool kWhole>
DFLASH_DEVICE void merge_and_write(const ResultWriter<D, T, kWhole>& writer, Shared results, int threads, int teams,
                                   int first_row, int rows) {
  constexpr int kMost = Row::kMostTeams, kLanes = 4;
  static_assert(kMost <= kMaxTeams);
  const int all_threads = kAllThreads > 0 ? kAllThreads : ntid_x();
  const auto of_team = [&](int team) { return TeamResults(results, threads, Row::kValues, team); };
  // Per row: the destination of its output, then the teams' weights.
  const Shared weights = results + teams * results_bytes(threads, Row::kValues);

  const int lane = tid_x() % kLanes;
#pragma unroll 1
  for (int first = tid_x() / 32 * (32 / kLanes); first < rows; first += all_threads / kLanes) {
    const int row = first + tid_x() % 32 / kLanes;
    const Row place(min(row, rows - 1));
    float maximum = kLeastMaximum, sum = 0, weight[kMost];
#pragma unroll
    for (int team = 0; team < kMost; ++team) {
      weight[team] = team < teams ? of_team(team).load(place.maximum(), place.sum_thread(0)) : kLeastMaximum;
      maximum = fmaxf(maximum, weight[team]);
    }
#pragma unroll
    for (int team = 0; team < kMost; ++team) {
      if (team >= teams) break;
      weight[team] = ex2_approx(weight[team] - maximum);
#pragma unroll
      for (int i = 0; i < Row::kSumThreads; i += kLanes) {
        sum += weight[team] * of_team(team).load(place.maximum() + 1, place.sum_thread(i + lane));
      }
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) sum += shfl_xor_sync(sum, mask);
    if (row >= rows || lane > 0) continue;
    const RowOutput output = writer.row(first_row + row, row, {maximum, sum});
    const Shared to = weights + row * kRowOutputBytes;
    st_shared(to, static_cast<uint32_t>(output.row));
#pragma unroll
    for (int team = 0; team < kMost; ++team) {
      if (team < teams) st_shared(to + 4 + team * 4, as_bits(weight[team] * output.factor));
    }
  }
  syncthreads();

// Handling two at a time would spill with head_dim 256 and, on sm_90a, add code that short calls would wait for. With
// head_dim 128 it makes nvcc 13.0 emit a longer loop over the context.
#pragma unroll(D == 256 || kWhole || (D == 64 && kAllThreads > 0) ? 1 : 2)
  for (int i = tid_x(); i < rows * (D / 2); i += all_threads) {
    const int row = i / (D / 2), column = i % (D / 2) * 2;
    const Row place(row);
    const Shared from = weights + row * kRowOutputBytes;
    float x = 0, y = 0;
#pragma unroll
    for (int team = 0; team < kMost; ++team) {
      if (team >= teams) break;
      const float weight = as_float(ld_shared(from + 4 + team * 4));
      x += weight * of_team(team).load(place.value(column), place.thread(column));
      y += weight * of_team(team).load(place.value(column + 1), place.thread(column + 1));
    }
    writer.write(static_cast<int>(ld_shared(from)), column, x, y);
  }
}

}  // namespace dflash::kv_injection
