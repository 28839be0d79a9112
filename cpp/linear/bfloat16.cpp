// SPDX-License-Identifier: Apache-2.0
#include "linear/bfloat16.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/isa.h"
#include "linear/grouped.h"
#include "linear/linear.h"
#include "linear/round.h"

namespace dflash {
namespace {

// Uses the kernel for FLOAT rows `x`.
void columns(const Bfloat16Linear& layer, const float* x, MultiplyColumns multiply, int64_t begin, int64_t end) {
  const int64_t N = end - begin;
  std::vector<float> sums(layer.num_rows * N);
  multiply({.weight = {.format = WeightFormat::kBfloat16,
                       .rows = N,
                       .cols = layer.num_inputs,
                       .codes = reinterpret_cast<const uint8_t*>(layer.weight + begin * layer.num_inputs),
                       .block_scales = nullptr,
                       .scale = 1.0f},
            .num_rows = layer.num_rows,
            .x = x,
            .out = sums.data(),
            .out_stride = N},
           0, N);
  for (int64_t m = 0; m < layer.num_rows; ++m) {
    round_row(&sums[m * N], layer.bias ? layer.bias + begin : nullptr, N, layer.out + m * layer.num_outputs + begin);
  }
}

}  // namespace

void linear(const Bfloat16Linear& first, const std::vector<int64_t>& counts, const Threads& threads,
            std::string_view isa) {
  const int64_t K = first.num_inputs, N = first.num_outputs;
  const int64_t num_parts = (N + kColumnsAtATime - 1) / kColumnsAtATime;
  const std::vector<Bfloat16Linear> layers = split_by_weight(first, counts, N * K);
  const auto for_columns = [&](auto&& work) {
    for_each(threads, num_parts * static_cast<int64_t>(layers.size()), [&](int64_t i) {
      const int64_t begin = i % num_parts * kColumnsAtATime;
      work(layers[i / num_parts], begin, std::min(N, begin + kColumnsAtATime));
    });
  };
#if DFLASH_X86_KERNELS
  if (isa == "avx512bf16" || (isa == "best" && has_avx512_bf16())) {
    if (!has_avx512_bf16()) isa_named(isa);  // throws if the CPU lacks it
    for_columns(bfloat16_products);
    return;
  }
#endif
  const MultiplyColumns multiply = multiply_columns(isa_named(isa));
  std::vector<float> x(std::accumulate(counts.begin(), counts.end(), int64_t{0}) * K);
  std::transform(first.x, first.x + x.size(), x.begin(), [](uint16_t bits) { return to_float(bits); });
  for_columns([&](const Bfloat16Linear& layer, int64_t begin, int64_t end) {
    columns(layer, x.data() + (layer.x - first.x), multiply, begin, end);
  });
}

}  // namespace dflash
