// SPDX-License-Identifier: Apache-2.0
// Outputs of the reference that were computed by hand, for ctest. The Python tests have more: tests/plugins.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "kv_injection_attention/check.h"
#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/numbers.h"
#include "kv_injection_attention/reference.h"

namespace kv = dflash::kv_injection;

namespace {

constexpr int kD = 64, kPageRows = 16, kPages = 4;
constexpr kv::DType kType = kv::DType::kBF16;
int failures = 0;

void expect(double found, double expected, const std::string& what) {
  if (found == expected || (std::isnan(found) && std::isnan(expected))) return;
  std::printf("%s: expected %.9g, found %.9g\n", what.c_str(), expected, found);
  ++failures;
}

using Tensor = std::vector<uint16_t>;

void set(Tensor& tensor, int64_t row, double value) {
  for (int d = 0; d < kD; ++d) kv::store(tensor.data(), row * kD + d, value, kType);
}

// The nearest BF16 number.
double rounded(double value) {
  uint16_t bits = 0;
  kv::store(&bits, 0, value, kType);
  return kv::load(&bits, 0, kType);
}

// One request with one KV head. Queries and keys are 0, cos is 1, sin 0, norms are 1: visible rows weigh the same.
class Call {
 public:
  Call(int block, int length, int heads = 1)
      : qkv_(size_t(block) * (heads + 2) * kD),
        norm_(kD),
        rope_(size_t(block) * kD),
        pool_(2 * kPages * kPageRows * kD),
        out_(size_t(block) * heads * kD),
        length_(length) {
    set(norm_, 0, 1);
    for (size_t i = 0; i < rope_.size(); ++i) rope_[i] = i % kD < kD / 2;
    p = {.batch = 1, .block = block, .num_heads = heads, .num_kv_heads = 1, .head_dim = kD, .slots = 1, .layers = 1,
         .max_pages = 2, .layer = 0, .sliding_window = 0, .causal = 0, .rms_norm_eps = 1e-6f, .softmax_scale = 0.125f,
         .k_scale = 1, .v_scale = 1, .out_scale = 1, .block_dtype = kType, .cache_dtype = kType, .out_dtype = kType,
         .qkv = qkv_.data(), .qkv_bias = nullptr, .q_norm = norm_.data(), .k_norm = norm_.data(), .rope = rope_.data(),
         .context_pointers = pointer_, .context_layout = layout_, .page_table = pages, .slot_ids = &slot,
         .context_lengths = &length_, .sinks = nullptr, .out = out_.data(), .workspace = nullptr, .workspace_bytes = 0,
         .stream = nullptr};
    pointer_[kv::kAddress] = reinterpret_cast<int64_t>(pool_.data());
    pointer_[kv::kChecksum] = kv::context_checksum(pointer_[kv::kAddress], layout_);
  }
  Call(const Call&) = delete;

  void set_block(int slot_of_block, int head, double value) {
    set(qkv_, slot_of_block * (p.num_heads + 2) + head, value);
  }
  void set_value(int slot_of_block, double value) { set_block(slot_of_block, p.num_heads + 1, value); }
  void set_key(int row, double value) { set(pool_, pool_row(row), value); }
  void set_context_value(int row, double value) { set(pool_, kPages * kPageRows + pool_row(row), value); }
  double out(int slot_of_block, int head = 0) {
    kv::reference(p);
    return kv::load(out_.data(), (int64_t{slot_of_block} * p.num_heads + head) * kD, kType);
  }

  kv::Params p;
  int32_t pages[2] = {3, 1};
  int32_t slot = 0;

 private:
  int64_t pool_row(int row) const { return pages[row / kPageRows] * kPageRows + row % kPageRows; }

