// SPDX-License-Identifier: Apache-2.0
// The teams of a CTA attend to different keys with the same rows: their states are merged into the first team's.
#pragma once

#include "kv_injection_attention/kernel/state.cuh"
#include "kv_injection_attention/kernel/context_loader.cuh"

namespace dflash::kv_injection {

// Values that a thread of one team passes to the thread of another that holds the same rows and columns, in the shared
// memory of the stages: [team - 1][value][thread of the team].
class ExchangeBuffer {
 public:
  DFLASH_DEVICE ExchangeBuffer(const Plan& plan, const Worker& worker, int team, int values)
      : step_(team_threads(plan) * 4),
        next_(shared_memory() + plan.stages_at + (team - 1) * values * step_ +
              worker.team_thread() * 4) {}

  DFLASH_DEVICE void store(float value) {
    st_shared(next_, as_bits(value));
    next_ += step_;
  }
  DFLASH_DEVICE float load() {
    const float value = as_float(ld_shared(next_));
    next_ += step_;
    return value;
  }

 private:
  int step_;
  Shared next_;
};

// Leaves the merged state in the first team; all threads call.
template <int D, int kTiles>
DFLASH_DEVICE void merge_teams(State<D, kTiles>& state, const Plan& plan, const Worker& worker) {
  constexpr int kValues = kTiles * (D / 2 + 4);
  if (plan.teams == 1) return;
  syncthreads();  // every team is done with its stages
  if (worker.team > 0) {
    ExchangeBuffer buffer(plan, worker, worker.team, kValues);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        buffer.store(state.maximum(t, half));
        buffer.store(state.sum[t][half]);
#pragma unroll
        for (int n = 0; n < D / 4; ++n) buffer.store(state.output[t][n / 2][2 * half + n % 2]);
      }
    }
  }
  syncthreads();
  if (worker.team > 0) return;
  for (int team = 1; team < plan.teams; ++team) {
    ExchangeBuffer buffer(plan, worker, team, kValues);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float maximum = buffer.load();
        state.raise_maximum(t, half, maximum);
        const float rescale = ex2_approx(maximum - state.maximum(t, half));
        state.sum[t][half] += rescale * buffer.load();
#pragma unroll
        for (int n = 0; n < D / 4; ++n) {
          state.output[t][n / 2][2 * half + n % 2] += rescale * buffer.load();
        }
      }
    }
  }
}

}  // namespace dflash::kv_injection
