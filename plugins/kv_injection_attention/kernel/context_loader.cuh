// SPDX-License-Identifier: Apache-2.0
// Prefetches the K and V rows of a team's context steps to shared memory.
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
  // Recomputed on every use to save registers.
  DFLASH_DEVICE int lane() const { return tid_x() & 31; }
  DFLASH_DEVICE int team_thread() const { return row_group * 32 + lane(); }
};

DFLASH_DEVICE int team_threads(const LaunchConfig& config) { return config.row_groups * 32; }

// One step of a team in a stage of shared memory: kKeys rows of K, then kKeys rows of V.
template <int D, int kElementBytes, int kKeys>
struct ContextStep {
  using Rows = StoredRows<D * kElementBytes>;
  static constexpr int kStride = Rows::kStride;
  static constexpr int kValuesAt = kKeys * kStride;
  static constexpr int kStageBytes = 2 * kValuesAt;
  static constexpr int kRowBytes = D * kElementBytes;
};

// All stages but the one in use are being filled.
template <int D, int kElementBytes>
class ContextLoader {
 public:
  static constexpr int kStep = step_keys(D, kElementBytes);
  static constexpr int kStages = num_stages(D, kElementBytes);
  using Step = ContextStep<D, kElementBytes, kStep>;
  static constexpr int kStride = Step::kStride;
  static constexpr int kValuesAt = Step::kValuesAt;

  // `span` must outlive the loader, which holds a reference instead of a copy to save registers.
  DFLASH_DEVICE ContextLoader(const Params& p, const LaunchConfig& config, const Worker& worker, const StoredSpan& span)
      : p_(p), config_(config), worker_(worker), span_(span) {
    const ContextSpan now = span.load();
    rows_left_ = now.key_end - now.key_begin - worker.team * kStep;
    stage_ = stages_begin();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i, stage_ += kStageBytes) copy_step(rows_left_ - i * team_keys());
    // stage_ is the last stage now, which in the ring precedes the first.
    rows_left_ += team_keys();
  }

  // Advances to the team's next step. Returns false after the last.
  DFLASH_DEVICE bool next() {
    rows_left_ -= team_keys();
    if (rows_left_ <= 0) return false;
    cp_async_wait_group<kStages - 2>();
    // After the barrier every thread's copies of this step have arrived, and the stage of the step before is free.
    bar_sync(1 + worker_.team, 32 * warps());
    copy_step(rows_left_ - (kStages - 1) * team_keys());
    stage_ = stage_ == stages_begin() + (kStages - 1) * kStageBytes ? stages_begin() : stage_ + kStageBytes;
    return true;
  }

  // Rows of the span from the step's first row on, and the address of the step's rows, K and then V. Rows after the end
  // of the span are 0.
  DFLASH_DEVICE int rows_left() const { return rows_left_; }
  DFLASH_DEVICE Shared rows() const { return stage_; }

  // The span's steps are dealt to the teams in turn. After the last step: the number of turns until this team is next.
  DFLASH_DEVICE int turns_ahead() const { return -rows_left_ / kStep; }

 private:
  static constexpr int kRowBytes = Step::kRowBytes;
  static constexpr int kStageBytes = Step::kStageBytes;
  // A warp copies kCopyRows rows at a time with kCopyLanes lanes each. Every lane has a vector of 16 bytes, unless D is
  // 96.
  static constexpr int kVectors = kRowBytes / 16;
  static constexpr int kCopyLanes = kVectors == 6 ? 8 : kVectors == 12 ? 16 : kVectors;
  static constexpr int kCopyRows = 32 / kCopyLanes;
  static constexpr int kChunks = kStep / kChunkRows;
  static_assert(kStep % kChunkRows == 0 && kChunkRows % kCopyRows == 0 && 32 % kChunks == 0);
  static_assert(kCopyRows % Step::Rows::kPeriod == 0);

  // Copies the team's next step into stage_; `left` rows of the span remain from the step's first row on.
  DFLASH_DEVICE void copy_step(int left) {
    if (left > 0) {
      if (chunk_ % 32 == 0) find_chunks(span_.load());
      const unsigned lane = worker_.lane(), row_of_copy = lane / kCopyLanes, vector = lane % kCopyLanes;
      const ContextStrides strides(p_);
      const unsigned first = worker_.row_group * kCopyRows + row_of_copy;
      left -= static_cast<int>(first);
      Shared at = stage_ + Step::Rows::at(first, vector * 16);
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
    }
    cp_async_commit_group();  // even if empty, because cp_async_wait_group counts groups
  }

  DFLASH_DEVICE void find_chunks(const ContextSpan& span) {
    const int first = span.key_begin + worker_.team * kStep, kv_head = ctaid_x() / config_.row_tiles;
    chunks_.refill(
        chunk_, span.key_end,
        [&](unsigned chunk) {
          return first + static_cast<int>(chunk / kChunks * team_keys() + chunk % kChunks * kChunkRows);
        },
        [&](int key) { return find_chunk(p_, span_, span, kv_head, key); });
  }

  // Rows that the warps of a team copy at a time.
  DFLASH_DEVICE int copy_rows() const { return warps() * kCopyRows; }
  DFLASH_DEVICE int warps() const { return config_.row_groups; }
  // Distance between two steps of the team.
  DFLASH_DEVICE int team_keys() const { return teams() * kStep; }
  DFLASH_DEVICE int teams() const { return config_.teams; }
  DFLASH_DEVICE Shared stages_begin() const {
    return shared_memory() + config_.stages_at + worker_.team * (kStages * kStageBytes);
  }

  const Params& p_;
  const LaunchConfig& config_;
  const Worker& worker_;
  const StoredSpan& span_;
  ChunkAddresses chunks_;
  unsigned chunk_ = 0;  // the team's next chunk to be copied
  int rows_left_;       // rows of the span from the step's first row on
  Shared stage_;        // the stage in use
};

}  // namespace dflash::kv_injection
