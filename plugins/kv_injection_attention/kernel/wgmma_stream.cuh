// SPDX-License-Identifier: Apache-2.0
// A warpgroup's way through the context. As stream.cuh, with what the loop of sm_90a needs kept instead of found anew,
// and without a branch: a copy beyond the segment's end writes zeros to a stage that nobody reads.
#pragma once

#include "kv_injection_attention/kernel/schedule.cuh"
#include "kv_injection_attention/kernel/wgmma_plan.h"

namespace dflash::kv_injection {

template <int D, int kElementBytes>
class WgmmaStream {
 public:
  static constexpr int kStride = row_bytes(D, kElementBytes);
  static constexpr int kValuesAt = kWgmmaKeys * kStride;

  // `thread` is of the team.
  DFLASH_DEVICE WgmmaStream(const Params& p, const Plan& plan, int team, int thread, const Segment& segment,
                            int kv_head)
      : p_(p), barrier_(1 + team) {
    const int row = thread / kCopyLanes, vector = thread % kCopyLanes;  // the first that this thread copies
    const int first_key = segment.key_begin + team * kWgmmaKeys;
    const int64_t plane = int64_t{segment.slot} * p.layers + p.layer;
    const int64_t first_row = plane * p.max_context + first_key + row;
    from_ = static_cast<const unsigned char*>(p.k_cache) +
            (first_row * row_step() + int64_t{kv_head} * kRowBytes + vector * 16);
    left_ = segment.key_end - first_key + kTeamKeys;
    to_copy_ = segment.key_end - first_key - row;
    into_ = row * kStride + vector * 16;

    const Shared begin = shared_memory() + plan.stages_at + team * (kStages * kStageBytes);
    last_ = begin + (kStages - 1) * kStageBytes;
    current_ = last_;  // one before the first
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy(begin + i * kStageBytes);
  }

  // Goes on to the team's next step. False after the last, when no copy is under way.
  DFLASH_DEVICE bool next() {
    left_ -= kTeamKeys;
    if (left_ <= 0) {
      wait_copies<0>();
      return false;
    }
    wait_copies<kStages - 2>();
    // Now all threads' copies of this step are there, and all are done with the step before: its stage is free.
    group_sync(barrier_, 32 * kWarpgroupWarps);
    copy(current_);
    current_ = current_ == last_ ? current_ - (kStages - 1) * kStageBytes : current_ + kStageBytes;
    return true;
  }

  // Rows of the segment from the step's first on, and the step's rows: K and behind them V. Those from the segment's
  // end on are 0.
  DFLASH_DEVICE int left() const { return left_; }
  DFLASH_DEVICE Shared rows() const { return current_; }

 private:
  static constexpr int kTeams = wgmma_teams(D);
  static constexpr int kTeamKeys = kTeams * kWgmmaKeys;  // from one of the team's steps to its next
  static constexpr int kStages = wgmma_stages(D, kElementBytes);
  static constexpr int kStageBytes = wgmma_stage_bytes(D, kElementBytes);
  static constexpr int kRowBytes = D * kElementBytes;
  static constexpr int kCopyLanes = kRowBytes / 16;
  static constexpr int kCopyRows = 32 * kWarpgroupWarps / kCopyLanes;  // that a team copies at a time
  static_assert(kWgmmaKeys % kCopyRows == 0);

  // The first of the team's steps that is not copied yet.
  DFLASH_DEVICE void copy(Shared stage) {
    // V's row lies as far behind K's as the caches do.
    const int64_t to_values = reinterpret_cast<intptr_t>(p_.v_cache) - reinterpret_cast<intptr_t>(p_.k_cache);
    const unsigned char* from = from_;
#pragma unroll
    for (int row = 0; row < kWgmmaKeys; row += kCopyRows) {
      const Shared to = stage + into_ + row * kStride;
      copy_async(to, from, to_copy_ > row);
      copy_async(to + kValuesAt, from + to_values, to_copy_ > row);
      from += kCopyRows * row_step();
    }
    from_ += kTeamKeys * row_step();
    to_copy_ -= kTeamKeys;
    commit_copies();
  }

  // Bytes from one context row to the next. A step's, 192 rows of 1,024 heads of 256 bytes, fit in 32 bits.
  DFLASH_DEVICE int row_step() const { return p_.num_kv_heads * kRowBytes; }

  const Params& p_;
  int barrier_;
  const unsigned char* from_;  // K of the row that this thread copies first of the next step
  int to_copy_;                // rows from there to the segment's end
  Shared into_;                // where in a stage it goes
  int left_;
  Shared current_, last_;  // the stage in use, and the last of the team's
};

}  // namespace dflash::kv_injection
