// SPDX-License-Identifier: Apache-2.0
// portable [ISA]: what the C++ core computes from fixed numbers, for comparison between machines and instruction sets.
//
// A line "exact NAME HASH" is to be the same on each of them, "close NAME X..." nearly so: attention and linear layers
// may fuse multiplications and additions. Sizes fill vectors of any width and leave a rest, in memory without slack.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "block_attention/block_attention.h"
#include "linear/bfloat16.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "packing/pack.h"
#include "paged_attention/paged_attention.h"
#include "rms_norm/rms_norm.h"
#include "sampling/philox.h"
#include "sampling/sampling.h"

namespace {

constexpr dflash::Threads kOneThread{1, nullptr};
std::string isa = "scalar";

// Numbers in [-scale, scale), the same on every machine.
std::vector<float> numbers(size_t count, uint64_t seed, float scale = 1) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(static_cast<double>(dflash::uniform_bits(seed, i) >> 29) / (1 << 23)) - 1.0f;
    values[i] *= scale;
  }
  return values;
}

std::vector<uint16_t> bfloat16(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    bits.push_back(static_cast<uint16_t>(word >> 16));
  }
  return bits;
}

template <class Item>
void exact(const char* name, const std::vector<Item>& items) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto* bytes = reinterpret_cast<const unsigned char*>(items.data());
  for (size_t i = 0; i < items.size() * sizeof(Item); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  std::printf("exact %s %016llx\n", name, static_cast<unsigned long long>(hash));
}

void close(const char* name, const std::vector<float>& values) {
  std::printf("close %s", name);
  for (const float value : values) std::printf(" %.7g", static_cast<double>(value));
  std::printf("\n");
}

void close(const char* name, const std::vector<uint16_t>& bits) {
  std::vector<float> values;
  for (const uint32_t word : bits) {
    const uint32_t shifted = word << 16;
    float value;
    std::memcpy(&value, &shifted, sizeof value);
    values.push_back(value);
  }
  close(name, values);
}

void print_packing() {
  constexpr int64_t kRows = 7, kCols = 208;
  const std::vector<float> values = numbers(kRows * kCols, 1);
  const std::vector<uint16_t> bits = bfloat16(values);
  constexpr int kThreads = 3;
  for (const auto type : {dflash::WeightType::kF32, dflash::WeightType::kBf16, dflash::WeightType::kF16}) {
    const void* data = type == dflash::WeightType::kF32 ? static_cast<const void*>(values.data()) : bits.data();
    // The bits of a bfloat16 in [-1, 1) are those of a finite float16.
    const dflash::Weights weights{static_cast<const std::byte*>(data), type, kRows, kCols};
    const float scale = dflash::amax(weights, kThreads) / 448;
    std::vector<uint8_t> codes(kRows * kCols), nibbles(kRows * kCols / 2), scales(kRows * kCols / 16);
    dflash::pack_fp8(weights, scale, {codes.data(), kRows, kCols}, kThreads);
    dflash::pack_nvfp4(weights, scale / 6, {nibbles.data(), kRows, kCols / 2}, {scales.data(), kRows, kCols / 16},
                       kThreads);
    exact("fp8", codes), exact("nvfp4", nibbles), exact("scales", scales);
    constexpr int64_t kPairs = 3, kWhole = 224;  // whole pairs of rows and blocks of 32 within the same numbers
    std::vector<uint8_t> pairs(kPairs * kWhole);
    std::vector<float> int4_scales(2 * kPairs * kWhole / 32);
    dflash::pack_int4({weights.data, type, 2 * kPairs, kWhole}, {pairs.data(), kPairs, kWhole},
                      {int4_scales.data(), 2 * kPairs, kWhole / 32}, kThreads);
    exact("int4", pairs), exact("int4_scales", int4_scales);
  }
}

void print_sampling() {
  constexpr int64_t kRows = 4, kVocab = 1003;
  const std::vector<float> logits = numbers(kRows * kVocab, 2, 8);
  const dflash::Logits view{.data = logits.data(), .rows = kRows, .vocab = kVocab};
  const std::vector<int64_t> proposals{17, 5, 999};
  dflash::SamplerParams params{.temperature = 0.7, .top_k = 50, .top_p = 0.9, .min_p = 0.01};
  std::vector<int64_t> tokens;
  for (params.seed = 0; params.seed < 20; ++params.seed) {
    for (const int64_t token : dflash::verify_block(view, proposals, params, 0, {})) tokens.push_back(token);
  }
  exact("sampled", tokens);
}

