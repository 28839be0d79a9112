// SPDX-License-Identifier: Apache-2.0
#include "cpu/scratch.h"

#include <memory>
#include <new>

namespace dflash {
namespace {

constexpr std::align_val_t kCacheLine{64};

struct Delete {
  void operator()(float* floats) const { ::operator delete(floats, kCacheLine); }
};

struct Scratch {
  std::unique_ptr<float, Delete> floats;
  int64_t size = 0;
};

}  // namespace

float* scratch(int64_t count, int use) {
  thread_local Scratch all[kScratchUses];
  Scratch& mine = all[use];
  if (mine.size < count) {
    mine.size = 0;
    mine.floats.reset();  // before there are two
    mine.floats.reset(static_cast<float*>(::operator new(sizeof(float) * count, kCacheLine)));
    mine.size = count;
  }
  return mine.floats.get();
}

}  // namespace dflash
