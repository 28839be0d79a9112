// SPDX-License-Identifier: Apache-2.0
#include "linear/panels.h"

#include <algorithm>
#include <numeric>

#include "cpu/isa.h"
#include "linear/grouped.h"

namespace dflash {
namespace {

constexpr int64_t kMinShared = 1 << 19;  // multiplications from which on waking other threads pays

using MultiplyPanels = void (*)(const PanelLinear& layer, int64_t begin, int64_t end);

MultiplyPanels multiply_panels(Isa isa) {
#if DFLASH_X86_KERNELS
  if (isa == Isa::kAvx512) return multiply_panels_avx512;
  if (isa == Isa::kAvx2) return multiply_panels_avx2;
#endif
  static_cast<void>(isa);
  return multiply_panels_scalar;
}

}  // namespace

void linear(const PanelLinear& first, const std::vector<int64_t>& counts, const Threads& threads,
            std::string_view isa) {
  const MultiplyPanels multiply = multiply_panels(isa_named(isa));
  const int64_t K = first.num_inputs, N = first.num_outputs;
  const int64_t num_panels = (N + kPanel - 1) / kPanel;
  const int64_t num_parts = (num_panels + kPanelsAtATime - 1) / kPanelsAtATime;
  const std::vector<PanelLinear> layers = split_by_weight(first, counts, num_panels * K * kPanel);
  const int64_t num_rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for_each(num_rows * K * N < kMinShared ? Threads{1, nullptr} : threads,
           num_parts * static_cast<int64_t>(layers.size()), [&](int64_t i) {
             const int64_t begin = i % num_parts * kPanelsAtATime;
             multiply(layers[i / num_parts], begin, std::min(num_panels, begin + kPanelsAtATime));
           });
}

}  // namespace dflash
