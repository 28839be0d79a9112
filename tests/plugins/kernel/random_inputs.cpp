// SPDX-License-Identifier: Apache-2.0
// random_inputs SEED CALLS: calls the reference and the emulated kernels with arbitrary values in any of the inputs.
//
// A third of the calls has them in all inputs, as TensorRT's builder has, a third in those that lead to memory, a third
// in one of these. Every tensor ends where its allocation ends, so ASan detects every access beyond. If only the latter
// are arbitrary, the outputs must agree. Prints how many outputs of requests are numbers and how many are NaN.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "emulated_kernel.h"
#include "formats.h"
#include "kv_injection_attention/context_layout.h"
#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/reference.h"

namespace {

constexpr int D = 64, kBlock = 3, kHeads = 2, kKVHeads = 2, kLayers = 2, kPages = 4, kSlots = 3;
constexpr double kTolerance = 0.05;  // values are about 1

using Random = std::mt19937_64;

int below(Random& random, int n) { return static_cast<int>(random() % n); }

template <class T>
class Tensor {
 public:
  explicit Tensor(size_t size) : data(static_cast<T*>(std::malloc(size * sizeof(T)))), size(size) {}
  Tensor(const Tensor&) = delete;
  ~Tensor() { std::free(data); }

  // Bits of one of several kinds, in all elements or in one.
  void fill(Random& random) {
    const int kind = below(random, 6);
    const uint64_t same = random();
    const auto bits = [&]() -> uint64_t {
      switch (kind) {
        case 0:
          return 0;
        case 1:
          return ~uint64_t{0};
        case 2:
          return same;
        case 3:
          return below(random, 8);
        case 4:
          return uint64_t{1} << below(random, 64);
        default:
          return random();
      }
    };
    const bool all = below(random, 2) == 0;
    for (size_t i = all ? 0 : below(random, static_cast<int>(size)), n = all ? size : i + 1; i < n; ++i) {
      const uint64_t value = bits();
      std::memcpy(&data[i], &value, sizeof(T));
    }
  }

  T* data;
  size_t size;
};

uint16_t normal(Random& random) {
  return static_cast<uint16_t>(emulator::encode_bf16(std::normal_distribution<float>()(random)));
}

struct Call {
  explicit Call(Random& random)
      : batch(1 + below(random, 3)),
        max_pages(below(random, 2) == 0 ? 1 : 3),
        page_size(max_pages == 1 ? 1 + below(random, 60) : 16 << below(random, 3)),
        qkv(batch * kBlock * (kHeads + 2 * kKVHeads) * D),
        bias((kHeads + 2 * kKVHeads) * D),
        q_norm(D),
        k_norm(D),
        rope(batch * kBlock * D),
        pool(size_t{kPages} * kLayers * 2 * kKVHeads * page_size * D),
        pointers(kLayers * kv::kPointerSize),
        layout(kv::kLayoutSize),
        table(kSlots * max_pages),
        slot_ids(batch),
        lengths(batch),
        sinks(kHeads),
        out(batch * kBlock * kHeads * D) {
    for (Tensor<uint16_t>* tensor : {&qkv, &bias, &q_norm, &k_norm, &pool}) {
      for (size_t i = 0; i < tensor->size; ++i) tensor->data[i] = normal(random);
    }
    for (size_t i = 0; i < rope.size; ++i) rope.data[i] = i / (D / 2) % 2 == 0 ? 0.6f : 0.8f;
    for (int i = 0; i < kHeads; ++i) sinks.data[i] = 1;
    const int64_t row = D * 2, head = page_size * row, kv_stride = kKVHeads * head, part = 2 * kv_stride;
    const int64_t values[] = {page_size, kLayers * part, kv_stride, row, head, kPages};
    std::memcpy(layout.data, values, sizeof values);
    for (int layer = 0; layer < kLayers; ++layer) {
      const int64_t address = reinterpret_cast<intptr_t>(pool.data) + layer * part;
      pointers.data[layer * kv::kPointerSize + kv::kAddress] = address;
      pointers.data[layer * kv::kPointerSize + kv::kChecksum] = kv::context_checksum(address, layout.data);
    }
    for (size_t i = 0; i < table.size; ++i) table.data[i] = below(random, kPages);
    for (int b = 0; b < batch; ++b) {
      slot_ids.data[b] = below(random, kSlots);
      lengths.data[b] = below(random, max_pages * page_size + 1);
    }
    window = below(random, 2) == 0 ? 0 : 1 + below(random, 70);
  }