void print_layers() {
  constexpr int64_t kM = 13, kK = 1060, kN = 53;
  const std::vector<float> x = numbers(kM * kK, 3, 1.0f / 32), bias = numbers(kN, 4);
  const std::vector<float> panels = numbers((kN + dflash::kPanel - 1) / dflash::kPanel * kK * dflash::kPanel, 5);
  std::vector<float> out(kM * kN);
  dflash::linear(dflash::PanelLinear{0, kK, kN, x.data(), panels.data(), bias.data(), out.data()}, {kM}, kOneThread,
                 isa);
  close("panels", out);
  const std::vector<uint16_t> rows = bfloat16(x), weight = bfloat16(numbers(kN * kK, 6)),
                              bfloat16_bias = bfloat16(bias);
  std::vector<uint16_t> rounded(kM * kN);
  dflash::linear(dflash::Bfloat16Linear{0, kK, kN, rows.data(), weight.data(), bfloat16_bias.data(), rounded.data()},
                 {kM}, kOneThread, isa);
  close("bfloat16", rounded);
  std::vector<float> normed(kM * kK);
  dflash::rms_norm(x.data(), kM, kK, panels.data(), 1e-6f, normed.data(), kOneThread);
  close("rms_norm", normed);
}

// Weights as their files hold them.
void print_packed_weights() {
  using dflash::WeightFormat;
  constexpr int64_t kM = 13, kK = 112, kN = 23,
                    kMargin = 5;  // K is a multiple of 16, as NVFP4 needs; out has wider rows
  const std::vector<float> x = numbers(kM * kK, 13), weight = numbers(kN * kK, 14);
  const std::vector<uint16_t> bits = bfloat16(weight);
  const dflash::Weights weights{reinterpret_cast<const std::byte*>(weight.data()), dflash::WeightType::kF32, kN, kK};
  std::vector<uint8_t> fp8(kN * kK), nvfp4(kN * kK / 2), block_scales(kN * kK / 16);
  dflash::pack_fp8(weights, 1.0f / 448, {fp8.data(), kN, kK}, 1);
  dflash::pack_nvfp4(weights, 1.0f / 2688, {nvfp4.data(), kN, kK / 2}, {block_scales.data(), kN, kK / 16}, 1);
  const auto print = [&](const char* name, WeightFormat format, const void* codes, float scale, int64_t K,
                         int64_t N) {
    const size_t bytes = N * dflash::row_bytes(format, K) / (format == WeightFormat::kInt4 ? 2 : 1);
    std::vector<uint8_t> unaligned(bytes + 1);  // codes stand at any address
    std::memcpy(unaligned.data() + 1, codes, bytes);
    std::vector<float> out((kM - 1) * (kN + kMargin) + kN);
    dflash::multiply_columns(dflash::isa_named(isa))({.weight = {.format = format,
                                                                 .rows = N,
                                                                 .cols = K,
                                                                 .codes = unaligned.data() + 1,
                                                                 .block_scales = block_scales.data(),
                                                                 .scale = scale},
                                                      .num_rows = kM,
                                                      .x = x.data(),
                                                      .out = out.data(),
                                                      .out_stride = kN + kMargin},
                                                     0, N);
    close(name, out);
  };
  print("weight_f32", WeightFormat::kFloat, weight.data(), 1, kK, kN);
  print("weight_f16", WeightFormat::kFloat16, bits.data(), 1, kK, kN);  // the scales of finite float16 too
  print("weight_bf16", WeightFormat::kBfloat16, bits.data(), 1, kK, kN);
  print("weight_fp8", WeightFormat::kFp8, fp8.data(), 1.0f / 448, kK, kN);
  print("weight_nvfp4", WeightFormat::kNvfp4, nvfp4.data(), 1.0f / 2688, kK, kN);
  std::vector<float> int4_scales((kN - 1) * 3);
  dflash::pack_int4({weights.data, weights.type, kN - 1, 96}, {nvfp4.data(), (kN - 1) / 2, 96},
                    {int4_scales.data(), kN - 1, 3}, 1);
  block_scales.assign(int4_scales.size() * 4, 0);
  std::memcpy(block_scales.data(), int4_scales.data(), block_scales.size());
  print("weight_int4", WeightFormat::kInt4, nvfp4.data(), 1, 96, kN - 1);
}

