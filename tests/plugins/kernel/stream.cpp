// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace emulator {
namespace {

constexpr int kAll = 1 << 30;
constexpr int kMostTurns = 4096;

}  // namespace

void Stream::launch(int x, int y, int threads, int shared_bytes, std::function<void()> kernel) {
  std::deque<int> order(static_cast<size_t>(x) * y);
  std::iota(order.begin(), order.end(), 0);
  if (seed_ == 1) std::reverse(order.begin(), order.end());
  if (seed_ > 1) std::shuffle(order.begin(), order.end(), random_);
  grids_.push_back({x, threads, shared_bytes, std::move(kernel), std::move(order)});
}

void Stream::run() {
  for (start_ctas(); run_one(); start_ctas()) remove_ended();
}

void Stream::start_ctas() {
  for (size_t i = 0; i < grids_.size(); ++i) {
    if (!starts_early_ && is_early(i)) return;
    Grid& grid = grids_[i];
    while (!grid.waiting.empty() && grid.resident.size() < kResident) {
      const int at = grid.waiting.front();
      grid.waiting.pop_front();
      auto cta = std::make_unique<Cta>(grid.threads, grid.shared_bytes, at % grid.x, at / grid.x, seed_);
      cta->start(grid.kernel, is_early(i));
      grid.resident.push_back(std::move(cta));
    }
  }
}

// Gives a CTA that can go on some turns. False if there is none.
bool Stream::run_one() {
  std::vector<Cta*> able;
  for (Grid& grid : grids_) {
    for (auto& cta : grid.resident) {
      if (cta->ready()) able.push_back(cta.get());
    }
  }
  if (able.empty()) return false;
  const size_t random = random_() % able.size();
  Cta* chosen = able[seed_ == 0 ? able.size() - 1 : seed_ == 1 ? 0 : random];
  chosen->run_some(seed_ > 1 ? 1 + random_() % kMostTurns : kAll);
  return true;
}

void Stream::remove_ended() {
  for (size_t i = 0; i < grids_.size(); ++i) {
    std::erase_if(grids_[i].resident, [](auto& cta) { return cta->ended(); });
    if (!grids_[i].ended() || i + 1 == grids_.size()) continue;
    for (auto& cta : grids_[i + 1].resident) cta->previous_grid_ended();
  }
}

}  // namespace emulator
