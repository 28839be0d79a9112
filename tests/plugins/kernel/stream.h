// SPDX-License-Identifier: Apache-2.0
// A stream whose grids may start early, as programmatic dependent launch lets them: CTAs of all of them take turns.
// Without such launches, each grid starts when the one before has ended.
//
// The first is more than a GPU does, where a grid's CTAs start once all of the one before have asked for it. Order on
// the stream is kept by griddepcontrol_wait() alone, which holds a thread until every CTA of the grid before its own,
// and of that grid only, has ended.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "emulator.h"

namespace emulator {

class Stream {
 public:
  // `seed` picks CTAs and threads: 0 the latest grid first, 1 the earliest and in descending order, others at random.
  Stream(uint32_t seed, bool starts_early) : seed_(seed), starts_early_(starts_early), random_(seed) {}
  void launch(int x, int y, int threads, int shared_bytes, std::function<void()> kernel);
  // Runs until all grids have ended.
  void run();

 private:
  struct Grid {
    int x, threads, shared_bytes;
    std::function<void()> kernel;
    std::deque<int> waiting;                       // CTAs that have not started
    std::vector<std::unique_ptr<Cta>> resident{};  // grids that have started and not ended
    bool ended() const { return waiting.empty() && resident.empty(); }
  };

  void start_ctas();
  bool run_one();
  void remove_ended();
  bool is_early(size_t grid) const { return grid > 0 && !grids_[grid - 1].ended(); }

  static constexpr size_t kResident = 2;  // CTAs of a grid at a time
  uint32_t seed_;
  bool starts_early_;
  std::mt19937 random_;
  std::deque<Grid> grids_;
};

}  // namespace emulator
