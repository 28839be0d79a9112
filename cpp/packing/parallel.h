// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace dflash {

// Upper bound on threads: more are not faster, and each needs a stack.
inline constexpr int64_t kMaxThreads = 64;

// Returns the largest result of part(begin, end) over half-open ranges that cover [0, count); 0 if count is 0. Ranges
// begin at multiples of `grain`. Each runs in its own thread, the last one in the caller's. A range has at least
// `min_size` items, because starting a thread costs more than a few of them.
template <class Part>
uint32_t parallel_max(int64_t count, int64_t grain, int64_t min_size, int threads, Part part) {
  const int64_t hardware = std::max(1u, std::thread::hardware_concurrency());
  const int64_t wanted = std::min(kMaxThreads, threads == 0 ? hardware : int64_t{threads});
  const int64_t num_parts = std::clamp<int64_t>(count / min_size, 1, wanted);
  const int64_t size = (count / num_parts + grain) / grain * grain;
  std::vector<uint32_t> largest(num_parts, 0);
  {
    std::vector<std::jthread> workers;  // joined at the end of the scope, even if one fails to start
    for (int64_t i = 0; i < num_parts; ++i) {
      const int64_t begin = std::min(count, i * size);
      const int64_t end = std::min(count, begin + size);
      const auto run = [&part, &slot = largest[i], begin, end] { slot = part(begin, end); };
      if (i + 1 < num_parts) {
        workers.emplace_back(run);
      } else {
        run();
      }
    }
  }
  return *std::ranges::max_element(largest);
}

}  // namespace dflash