template <class Element>
void print_paged_attention(const char* name, dflash::CacheType type,
                           std::vector<Element> (*make)(const std::vector<float>&)) {
  constexpr int64_t kN = 4, kG = 2, kD = 36, kTokens = 40, kPages = 3;
  const std::vector<Element> q = make(numbers(kN * kTokens * kD, 7)), k = make(numbers(kG * kTokens * kD, 8)), v = k;
  std::vector<Element> k_cache(kG * kPages * kD * 32), v_cache(kG * kPages * 32 * dflash::padded(kD));
  std::vector<Element> out(kTokens * kN * kD);
  const dflash::PagedAttention layer{.type = type,
                                     .query = {q.data(), kTokens * kD, kD},
                                     .key = {k.data(), kTokens * kD, kD},
                                     .value = {v.data(), kTokens * kD, kD},
                                     .k_cache = k_cache.data(),
                                     .v_cache = v_cache.data(),
                                     .out = out.data(),
                                     .num_heads = kN,
                                     .num_kv_heads = kG,
                                     .head_dim = kD,
                                     .value_dim = kD,
                                     .num_pages = kPages,
                                     .scale = 0.5f,
                                     .softcap = 5,
                                     .window = 17,
                                     .sinks = nullptr};
  const int32_t pages[] = {2, 0};
  dflash::paged_attention(layer, {{.first_row = 0, .num_tokens = kTokens, .begin = 0, .pages = pages}}, kOneThread,
                          isa);
  close(name, out);
}

void print_block_attention() {
  constexpr int64_t kB = 2, kS = 11, kN = 4, kG = 2, kD = 36, kC = 70;
  const std::vector<float> qkv = numbers(kB * kS * (kN + 2 * kG) * kD, 9), norm = numbers(kD, 10);
  const std::vector<float> rope = numbers(kB * kS * kD, 11), cache = numbers(kB * kC * kG * kD, 12);
  const std::vector<int32_t> slots{1, 0}, lengths{67, 5};
  std::vector<float> out(kB * kS * kN * kD);
  const dflash::BlockAttention attention{.batch = kB,
                                         .block = kS,
                                         .num_heads = kN,
                                         .num_kv_heads = kG,
                                         .head_dim = kD,
                                         .num_pages = kB,
                                         .layers = 1,
                                         .page_rows = kC,
                                         .pages_per_request = 1,
                                         .layer = 0,
                                         .sliding_window = 0,
                                         .causal = true,
                                         .rms_norm_eps = 1e-6f,
                                         .softmax_scale = 0.25f,
                                         .qkv = qkv.data(),
                                         .q_norm = norm.data(),
                                         .k_norm = norm.data(),
                                         .rope = rope.data(),
                                         .k_cache = cache.data(),
                                         .v_cache = cache.data(),
                                         .page_ids = slots.data(),
                                         .context_lengths = lengths.data(),
                                         .sinks = nullptr,
                                         .out = out.data()};
  for (int64_t b = 0; b < kB; ++b) {
    for (int64_t g = 0; g < kG; ++g) dflash::attend_head(dflash::isa_named(isa))(attention, b, g);
  }
  close("block_attention", out);
}

// Like GOMP_parallel: runs `work` on all threads of its team.
void start_threads(void (*work)(void*), void* data, unsigned num_threads, unsigned) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < num_threads; ++i) threads.emplace_back(work, data);
  for (std::thread& thread : threads) thread.join();
}

// An exception of a task reaches the caller, whichever thread ran it.
void print_exceptions() {
  std::vector<int64_t> caught;
  for (const int count : {1, 4}) {
    try {
      dflash::for_each({count, start_threads}, 100, [](int64_t i) {
        if (i == 50) throw std::out_of_range("50");
      });
    } catch (const std::out_of_range&) {
      caught.push_back(count);
    }
  }
  exact("exceptions", caught);
  if (caught.size() != 2) std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) isa = argv[1];
  print_exceptions();
  print_packing();
  print_sampling();
  print_layers();
  print_packed_weights();
  print_paged_attention<float>("paged_attention", dflash::CacheType::kF32,
                               [](const std::vector<float>& x) { return x; });
  print_paged_attention<uint16_t>("paged_attention_bfloat16", dflash::CacheType::kBf16, bfloat16);
  print_block_attention();
  return 0;
}
