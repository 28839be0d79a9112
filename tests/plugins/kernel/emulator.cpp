// SPDX-License-Identifier: Apache-2.0
#include "emulator.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "fiber.h"

namespace emulator {
namespace {

Cta* running = nullptr;

}  // namespace

Cta& cta() { return *running; }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "emulator: CTA (%d, %d), thread %d: ", cta().x, cta().y, cta().thread());
  std::vfprintf(stderr, format, arguments);
  std::fprintf(stderr, "\n");
  std::exit(3);
}

struct Warp {
  const char* instruction = nullptr;
  int arrived = 0;
  void* lanes[128];
};

Cta::Cta(int threads, int shared_bytes, int x_, int y_, uint32_t seed)
    : x(x_),
      y(y_),
      clocks_(threads, std::vector<uint32_t>(threads)),
      groups_(threads),
      open_(threads),
      products_(threads),
      fences_(threads),
      shared_(new unsigned char[shared_bytes]),
      shared_bytes_(shared_bytes),
      words_(shared_bytes / 4),
      seed_(seed),
      random_(seed) {
  std::memset(shared_.get(), 0xff, shared_bytes);  // NaN in every format
  for (int i = 0; i < threads / 32; ++i) warps_.push_back(std::make_unique<Warp>());
  for (int i = 0; i < threads / 128; ++i) warpgroups_.push_back(std::make_unique<Warp>());
}

Cta::~Cta() = default;

void Cta::run(const std::function<void()>& kernel) {
  start(kernel);
  while (ready()) run_some(1 << 30);
}

void Cta::start(const std::function<void()>& kernel, bool early) {
  early_ = early;
  for (int i = 0; i < threads(); ++i) {
    clocks_[i][i] = 1;
    fibers_.push_back(std::make_unique<Fiber>(kernel));
    ready_.push_back(i);
  }
}

void Cta::run_some(int turns) {
  running = this;
  for (; turns > 0 && !ready_.empty(); --turns) {
    current_ = pick();
    fibers_[current_]->resume();
    if (!fibers_[current_]->ended) continue;
    if (!open_[current_].empty() || std::ranges::any_of(groups_[current_], [](auto& g) { return !g.empty(); })) {
      fail("ends with copies under way");
    }
    if (!products().open.empty() || !products().groups.empty()) fail("ends with products under way");
  }
  if (ready_.empty() && waiting_for_grid_.empty()) expect_ended();
}

void Cta::previous_grid_ended() {
  early_ = false;
  wake(std::exchange(waiting_for_grid_, {}));
}

bool Cta::ended() const {
  return std::ranges::all_of(fibers_, [](auto& fiber) { return fiber->ended; });
}

void Cta::wait_for_previous_grid() {
  if (!early_) return;
  waiting_for_grid_.push_back(current_);
  block();
}

void Cta::expect_waited(const char* what) {
  if (early_) fail("%s before the grid before its own has ended", what);
}

void Cta::expect_ended() {
  for (current_ = 0; current_ < threads(); ++current_) {
    if (!fibers_[current_]->ended) fail("waits for threads that never come");
  }
}

int Cta::pick() {
  if (seed_ > 1) std::swap(ready_.front(), ready_[random_() % ready_.size()]);
  const int thread = seed_ == 1 ? ready_.back() : ready_.front();
  seed_ == 1 ? ready_.pop_back() : ready_.pop_front();
  return thread;
}

void Cta::block() { fibers_[current_]->pause(); }

void Cta::wake(const std::vector<int>& threads) { ready_.insert(ready_.end(), threads.begin(), threads.end()); }

void Cta::together_any(const char* instruction, void* mine, const std::function<void(void**)>& all, int lanes) {
  if (lanes == 128 && current_ / 128 >= static_cast<int>(warpgroups_.size())) fail("is in no whole warpgroup");
  Warp& warp = lanes == 32 ? *warps_[current_ / 32] : *warpgroups_[current_ / 128];
  if (warp.arrived > 0 && warp.instruction != instruction) {
    fail("is at %s, other lanes of its warp at %s", instruction, warp.instruction);
  }
  warp.instruction = instruction;
  warp.lanes[current_ % lanes] = mine;
  if (++warp.arrived < lanes) return block();
  all(warp.lanes);
  warp.arrived = 0;
  for (int i = current_ / lanes * lanes; i < current_ / lanes * lanes + lanes; ++i) {
    if (i != current_) ready_.push_back(i);
  }
}

bool Cta::barrier(int id, int threads, bool value) {
  if (id < 0 || id > 15 || threads % 32 != 0) fail("barrier %d for %d threads", id, threads);
  Barrier& barrier = barriers_[id];
  if (!barrier.waiting.empty() && barrier.threads != threads) {
    fail("barrier %d for %d threads, others wait for %d", id, threads, barrier.threads);
  }
  barrier.threads = threads;
  barrier.any |= value;
  barrier.waiting.push_back(current_);
  if (static_cast<int>(barrier.waiting.size()) < threads) {
    block();
    return barrier.last;
  }
  barrier.last = std::exchange(barrier.any, false);
  synchronize(barrier.waiting);
  std::erase(barrier.waiting, current_);
  wake(std::exchange(barrier.waiting, {}));
  return barrier.last;
}

void Cta::synchronize_warp() {
  char mine = 0;
  together<char>("syncwarp", mine, [this](char**) {
    std::vector<int> threads(32);
    std::iota(threads.begin(), threads.end(), current_ / 32 * 32);
    synchronize(threads);
  });
}

