// SPDX-License-Identifier: Apache-2.0
// A team's steps of the context: K and V rows, copied to shared memory ahead of their use.
#pragma once

#include "kv_injection_attention/kernel/context_pages.cuh"
#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/primitives.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"

namespace dflash::kv_injection {

// A thread's team, and its warp's place among the team's row groups.
struct Worker {
  int team, row_group;

  DFLASH_DEVICE explicit Worker(const LaunchConfig& config) {
    const int thread = tid_x();
    team = thread / 32 % config.teams;
    row_group = thread / 32 / config.teams;
  }
  // Recomputed, not kept: registers are scarce.
  DFLASH_DEVICE int lane() const { return tid_x() & 31; }
  DFLASH_DEVICE int team_thread() const { return row_group * 32 + lane(); }
};

DFLASH_DEVICE int team_threads(const LaunchConfig& config) { return config.row_groups * 32; }

// One step of a team: kKeys rows of K and behind them as many of V, in a stage of shared memory.
template <int D, int kElementBytes, int kKeys>
struct ContextStep {
  using Rows = StoredRows<D * kElementBytes>;
  static constexpr int kStride = Rows::kStride;
  static constexpr int kValuesAt = kKeys * kStride;
  static constexpr int kStageBytes = 2 * kValuesAt;
  static constexpr int kRowBytes = D * kElementBytes;
};

// All stages but one are being copied at a time.
template <int D, int kElementBytes>
class ContextLoader {
 public:
  static constexpr int kStep = step_keys(D, kElementBytes);
  static constexpr int kStages = num_stages(D, kElementBytes);
  using Step = ContextStep<D, kElementBytes, kStep>;
  static constexpr int kStride = Step::kStride;
  static constexpr int kValuesAt = Step::kValuesAt;

  DFLASH_DEVICE ContextLoader(const Params& p, const LaunchConfig& config, const Worker& worker,
                              const ContextSpan& span, int kv_head)
      : p_(p), config_(config), worker_(worker), span_(span), kv_head_(kv_head) {
    const int first_key = span.key_begin + worker.team * kStep;
    steps_left_ = steps() > worker.team ? ceil_div(steps() - worker.team, teams()) : 0;
    key_ = first_key - team_keys();
    rows_to_copy_ = span.key_end - first_key;

    stage_ = stages_begin() + (kStages - 1) * kStageBytes;  // one before the first
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy_step(i < steps_left_, stages_begin() + i * kStageBytes);
  }

  // Goes on to the team's next step. False after the last.
  DFLASH_DEVICE bool next() {
    if (steps_left_ == 0) return false;
    cp_async_wait_group<kStages - 2>();
    // Now all threads' copies of this step are there, and all are done with the step before: its stage is free.
    bar_sync(1 + worker_.team, 32 * warps());
    copy_step(steps_left_ >= kStages, stage_);
    stage_ = stage_ == stages_begin() + (kStages - 1) * kStageBytes ? stages_begin() : stage_ + kStageBytes;
    key_ += team_keys();
    --steps_left_;
    return true;
  }

  // The span's steps, which are dealt to the teams in turn.
  DFLASH_DEVICE int steps() const { return ceil_div(max(0, span_.key_end - span_.key_begin), kStep); }
  // After the last: the turn, counted from the end of the steps, that the team is next.
  DFLASH_DEVICE int turn_behind() const { return (key_ + team_keys() - span_.key_begin) / kStep - steps(); }

  // The step's first key, and its rows: K and behind them V. Rows from the span's end on are 0.
  DFLASH_DEVICE int key() const { return key_; }
  DFLASH_DEVICE Shared rows() const { return stage_; }

 private:
  static constexpr int kRowBytes = Step::kRowBytes;
  static constexpr int kStageBytes = Step::kStageBytes;
  // A warp copies kCopyRows rows at a time, each with kCopyLanes lanes, all of which have a vector of 16 bytes unless
  // D is 96.
  static constexpr int kVectors = kRowBytes / 16;
  static constexpr int kCopyLanes = kVectors == 6 ? 8 : kVectors == 12 ? 16 : kVectors;
  static constexpr int kCopyRows = 32 / kCopyLanes;
  static constexpr int kChunks = kStep / kChunkRows;
  static_assert(kStep % kChunkRows == 0 && kChunkRows % kCopyRows == 0 && 32 % kChunks == 0);
  static_assert(kCopyRows % Step::Rows::kPeriod == 0);

  // The next of the team's steps, if there is one.
  DFLASH_DEVICE void copy_step(bool exists, Shared stage) {
    if (exists) {
      if (chunk_ % 32 == 0) {
        const auto key_of = [&](unsigned chunk) {
          const int first_key = span_.key_begin + worker_.team * kStep;
          return first_key + static_cast<int>(chunk / kChunks * team_keys() + chunk % kChunks * kChunkRows);
        };
        chunks_.refill(chunk_, span_.key_end, key_of, [&](int key) { return find_chunk(p_, span_, kv_head_, key); });
      }
      const unsigned lane = worker_.lane(), row_of_copy = lane / kCopyLanes, vector = lane % kCopyLanes;
      const ContextStrides strides(p_);
      const unsigned first = worker_.row_group * kCopyRows + row_of_copy;
      int left = rows_to_copy_ - static_cast<int>(first);
      Shared at = stage + Step::Rows::at(first, vector * 16);
      const unsigned char* chunk = kChunks == 1 ? chunks_.at(chunk_) + vector * 16 : nullptr;
#pragma unroll 1
      for (unsigned row = first; row < kStep; row += copy_rows()) {
        if (kChunks > 1) chunk = chunks_.at(chunk_ + row / kChunkRows) + vector * 16;
        const unsigned char* k = chunk + row % kChunkRows * strides.row;
        if (kVectors == kCopyLanes || vector < kVectors) {
          cp_async(at, k, left > 0);
          cp_async(at + kValuesAt, k + strides.to_values, left > 0);
        }
        at += copy_rows() * kStride;
        left -= copy_rows();
      }
      chunk_ += kChunks;
      rows_to_copy_ -= team_keys();
    }
    cp_async_commit_group();  // an empty group too: cp_async_wait_group counts groups
  }

  // Rows that the warps of a team copy between them at a time.
  DFLASH_DEVICE int copy_rows() const { return warps() * kCopyRows; }
  DFLASH_DEVICE int warps() const { return config_.row_groups; }
  // From one of the team's steps to its next.
  DFLASH_DEVICE int team_keys() const { return teams() * kStep; }
  DFLASH_DEVICE int teams() const { return config_.teams; }
  DFLASH_DEVICE Shared stages_begin() const {
    return shared_memory() + config_.stages_at + worker_.team * (kStages * kStageBytes);
  }

  const Params& p_;
  const LaunchConfig& config_;
  const Worker& worker_;
  const ContextSpan& span_;
  int kv_head_;
  ChunkAddresses chunks_;
  unsigned chunk_ = 0;  // the first of the next step to be copied, of the team's
  int rows_to_copy_;    // from there to the span's end
  Shared stage_;        // in use
  int key_;             // its first
  int steps_left_;      // of the team, after it
};

}  // namespace dflash::kv_injection
