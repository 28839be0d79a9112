// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace dflash {

// libgomp's entry point for a parallel region, to which `#pragma omp parallel` compiles and which LLVM's and Intel's
// OpenMP also export. The caller passes that of the library whose threads are to be used: a second pool would spin
// against the first.
using GompParallel = void (*)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

struct Threads {
  int count;
  GompParallel gomp_parallel;  // null for one thread
};

// Runs task(i) once for each i in [0, count), in any order, on all threads of the team. An exception of a task is
// rethrown here, and tasks that have not started are skipped, because no exception may cross the OpenMP library. Like
// oneDNN's parallel_nd() over a caller's thread pool, but tasks are taken one by one, because requests differ in
// length.
template <class Task>
void for_each(const Threads& threads, int64_t count, const Task& task) {
  struct Shared {
    const Task& task;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
  } shared{task, count};
  const auto work = [](void* data) noexcept {
    auto& shared = *static_cast<Shared*>(data);
    try {
      for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.count;) shared.task(i);
    } catch (...) {
      if (!shared.failed.exchange(true)) shared.error = std::current_exception();
      shared.next = shared.count;
    }
  };
  if (threads.gomp_parallel == nullptr || threads.count < 2 || count < 2) {
    work(&shared);
  } else {
    threads.gomp_parallel(work, &shared, static_cast<unsigned>(threads.count),
                          0);  // a different team size would recreate the team
  }
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace dflash
