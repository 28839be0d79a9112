// SPDX-License-Identifier: Apache-2.0
// Runs the threads of one CTA as fibers on one CPU thread, and watches what the hardware would not tell.
//
// Aborts with a message on: a warp whose lanes meet in different instructions, barriers that never fill, accesses to
// shared memory out of bounds or misaligned, words read while a copy into them is pending, copies without a wait, and
// data races: two accesses to a word, one of them a write, that no barrier orders (by vector clocks).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace emulator {

struct Fiber;
struct Warp;

// History of a word of shared memory: the last write, and the reads since.
struct Word {
  struct Access {
    int thread;
    uint32_t time;
  };
  Access write{-1, 0};
  std::vector<Access> reads;
  std::vector<Access> relaxed;  // writes since the last ordered one
  int copies = 0;    // under way into it
  int products = 0;  // under way that read it
};

struct Copy {
  uint32_t to;
  const void* from;  // null: zeros
};

// A wgmma of one thread (warpgroup.h): what it will find in its sums, and what is read until then.
struct Product {
  float* d;
  std::vector<float> sums;
  const uint32_t* a;
  std::array<uint32_t, 4> a_then;
  std::vector<uint32_t> words;  // accesses to shared memory, kept by one thread of a warp
};

struct Products {
  bool fenced = false;  // no register was touched since wgmma.fence
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;  // committed; oldest first
};

class Cta {
 public:
  // `seed` picks the order in which threads run: 0 ascending, 1 descending, others at random.
  Cta(int threads, int shared_bytes, int x, int y, uint32_t seed);
  ~Cta();
  void run(const std::function<void()>& kernel);
  // run() in parts: run_some() gives its threads `turns` turns at most, while any of them is ready(). With `early`, the
  // grid that this one depends on has not ended: threads that wait for it wait until previous_grid_ended().
  void start(const std::function<void()>& kernel, bool early = false);
  void run_some(int turns);
  void previous_grid_ended();
  bool ready() const { return !ready_.empty(); }
  bool ended() const;
  void wait_for_previous_grid();
  void expect_waited(const char* what);

  int thread() const { return current_; }
  int threads() const { return static_cast<int>(clocks_.size()); }
  const int x, y;

  // Whether `value` holds for any of the threads.
  bool barrier(int id, int threads, bool value = false);
  void synchronize_warp();
  void copy(uint32_t to, const void* from);
  void commit();
  void wait(int pending);

  uint32_t read_word(uint32_t at);
  void write_word(uint32_t at, uint32_t value);
  // Needs no order with other relaxed writes, as long as they write the same.
  void write_word_relaxed(uint32_t at, uint32_t value);

  // Makes this thread's writes visible to products of threads that a barrier orders after it.
  void fence_proxy();
  void begin_product_read(uint32_t at);
  void end_product_read(uint32_t at);
  uint32_t peek(uint32_t at) const;
  Products& products() { return products_[current_]; }
  void touch_registers() { products().fenced = false; }

  // All 32 lanes of the current warp, or 128 threads of its warpgroup, call with the same `instruction`; the last one's
  // `all` sees every lane's `mine`.
  template <class Lane>
  void together(const char* instruction, Lane& mine, const std::function<void(Lane**)>& all, int lanes = 32) {
    together_any(instruction, &mine, [&](void** them) { all(reinterpret_cast<Lane**>(them)); }, lanes);
  }

 private:
  void together_any(const char* instruction, void* mine, const std::function<void(void**)>& all, int lanes);
  void block();
  void wake(const std::vector<int>& threads);
  void synchronize(const std::vector<int>& threads);
  Word& word(uint32_t at);
  void record_read(Word& w, uint32_t at);
  void record_write(Word& w, uint32_t at);
  void remember(std::vector<Word::Access>& accesses);
  void check_ordered(const Word::Access& before, const char* what, uint32_t at);
  void land(const Copy& copy);
  int pick();
  void expect_ended();

  struct Barrier {
    int threads = 0;
    std::vector<int> waiting;
    bool any = false;   // barrier of the waiting threads
    bool last = false;  // value when the barrier last completed
  };

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::vector<uint32_t>> clocks_;  // [thread][thread]: what a thread knows of each
  std::vector<std::unique_ptr<Warp>> warps_, warpgroups_;
  std::map<int, Barrier> barriers_;
  std::vector<std::deque<std::vector<Copy>>> groups_;  // [thread], committed; oldest first
  std::vector<std::vector<Copy>> open_;                // [thread], not committed yet
  std::vector<Products> products_;                     // [thread]
  std::vector<std::vector<uint32_t>> fences_;          // [thread]: when it fenced for products
  std::deque<int> ready_;
  bool early_ = false;
  std::vector<int> waiting_for_grid_;
  std::unique_ptr<unsigned char[]> shared_;  // exactly as large as asked for: ASan guards its ends
  int shared_bytes_;
  std::vector<Word> words_;
  int current_ = -1;
  uint32_t seed_;
  std::mt19937 random_;
};

Cta& cta();  // the one that runs

[[noreturn]] void fail(const char* format, ...);

}  // namespace emulator
