// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <cstdint>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#else
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

namespace emulator {
namespace {

const void* main_stack;
size_t main_stack_bytes;

// Stacks are used again: under ASan a new one costs more than most fibers.
std::vector<std::unique_ptr<char[]>> free_stacks;

std::unique_ptr<char[]> take_stack(size_t bytes) {
  if (free_stacks.empty()) return std::unique_ptr<char[]>(new char[bytes]);
  auto stack = std::move(free_stacks.back());
  free_stacks.pop_back();
  return stack;
}

}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), stack_(take_stack(kStackBytes)) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self >> 32),
              static_cast<unsigned>(self));
}

Fiber::~Fiber() { free_stacks.push_back(std::move(stack_)); }

void Fiber::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
  __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_bytes);
  self->body_();
  self->ended = true;
  self->leave();
}

// Switching by __builtin_setjmp spares the system calls of swapcontext: a kernel switches millions of times. ASan would
// take each jump for the end of a stack and clear it.
#define NO_ASAN __attribute__((no_sanitize("address")))

NO_ASAN void Fiber::resume() {
  void* fake_stack;
  if (__builtin_setjmp(there_) == 0) {
    __sanitizer_start_switch_fiber(&fake_stack, stack_.get(), kStackBytes);
    if (!started_) {
      started_ = true;
      setcontext(&context_);
    }
    __builtin_longjmp(here_, 1);
  }
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

NO_ASAN void Fiber::pause() {
  if (__builtin_setjmp(here_) == 0) leave();
  __sanitizer_finish_switch_fiber(fake_stack_, &main_stack, &main_stack_bytes);
}

NO_ASAN void Fiber::leave() {
  __sanitizer_start_switch_fiber(ended ? nullptr : &fake_stack_, main_stack, main_stack_bytes);
  __builtin_longjmp(there_, 1);
}

}  // namespace emulator
