// SPDX-License-Identifier: Apache-2.0
// Prefetches a warpgroup's context steps. Unlike context_loader.cuh it keeps the loop's values instead of recomputing
// them. Each warp copies a chunk of a step.
#pragma once

#include "kv_injection_attention/kernel/context_loader.cuh"
#include "kv_injection_attention/kernel/wgmma_launch_config.h"

namespace dflash::kv_injection {

template <int D, int kElementBytes, bool kAhead>
class WgmmaContextLoader {
 public:
  using Step = ContextStep<D, kElementBytes, kWgmmaKeys>;
  static constexpr int kStride = Step::kStride;
  static constexpr int kValuesAt = Step::kValuesAt;

  // `get_span()` locates the stored span; its values would occupy registers.
  template <class GetSpan>
  DFLASH_DEVICE WgmmaContextLoader(const Params& p, const LaunchConfig& config, const ContextSpan& span,
                                   GetSpan get_span)
      : p_(p) {
    const int team = tid_x() / (32u * kWarpgroupWarps), warp = tid_x() / 32u % kWarpgroupWarps, lane = tid_x() & 31;
    const int first = lane / kCopyLanes, vector = lane % kCopyLanes;
    row_ = warp * kChunkRows + first;
    barrier_ = 1 + team;
    const int first_key = span.key_begin + team * kWgmmaKeys;
    rows_left_ = span.key_end - first_key;
    const auto stride = static_cast<unsigned>(ContextStrides(p).row);  // arbitrary if the layout is invalid
    copy_from_ = static_cast<int>(static_cast<unsigned>(first) * stride + vector * 16);
    copy_to_ = Step::Rows::at(row_, vector * 16);

    const Shared begin = shared_memory() + config.stages_at + team * (kStages * kStageBytes);
    last_stage_ = begin + (kStages - 1) * kStageBytes;
    stage_ = last_stage_;  // the stage before the first
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy_step(rows_left_ - i * kTeamKeys, begin + i * kStageBytes, get_span);
    rows_left_ += kTeamKeys;
  }

  // Advances to the team's next step. Returns false after the last, when no copy is pending.
  template <class GetSpan>
  DFLASH_DEVICE bool next(GetSpan get_span) {
    if (!find_next()) return false;
    wait_for_next();
    // After the barrier every thread's copies of this step have arrived, and the stage of the step before is free.
    bar_sync(barrier_, 32 * kWarpgroupWarps);
    take_next(get_span);
    return true;
  }
  // next() in parts, for a caller with its own barrier. rows() is the previous step until take_next(), which must
  // follow the barrier.
  DFLASH_DEVICE bool find_next() {
    rows_left_ -= kTeamKeys;
    if (rows_left_ > 0) return true;
    cp_async_wait_group<0>();
    return false;
  }
  // Waits for this thread's copies of the step after rows().
  DFLASH_DEVICE void wait_for_next() const { cp_async_wait_group<kStages - 2>(); }
  template <class GetSpan>
  DFLASH_DEVICE void take_next(GetSpan get_span) {
    copy_step(rows_left_ - (kStages - 1) * kTeamKeys, stage_, get_span);
    stage_ = next_rows();
  }

  // Rows of the span from the step's first row on, and the step's stage, K and then V. Rows after the end of the span
  // are 0.
  DFLASH_DEVICE int rows_left() const { return rows_left_; }
  DFLASH_DEVICE Shared rows() const { return stage_; }
  DFLASH_DEVICE Shared next_rows() const {
    return stage_ == last_stage_ ? stage_ - (kStages - 1) * kStageBytes : stage_ + kStageBytes;
  }

 private:
  static constexpr int kTeams = wgmma_teams(D, kAhead);
  static constexpr int kTeamKeys = kTeams * kWgmmaKeys;  // distance between two steps of the team
  static constexpr int kStages = wgmma_stages(D, kElementBytes, kAhead);
  static constexpr int kStageBytes = Step::kStageBytes;
  static constexpr int kRowBytes = Step::kRowBytes;
  static_assert(kStageBytes == wgmma_stage_bytes(D, kElementBytes));
  static constexpr int kCopyLanes = kRowBytes / 16;
  static constexpr int kCopyRows = 32 / kCopyLanes;  // rows that a warp copies at a time
  static_assert(kWgmmaKeys == kWarpgroupWarps * kChunkRows && kChunkRows % kCopyRows == 0);
  static_assert(kCopyRows % Step::Rows::kPeriod == 0);

  // Copies the team's next step; `left` rows of the span remain from its first row on.
  template <class GetSpan>
  DFLASH_DEVICE void copy_step(int left, Shared stage, GetSpan get_span) {
    if (left > 0) {
      if (chunk_ % 32 == 0) find_chunks(get_span());
      const ContextStrides strides(p_);
      const unsigned char* from = chunks_.at(chunk_++) + copy_from_;
      left -= row_;
#pragma unroll
      for (int row = 0; row < kChunkRows; row += kCopyRows) {
        const Shared to = stage + copy_to_ + row * kStride;
        cp_async(to, from, left > row);
        cp_async(to + kValuesAt, from + strides.to_values, left > row);
        from += kCopyRows * strides.row;
      }
    }
    cp_async_commit_group();  // even if empty, because cp_async_wait_group counts groups
  }

  DFLASH_DEVICE void find_chunks(const StoredSpan& stored) {
    const ContextSpan span = stored.load();
    // Warps are numbered team by team.
    const int first = span.key_begin + tid_x() / 32 * kChunkRows;
    chunks_.refill(
        chunk_, span.key_end, [&](unsigned chunk) { return first + static_cast<int>(chunk) * kTeamKeys; },
        [&](int key) { return find_chunk(p_, stored, span, ctaid_x(), key); });
  }

  const Params& p_;
  int barrier_;
  ChunkAddresses chunks_;
  unsigned chunk_ = 0;         // the warp's next chunk
  int row_;                    // first row of a step that this thread copies
  int copy_from_;              // offset of this thread's part of that row in a chunk
  Shared copy_to_;             // offset of this thread's part in a stage
  int rows_left_;              // rows of the span from the step's first row on
  Shared stage_, last_stage_;  // the stage in use, and the team's last stage
};

}  // namespace dflash::kv_injection
