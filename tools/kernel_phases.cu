// SPDX-License-Identifier: Apache-2.0
// kernel_phases REQUESTS CONTEXT KV_HEADS RUNS: calls sm_90a's attention RUNS times, each with nothing of it in L2, and
// prints for every warp of every call "run CTA warp" and its stamps, less the earliest of the CTA; - where there is
// none.
//
// Compiled by tools/kernel_phases.py with DFLASH_STAMP_PHASES and the sizes that the kernel is instantiated for:
// HEAD_DIM, ROWS (N of wgmma), BLOCK, GROUP (query heads of a kv head) and FP8.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/kernel/launch.cuh"
#include "kv_injection_attention/kernel/wgmma_attention.cuh"

namespace kv = dflash::kv_injection;

namespace {

constexpr int kWarmUps = 3;
constexpr size_t kFlushBytes = size_t{256} << 20;  // more than any L2

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* allocate(size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max(count, size_t{1}) * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(memory);
}

template <class T>
T* upload(const std::vector<T>& values) {
  T* memory = allocate<T>(values.size());
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

unsigned random_bits() {
  static unsigned state = 1;
  state = state * 1664525 + 1013904223;
  return state >> 8;
}

// BF16 of either sign, 0.125 to 1.
std::vector<uint16_t> random_rows(size_t count) {
  std::vector<uint16_t> rows(count);
  for (uint16_t& row : rows) row = static_cast<uint16_t>((random_bits() & 1) << 15 | (0x3e00 + random_bits() % 0x180));
  return rows;
}

// E4M3 up to 4 in bytes, or BF16 as above.
std::vector<uint16_t> random_cache(size_t bytes) {
  if (!FP8) return random_rows(bytes / 2);
  std::vector<uint16_t> pairs(bytes / 2);
  const auto byte = [] { return (random_bits() & 1) << 7 | random_bits() % 0x48; };
  for (uint16_t& pair : pairs) pair = static_cast<uint16_t>(byte() << 8 | byte());
  return pairs;
}

kv::Params make_params(int requests, int context, int kv_heads) {
  constexpr size_t kItem = FP8 ? 1 : 2;
  kv::Params p{};
  p.batch = p.slots = requests;
  p.block = BLOCK;
  p.num_heads = kv_heads * GROUP;
  p.num_kv_heads = kv_heads;
  p.head_dim = HEAD_DIM;
  p.layers = p.max_pages = 1;
  p.rms_norm_eps = 1e-6f;
  p.softmax_scale = 1 / std::sqrt(static_cast<float>(HEAD_DIM));
  p.k_scale = p.v_scale = FP8 ? 0.02f : 1;
  p.out_scale = 1;
  p.block_dtype = p.out_dtype = kv::DType::kBF16;
  p.cache_dtype = FP8 ? kv::DType::kF8E4M3 : kv::DType::kBF16;

  const size_t rows = static_cast<size_t>(requests) * BLOCK;
  const size_t cache_bytes = static_cast<size_t>(requests) * context * kv_heads * HEAD_DIM * kItem;
  p.qkv = upload(random_rows(rows * (p.num_heads + 2 * kv_heads) * HEAD_DIM));
  p.q_norm = upload(random_rows(HEAD_DIM));
  p.k_norm = upload(random_rows(HEAD_DIM));
  p.rope = upload(std::vector<float>(rows * HEAD_DIM, 0.7f));
  const int64_t keys = reinterpret_cast<int64_t>(upload(random_cache(2 * cache_bytes)));
  const int64_t row = HEAD_DIM * kItem;
  const std::vector<int64_t> layout{context, context * kv_heads * row, static_cast<int64_t>(cache_bytes),
                                    kv_heads * row, row, requests};
  p.context_pointers = upload<int64_t>({keys, kv::context_checksum(keys, layout.data())});
  p.context_layout = upload(layout);
  std::vector<int32_t> slots(requests);
  for (int i = 0; i < requests; ++i) slots[i] = i;
  p.page_table = p.slot_ids = upload(slots);
  p.context_lengths = upload(std::vector<int32_t>(requests, context));
  p.out = allocate<uint16_t>(rows * p.num_heads * HEAD_DIM);
  p.workspace_bytes = kv::workspace_size(p);
  p.workspace = allocate<unsigned char>(p.workspace_bytes);
  return p;
}

void print_stamps(int run, int ctas, int warps) {
  static long long stamps[kv::kStampedCtas][kv::kStampedWarps][kv::kPhases];
  check(cudaMemcpyFromSymbol(stamps, kv::phase_stamps, sizeof stamps), "cudaMemcpyFromSymbol");
  for (int cta = 0; cta < std::min(ctas, kv::kStampedCtas); ++cta) {
    long long first = stamps[cta][0][0];
    for (int warp = 1; warp < warps; ++warp) first = std::min(first, stamps[cta][warp][0]);
    for (int warp = 0; warp < warps; ++warp) {
      std::printf("%d %d %d", run, cta, warp);
      for (const long long at : stamps[cta][warp]) at == 0 ? std::printf(" -") : std::printf(" %lld", at - first);
      std::printf("\n");
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return std::fprintf(stderr, "usage: kernel_phases REQUESTS CONTEXT KV_HEADS RUNS\n"), 2;
  const int requests = std::atoi(arguments[1]), context = std::atoi(arguments[2]), kv_heads = std::atoi(arguments[3]);
  const kv::Gpu* gpu = nullptr;
  check(kv::current_gpu(gpu), "the GPU's properties");
  const kv::Params p = make_params(requests, context, kv_heads);
  const kv::LaunchConfig config = kv::make_wgmma_launch_config(p, gpu->sms);
  if (config.tile_rows != ROWS) return std::fprintf(stderr, "expected ROWS %d, found %d\n", config.tile_rows, ROWS), 1;
  const kv::Grid grid = kv::attention_grid(p, config);
  void* flush = allocate<unsigned char>(kFlushBytes);
  for (int run = -kWarmUps; run < std::atoi(arguments[4]); ++run) {
    void* stamps = nullptr;
    check(cudaGetSymbolAddress(&stamps, kv::phase_stamps), "cudaGetSymbolAddress");
    check(cudaMemset(stamps, 0, sizeof kv::phase_stamps), "cudaMemset");
    check(cudaMemset(flush, run & 0xff, kFlushBytes), "cudaMemset");
    const auto kernel = kv::wgmma_attention<HEAD_DIM, ROWS, kv::BF16, FP8>;
    check(kv::start_attention(kernel, p, *gpu, config, kv::kWgmmaShared), "the launch");
    check(cudaDeviceSynchronize(), "the kernel");
    if (run >= 0) print_stamps(run, grid.x * grid.y, grid.threads / 32);
  }
  return 0;
}