  // Returns whether the outputs of reference and kernel must agree.
  bool fill(Random& random, int kind) {
    const auto fill_leading = [&](int i) {
      switch (i) {
        case 0:
          return pointers.fill(random);
        case 1:
          return layout.fill(random);
        case 2:
          return table.fill(random);
        case 3:
          return slot_ids.fill(random);
        default:
          return lengths.fill(random);
      }
    };
    if (kind == 2) return fill_leading(below(random, 5)), true;
    for (int i = 0; i < 5; ++i) fill_leading(i);
    if (kind == 1) return true;
    for (Tensor<uint16_t>* tensor : {&qkv, &bias, &q_norm, &k_norm, &pool}) tensor->fill(random);
    rope.fill(random);
    sinks.fill(random);
    return false;
  }

  kv::Params params() const {
    kv::Params p{};
    p.batch = batch;
    p.block = kBlock;
    p.num_heads = kHeads;
    p.num_kv_heads = kKVHeads;
    p.head_dim = D;
    p.slots = kSlots;
    p.layers = kLayers;
    p.max_pages = max_pages;
    p.layer = 1;
    p.sliding_window = window;
    p.rms_norm_eps = 1e-6f;
    p.softmax_scale = 0.125f;
    p.k_scale = p.v_scale = p.out_scale = 1;
    p.block_dtype = p.cache_dtype = p.out_dtype = kv::DType::kBF16;
    p.qkv = qkv.data;
    p.qkv_bias = bias.data;
    p.q_norm = q_norm.data;
    p.k_norm = k_norm.data;
    p.rope = rope.data;
    p.context_pointers = pointers.data;
    p.context_layout = layout.data;
    p.page_table = table.data;
    p.slot_ids = slot_ids.data;
    p.context_lengths = lengths.data;
    p.sinks = sinks.data;
    p.out = out.data;
    return p;
  }

  const int batch, max_pages, page_size;
  int window;
  Tensor<uint16_t> qkv, bias, q_norm, k_norm;
  Tensor<float> rope;
  Tensor<uint16_t> pool;
  Tensor<int64_t> pointers, layout;
  Tensor<int32_t> table, slot_ids, lengths;
  Tensor<float> sinks;
  Tensor<uint16_t> out;
};

bool agree(uint16_t found, uint16_t expected) {
  const float a = emulator::decode_bf16(found), b = emulator::decode_bf16(expected);
  return std::isnan(a) || std::isnan(b) ? std::isnan(a) && std::isnan(b) : std::fabs(a - b) <= kTolerance;
}

}  // namespace

int main(int, char** arguments) {
  Random random(std::atoi(arguments[1]));
  int numbers = 0, nans = 0;
  for (int i = 0; i < std::atoi(arguments[2]); ++i) {
    Call call(random);
    const bool compare = call.fill(random, i % 3);
    kv::Params p = call.params();
    kv::reference(p);
    const std::vector<uint16_t> expected(call.out.data, call.out.data + call.out.size);
    std::memset(call.out.data, 0, call.out.size * sizeof(uint16_t));
    p.workspace_bytes = kv::workspace_size(p);
    Tensor<unsigned char> workspace(p.workspace_bytes);
    p.workspace = workspace.data;
    const int ctas = 1 + below(random, 5);
    if (!run([] {}, p, launch_config(p, ctas), static_cast<uint32_t>(random()))) return 5;
    for (size_t at = 0; compare && at < expected.size(); ++at) {
      if (agree(call.out.data[at], expected[at])) continue;
      std::printf("call %d: value %zu: found %g, expected %g\n", i, at, emulator::decode_bf16(call.out.data[at]),
                  emulator::decode_bf16(expected[at]));
      return 1;
    }
    const size_t each = call.out.size / call.batch;
    for (int b = 0; b < call.batch; ++b) ++(std::isnan(emulator::decode_bf16(expected[b * each])) ? nans : numbers);
  }
  std::printf("%d %d\n", numbers, nans);
  return 0;
}