void Cta::synchronize(const std::vector<int>& threads) {
  std::vector<uint32_t> all(clocks_.size());
  for (int t : threads) {
    for (size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], clocks_[t][i]);
  }
  for (int t : threads) {
    clocks_[t] = all;
    ++clocks_[t][t];
  }
}

Word& Cta::word(uint32_t at) {
  if (at % 4 != 0) fail("misaligned shared memory address %u", at);
  if (at + 4 > static_cast<uint32_t>(shared_bytes_)) {
    fail("shared memory address %u of %d bytes", at, shared_bytes_);
  }
  return words_[at / 4];
}

void Cta::check_ordered(const Word::Access& before, const char* what, uint32_t at) {
  if (before.thread < 0 || before.time <= clocks_[current_][before.thread]) return;
  fail("races with thread %d: %s shared memory address %u", before.thread, what, at);
}

void Cta::record_read(Word& w, uint32_t at) {
  if (w.copies > 0) fail("reads shared memory address %u while a copy into it is under way", at);
  check_ordered(w.write, "reads what that wrote at", at);
  for (const Word::Access& write : w.relaxed) check_ordered(write, "reads what that wrote at", at);
  remember(w.reads);
}

void Cta::remember(std::vector<Word::Access>& accesses) {
  const uint32_t now = clocks_[current_][current_];
  const auto own = std::ranges::find(accesses, current_, &Word::Access::thread);
  own == accesses.end() ? accesses.push_back({current_, now}) : void(own->time = now);
}

void Cta::record_write(Word& w, uint32_t at) {
  if (w.products > 0) fail("writes shared memory address %u while a product reads it", at);
  check_ordered(w.write, "writes what that wrote at", at);
  for (const Word::Access& read : w.reads) check_ordered(read, "writes what that reads at", at);
  for (const Word::Access& write : w.relaxed) check_ordered(write, "writes what that wrote at", at);
  w.reads.clear();
  w.relaxed.clear();
  w.write = {current_, clocks_[current_][current_]};
}

uint32_t Cta::read_word(uint32_t at) {
  record_read(word(at), at);
  touch_registers();
  uint32_t value;
  std::memcpy(&value, &shared_[at], 4);
  return value;
}

void Cta::write_word(uint32_t at, uint32_t value) {
  Word& w = word(at);
  if (w.copies > 0) fail("writes shared memory address %u while a copy into it is under way", at);
  record_write(w, at);
  std::memcpy(&shared_[at], &value, 4);
}

void Cta::write_word_relaxed(uint32_t at, uint32_t value) {
  Word& w = word(at);
  if (w.copies > 0) fail("writes shared memory address %u while a copy into it is under way", at);
  if (w.products > 0) fail("writes shared memory address %u while a product reads it", at);
  check_ordered(w.write, "writes what that wrote at", at);
  for (const Word::Access& read : w.reads) check_ordered(read, "writes what that reads at", at);
  if (!w.relaxed.empty() && value != peek(at)) fail("writes another value than others to address %u", at);
  remember(w.relaxed);
  std::memcpy(&shared_[at], &value, 4);
}

void Cta::fence_proxy() {
  fences_[current_].push_back(clocks_[current_][current_]);
  ++clocks_[current_][current_];
}

// Products read in the async proxy [9.7.15.4]: what was written before must have been fenced by its writer, and the
// fence be ordered before the product. They read at any time until they are waited for.
void Cta::begin_product_read(uint32_t at) {
  Word& w = word(at);
  const int writer = w.write.thread;
  if (writer < 0) fail("a product reads shared memory address %u, which nobody wrote", at);
  if (w.copies > 0) fail("a product reads shared memory address %u while a copy into it is under way", at);
  const auto fence = std::ranges::lower_bound(fences_[writer], w.write.time);
  if (fence == fences_[writer].end()) {
    fail("a product reads shared memory address %u, which thread %d wrote without a proxy fence", at, writer);
  }
  check_ordered({writer, *fence}, "a product reads what that wrote at", at);
  ++w.products;
}

void Cta::end_product_read(uint32_t at) {
  Word& w = word(at);
  --w.products;
  record_read(w, at);
}

uint32_t Cta::peek(uint32_t at) const {
  uint32_t value;
  std::memcpy(&value, &shared_[at], 4);
  return value;
}

// A copy may land at any time until it is waited for: it counts as a write now and then, and lands as late as it may.
void Cta::copy(uint32_t to, const void* from) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("misaligned copy to %u", to);
  for (uint32_t at = to; at < to + 16; at += 4) {
    Word& w = word(at);
    record_write(w, at);
    ++w.copies;
    std::memset(&shared_[at], 0xff, 4);
  }
  open_[current_].push_back({to, from});
}

void Cta::commit() { groups_[current_].push_back(std::exchange(open_[current_], {})); }

void Cta::wait(int pending) {
  if (pending < 0 || pending > 6) fail("waits for all but %d groups of copies", pending);
  auto& groups = groups_[current_];
  while (static_cast<int>(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) land(copy);
    groups.pop_front();
  }
}

void Cta::land(const Copy& copy) {
  for (uint32_t i = 0; i < 16; i += 4) {
    Word& w = word(copy.to + i);
    record_write(w, copy.to + i);
    --w.copies;
  }
  if (copy.from) {
    std::memcpy(&shared_[copy.to], copy.from, 16);
  } else {
    std::memset(&shared_[copy.to], 0, 16);
  }
}

}  // namespace emulator
