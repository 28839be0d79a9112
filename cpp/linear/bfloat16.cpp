// SPDX-License-Identifier: Apache-2.0
#include "linear/bfloat16.h"

#include <algorithm>
#include <vector>

#include "linear/linear.h"
#include "linear/round.h"

namespace dflash {
namespace {

#if DFLASH_X86_KERNELS
bool has_products() {
  static const bool has = isa_named("best") == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16");
  return has;
}
#else
bool has_products() { return false; }
#endif

// By the kernel for FLOAT rows, `x`.
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

void linear(const Bfloat16Linear& layer, const Threads& threads, std::string_view isa) {
  const int64_t N = layer.num_outputs;
  const auto for_columns = [&](auto&& work) {
    for_each(threads, (N + kColumnsAtATime - 1) / kColumnsAtATime,
             [&](int64_t i) { work(i * kColumnsAtATime, std::min(N, (i + 1) * kColumnsAtATime)); });
  };
#if DFLASH_X86_KERNELS
  if (isa == "avx512bf16" || (isa == "best" && has_products())) {
    if (!has_products()) isa_named(isa);  // throws
    for_columns([&](int64_t begin, int64_t end) { bfloat16_products(layer, begin, end); });
    return;
  }
#endif
  const MultiplyColumns multiply = multiply_columns(isa_named(isa));
  std::vector<float> x(layer.num_rows * layer.num_inputs);
  std::transform(layer.x, layer.x + x.size(), x.begin(), [](uint16_t bits) { return to_float(bits); });
  for_columns([&](int64_t begin, int64_t end) { columns(layer, x.data(), multiply, begin, end); });
}

}  // namespace dflash
