// SPDX-License-Identifier: Apache-2.0
// A stack of its own that runs until it pauses.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>

namespace emulator {

struct Fiber {
  explicit Fiber(std::function<void()> body);
  ~Fiber();
  // Runs it until it pauses or ends.
  void resume();
  // Called from within: back to who resumed it.
  void pause();
  bool ended = false;

 private:
  static void enter(unsigned high, unsigned low);
  void leave();

  static constexpr size_t kStackBytes = 128 * 1024;
  std::function<void()> body_;
  std::unique_ptr<char[]> stack_;
  ucontext_t context_;
  bool started_ = false;
  void* here_[5];   // the fiber's, for __builtin_setjmp
  void* there_[5];  // the resumer's
  void* fake_stack_ = nullptr;
};

}  // namespace emulator
