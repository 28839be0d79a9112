// SPDX-License-Identifier: Apache-2.0
// Profiles a warp of the sm_90a kernel: the SM's clock at the end of each phase. Enabled by DFLASH_STAMP_PHASES, with
// which tools/kernel_phases.cu is compiled; otherwise a stamp compiles to no instruction.
#pragma once

#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// Phases that a warp has completed, in this order. Each further span of a range stamps again from kSpan on.
enum class Phase {
  kStart,       // nothing yet
  kGridBefore,  // griddepcontrol.wait
  kSpan,        // one warp's schedule, for which the others wait
  kLoads,       // loads of rows issued, pages looked up, copies of the first steps issued
  kRows,        // the block's rows stored and visible to all warps
  kFirstStep,   // first step of the team; not stamped if it has none
  kContext,     // last step of the team
  kBlock,       // the block, if it is this team's
  kResults,     // results stored and visible to all warps
  kMerge,       // merged and written
};
inline constexpr int kPhases = static_cast<int>(Phase::kMerge) + 1;

#ifdef DFLASH_STAMP_PHASES
inline constexpr int kStampedCtas = 320, kStampedWarps = 12;
// Clock of each phase; 0 if it was not stamped.
__device__ long long phase_stamps[kStampedCtas][kStampedWarps][kPhases];

DFLASH_DEVICE void stamp(Phase phase) {
  const int cta = ctaid_y() * static_cast<int>(gridDim.x) + ctaid_x();
  if (tid_x() % 32 == 0 && cta < kStampedCtas) {
    phase_stamps[cta][tid_x() / 32][static_cast<int>(phase)] = clock64();
  }
}
#else
DFLASH_DEVICE void stamp(Phase) {}
#endif

}  // namespace dflash::kv_injection
