// SPDX-License-Identifier: Apache-2.0
// A warpgroup's steps of the context. As context_loader.cuh, but what the loop needs is kept instead of recomputed, and
// there is no branch: a copy beyond the segment's end writes zeros to a stage that is not read.
#pragma once

#include "kv_injection_attention/kernel/context_loader.cuh"
#include "kv_injection_attention/kernel/wgmma_plan.h"

namespace dflash::kv_injection {

template <int D, int kElementBytes>
class WgmmaContextLoader {
 public:
  using Step = ContextStep<D, kElementBytes, kWgmmaKeys>;
  static constexpr int kStride = Step::kStride;
  static constexpr int kValuesAt = Step::kValuesAt;

  // `thread` is of the team.
  DFLASH_DEVICE WgmmaContextLoader(const Params& p, const Plan& plan, int team, int thread, const Segment& segment,
                                   int kv_head)
      : p_(p), barrier_(1 + team) {
    const int row = thread / kCopyLanes, vector = thread % kCopyLanes;  // the first that this thread copies
    const int first_key = segment.key_begin + team * kWgmmaKeys;
    const int64_t offset = Step::offset(p, segment, kv_head, first_key + row, vector);
    copy_from_ = static_cast<const unsigned char*>(p.k_cache) + offset;
    rows_left_ = segment.key_end - first_key + kTeamKeys;
    rows_to_copy_ = segment.key_end - first_key - row;
    copy_to_ = row * kStride + vector * 16;

    const Shared begin = shared_memory() + plan.stages_at + team * (kStages * kStageBytes);
    last_stage_ = begin + (kStages - 1) * kStageBytes;
    stage_ = last_stage_;  // one before the first
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy_step(begin + i * kStageBytes);
  }

  // Goes on to the team's next step. False after the last, when no copy is under way.
  DFLASH_DEVICE bool next() {
    rows_left_ -= kTeamKeys;
    if (rows_left_ <= 0) {
      cp_async_wait_group<0>();
      return false;
    }
    cp_async_wait_group<kStages - 2>();
    // Now all threads' copies of this step are there, and all are done with the step before: its stage is free.
    bar_sync(barrier_, 32 * kWarpgroupWarps);
    copy_step(stage_);
    stage_ = stage_ == last_stage_ ? stage_ - (kStages - 1) * kStageBytes : stage_ + kStageBytes;
    return true;
  }

  // Rows of the segment from the step's first on, and the step's stage: K and behind it V. Those from the segment's
  // end on are 0.
  DFLASH_DEVICE int rows_left() const { return rows_left_; }
  DFLASH_DEVICE Shared rows() const { return stage_; }

 private:
  static constexpr int kTeams = wgmma_teams(D);
  static constexpr int kTeamKeys = kTeams * kWgmmaKeys;  // from one of the team's steps to its next
  static constexpr int kStages = wgmma_stages(D, kElementBytes);
  static constexpr int kStageBytes = Step::kStageBytes;
  static constexpr int kRowBytes = Step::kRowBytes;
  static_assert(kStageBytes == wgmma_stage_bytes(D, kElementBytes));
  static constexpr int kCopyLanes = kRowBytes / 16;
  static constexpr int kCopyRows = 32 * kWarpgroupWarps / kCopyLanes;  // that a team copies at a time
  static_assert(kWgmmaKeys % kCopyRows == 0);

  // The first of the team's steps that is not copied yet.
  DFLASH_DEVICE void copy_step(Shared stage) {
    // V's row lies as far behind K's as the caches do.
    const int64_t to_values = reinterpret_cast<intptr_t>(p_.v_cache) - reinterpret_cast<intptr_t>(p_.k_cache);
    const unsigned char* from = copy_from_;
#pragma unroll
    for (int row = 0; row < kWgmmaKeys; row += kCopyRows) {
      const Shared to = stage + copy_to_ + row * kStride;
      cp_async(to, from, rows_to_copy_ > row);
      cp_async(to + kValuesAt, from + to_values, rows_to_copy_ > row);
      from += kCopyRows * row_step();
    }
    copy_from_ += kTeamKeys * row_step();
    rows_to_copy_ -= kTeamKeys;
    cp_async_commit_group();
  }

  DFLASH_DEVICE int row_step() const { return Step::row_step(p_); }

  const Params& p_;
  int barrier_;
  const unsigned char* copy_from_;  // K of the row that this thread copies first of the next step
  int rows_to_copy_;                // rows from there to the segment's end
  Shared copy_to_;                  // where in a stage it goes
  int rows_left_;                   // of the segment, from the step's first on
  Shared stage_, last_stage_;  // the stage in use, and the last of the team's
};

}  // namespace dflash::kv_injection
