// SPDX-License-Identifier: Apache-2.0
// The teams of a CTA read different keys for the same rows: here their states become one, the first team's.
#pragma once

#include "kv_injection_attention/kernel/state.cuh"
#include "kv_injection_attention/kernel/stream.cuh"

namespace dflash::kv_injection {

// A thread of one team and its like in another hold the same rows and columns, so values are passed from thread to
// thread: [team - 1][value][thread of the team].
class Mailbox {
 public:
  DFLASH_DEVICE Mailbox(const Plan& plan, const Worker& worker, int team, int values)
      : step_(team_threads(plan) * 4),
        next_(shared_memory() + plan.stages_at + (team - 1) * values * step_ +
              worker.team_thread() * 4) {}

  DFLASH_DEVICE void put(float value) {
    store_word(next_, as_bits(value));
    next_ += step_;
  }
  DFLASH_DEVICE float take() {
    const float value = as_float(load_word(next_));
    next_ += step_;
    return value;
  }

 private:
  int step_;
  Shared next_;
};

// Ends with the whole state in the first team; all threads call. The results pass through the stages.
template <int D, int kTiles>
DFLASH_DEVICE void merge_teams(State<D, kTiles>& state, const Plan& plan, const Worker& worker) {
  constexpr int kValues = kTiles * (D / 2 + 4);
  if (plan.teams == 1) return;
  cta_sync();  // every team is done with its stages
  if (worker.team > 0) {
    Mailbox box(plan, worker, worker.team, kValues);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        box.put(state.maximum(t, half));
        box.put(state.sum[t][half]);
#pragma unroll
        for (int n = 0; n < D / 4; ++n) box.put(state.output[t][n / 2][2 * half + n % 2]);
      }
    }
  }
  cta_sync();
  if (worker.team > 0) return;
  for (int team = 1; team < plan.teams; ++team) {
    Mailbox box(plan, worker, team, kValues);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float maximum = box.take();
        state.raise_maximum(t, half, maximum);
        const float by = exp2_fast(maximum - state.maximum(t, half));
        state.sum[t][half] += by * box.take();
#pragma unroll
        for (int n = 0; n < D / 4; ++n) {
          state.output[t][n / 2][2 * half + n % 2] += by * box.take();
        }
      }
    }
  }
}

}  // namespace dflash::kv_injection
