// SPDX-License-Identifier: Apache-2.0
// A team's way through the context: step after step of K and V rows, copied to shared memory ahead of their use.
#pragma once

#include "kv_injection_attention/kernel/plan.h"
#include "kv_injection_attention/kernel/primitives.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"

namespace dflash::kv_injection {

// Who a thread is: its warp has a place among the row groups of a team.
struct Worker {
  int lane, team, row_group;

  DFLASH_DEVICE explicit Worker(const Plan& plan) {
    const int thread = thread_index();
    lane = thread % 32;
    team = thread / 32 % plan.teams;
    row_group = thread / 32 / plan.teams;
  }
  DFLASH_DEVICE int team_thread() const { return row_group * 32 + lane; }
};

DFLASH_DEVICE int team_threads(const Plan& plan) { return plan.row_groups * 32; }

template <int D, int kElementBytes>
class Stream {
 public:
  static constexpr int kStep = step_keys(D);
  static constexpr int kStride = row_bytes(D, kElementBytes);
  static constexpr int kValuesAt = kStep * kStride;

  DFLASH_DEVICE Stream(const Params& p, const Plan& plan, const Worker& worker,
                       const Segment& segment, int kv_head)
      : p_(p), plan_(plan), worker_(worker), end_(segment.key_end) {
    row_step_ = p.num_kv_heads * kRowBytes;
    const int64_t plane = int64_t{segment.slot} * p.layers + p.layer;
    head_ = plane * p.max_context * row_step_ + int64_t{kv_head} * kRowBytes;
    first_key_ = segment.key_begin + worker.team * kStep;
    const int steps = ceil_div(max(0, segment.key_end - segment.key_begin), kStep);
    steps_ = steps > worker.team ? ceil_div(steps - worker.team, plan.teams) : 0;
    const int bytes = plan.stages * plan.stage_bytes;
    begin_ = shared_memory() + plan.stages_at + worker.team * bytes;
    current_ = begin_ + bytes - plan.stage_bytes;  // one before the first
    for (int i = 0; i < plan.stages - 1; ++i) load(i, begin_ + i * plan.stage_bytes);
  }

  DFLASH_DEVICE int steps() const { return steps_; }
  DFLASH_DEVICE int key(int step) const { return first_key_ + step * plan_.teams * kStep; }

  // The rows of a step, K and behind them V; valid until the next call. Rows from the segment's end on are 0.
  DFLASH_DEVICE Shared next(int step) {
    wait_copies(plan_.stages - 2);
    // Now all threads' copies of this step are there, and all are done with the step before: its stage is free.
    group_sync(1 + worker_.team, team_threads(plan_));
    const int ahead = plan_.stages - 1;
    load(step + ahead, current_);
    current_ = current_ == begin_ + ahead * plan_.stage_bytes ? begin_ : current_ + plan_.stage_bytes;
    return current_;
  }

 private:
  static constexpr int kRowBytes = D * kElementBytes;
  static constexpr int kVectors = kRowBytes / 16;

  DFLASH_DEVICE void load(int step, Shared to) {
    if (step < steps_) {
      const int begin = key(step);
      for (int i = worker_.team_thread(); i < kStep * kVectors; i += team_threads(plan_)) {
        const int row = i / kVectors, vector = i % kVectors;
        const bool real = begin + row < end_;
        const int64_t from = head_ + int64_t{real ? begin + row : 0} * row_step_ + vector * 16;
        const Shared at = to + row * kStride + vector * 16;
        copy_async(at, static_cast<const unsigned char*>(p_.k_cache) + from, real);
        copy_async(at + kValuesAt, static_cast<const unsigned char*>(p_.v_cache) + from, real);
      }
    }
    commit_copies();  // an empty group too: wait_copies counts groups
  }

  const Params& p_;
  const Plan& plan_;
  const Worker& worker_;
  int64_t head_;  // offset of the slot's first row of this layer and kv head, in bytes
  int row_step_;  // bytes from one context row to the next
  int first_key_, end_, steps_;
  Shared begin_, current_;  // the first stage, and the one in use
};

}  // namespace dflash::kv_injection