  Tensor qkv_, norm_;
  std::vector<float> rope_;
  Tensor pool_, out_;
  int64_t pointer_[kv::kPointerSize];
  int64_t layout_[kv::kLayoutSize] = {kPageRows, 2 * kPageRows * kD, 2 * kPages * kPageRows * kD, 2 * kD, 0, kPages};
  int32_t length_;
};

void test_equal_keys() {
  Call call(2, 3);
  for (int row = 0; row < 3; ++row) call.set_context_value(row, row + 1);
  call.set_value(0, 10), call.set_value(1, 24);
  expect(call.out(0), (1 + 2 + 3 + 10 + 24) / 5.0, "the mean of equal keys");
}

// Positions 0 to 3 are context, 4 to 6 the block; row j has value 2^j.
void test_window_and_causality() {
  constexpr struct {
    int window, causal;
    unsigned first, last;  // rows that the first and the last block slot see
  } kCases[] = {{0, 0, 0b1111111, 0b1111111}, {0, 1, 0b0011111, 0b1111111}, {1, 0, 0b0010000, 0b1000000},
                {2, 0, 0b0111000, 0b1100000}, {3, 1, 0b0011100, 0b1110000}, {5, 0, 0b1111111, 0b1111100}};
  for (const auto& [window, causal, first, last] : kCases) {
    Call call(3, 4);
    call.p.sliding_window = window, call.p.causal = causal;
    for (int row = 0; row < 4; ++row) call.set_context_value(row, 1 << row);
    for (int slot = 0; slot < 3; ++slot) call.set_value(slot, 16 << slot);
    const std::string what = "window " + std::to_string(window) + ", causal " + std::to_string(causal);
    expect(call.out(0), rounded(static_cast<double>(first) / std::popcount(first)), what + ", first slot");
    expect(call.out(2), rounded(static_cast<double>(last) / std::popcount(last)), what + ", last slot");
  }
}

// Five equal scores of 0 and a sink of log 3: each key weighs 1/8. A sink of -inf takes nothing.
void test_sinks() {
  Call call(1, 4, 2);
  const float sinks[] = {std::log(3.0f), -std::numeric_limits<float>::infinity()};
  call.p.sinks = sinks;
  for (int row = 0; row < 4; ++row) call.set_context_value(row, 16);
  call.set_value(0, 16);
  expect(call.out(0, 0), 10, "a sink takes 3/8");
  expect(call.out(0, 1), 16, "a sink of -inf");
}

// q = 2 everywhere is normed to 1 / sqrt(1 + eps/4); times k = 0.25 over 64 coordinates, times 1/8.
void test_score() {
  Call call(1, 1);
  call.set_block(0, 0, 2);
  call.set_key(0, 0.25), call.set_context_value(0, 1);
  expect(call.out(0), rounded(1 / (1 + std::exp(-64 * 0.25 / 8 / std::sqrt(1 + 0.25e-6)))), "the score of a row");
}

// 20 rows on pages 3 and 1; a row's value is its number.
void test_pages() {
  Call call(1, 20);
  call.p.sliding_window = 3;  // rows 18 and 19
  for (int row = 0; row < 20; ++row) call.set_context_value(row, row);
  call.set_value(0, 2);
  expect(call.out(0), (18 + 19 + 2) / 3.0, "rows of the second page");
  call.pages[0] = kPages;
  expect(call.out(0), 13, "an entry without visible rows");
  call.pages[1] = kPages;
  expect(call.out(0), NAN, "a page that does not exist");
  call.pages[1] = 1, call.slot = 1;
  expect(call.out(0), NAN, "a slot that does not exist");
}

void test_refusals() {
  Call call(1, 1);
  expect(kv::check_params(call.p).has_value(), 0, "a valid call is refused");
  call.p.head_dim = 65;
  expect(kv::check_params(call.p).has_value(), 1, "a head_dim of 65 is refused");
}

}  // namespace

int main() {
  test_equal_keys();
  test_window_and_causality();
  test_sinks();
  test_score();
  test_pages();
  test_refusals();
  std::printf("kernels for [%s]; %d of the hand-computed values differ\n", kv::dflash_cuda_architectures(), failures);
  return failures == 0 ? 0 : 1;
}
