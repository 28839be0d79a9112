// SPDX-License-Identifier: Apache-2.0
#include "linear/panels.h"

#include <algorithm>
#include <numeric>

#include "cpu/isa.h"

namespace dflash {
namespace {

constexpr int64_t kMinShared = 1 << 19;  // multiplications from which on other threads are worth calling

using MultiplyPanels = void (*)(const PanelLinear& layer, int64_t begin, int64_t end);

MultiplyPanels multiply_panels(Isa isa) {
#if DFLASH_X86_KERNELS
  if (isa == Isa::kAvx512) return multiply_panels_avx512;
  if (isa == Isa::kAvx2) return multiply_panels_avx2;
#endif
  static_cast<void>(isa);
  return multiply_panels_scalar;
}

// Those that have rows.
std::vector<PanelLinear> asked(const PanelLinears& layers, int64_t num_panels) {
  const int64_t K = layers.num_inputs, N = layers.num_outputs;
  std::vector<PanelLinear> found;
  int64_t row = 0;
  for (size_t e = 0; e < layers.num_rows.size(); ++e) {
    const int64_t M = layers.num_rows[e];
    if (M > 0) {
      const float* bias = layers.bias ? layers.bias + e * N : nullptr;
      found.push_back({M, K, N, layers.x + row * K, layers.panels + e * num_panels * K * kPanel, bias,
                       layers.out + row * N});
    }
    row += M;
  }
  return found;
}

}  // namespace

void linear(const PanelLinears& layers, const Threads& threads, std::string_view isa) {
  const MultiplyPanels multiply = multiply_panels(isa_named(isa));
  const int64_t num_panels = (layers.num_outputs + kPanel - 1) / kPanel;
  const int64_t num_parts = (num_panels + kPanelsAtATime - 1) / kPanelsAtATime;
  const int64_t num_rows = std::accumulate(layers.num_rows.begin(), layers.num_rows.end(), int64_t{0});
  const std::vector<PanelLinear> found = asked(layers, num_panels);
  const auto part = [&](int64_t i) {
    const int64_t begin = i % num_parts * kPanelsAtATime;
    multiply(found[i / num_parts], begin, std::min(num_panels, begin + kPanelsAtATime));
  };
  const bool is_shared = num_rows * layers.num_inputs * layers.num_outputs >= kMinShared;
  for_each(is_shared ? threads : Threads{1, nullptr}, num_parts * static_cast<int64_t>(found.size()), part);
}

}  // namespace dflash
