// SPDX-License-Identifier: Apache-2.0
// The complete contract between host and device: sizes, pointers and attributes of one attention call.
//
// B requests, S block, N query heads, G key/value heads, D head_dim, L draft layers, M pages of a row of the page
// table. Tensors are dense and row-major, except the context, whose strides are inputs. The kernel takes device
// pointers, the reference host pointers.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define DFLASH_ANYWHERE __host__ __device__
#else
#define DFLASH_ANYWHERE
#endif

namespace dflash::kv_injection {

enum class DType : int32_t { kF16 = 0, kBF16 = 1, kF8E4M3 = 2 };

inline constexpr int32_t kMaxBlock = 32;
inline constexpr int32_t kMaxContext = 131072;
inline constexpr int32_t kMaxBatch = 256;
inline constexpr int32_t kMaxHeads = 1024;   // so that N * D always fits
inline constexpr int32_t kMaxPageSize = 64;  // if a row has several pages

// Fields of context_layout: the page size in context rows, strides in bytes, each a multiple of 16, and the number of
// pages that page table entries may name.
enum Layout : int32_t {
  kPageSize,    // 16, 32 or 64; any size if M is 1
  kPageStride,  // between pages of a layer
  kKVStride,    // from K to V of a page
  kRowStride,   // between context rows of a page
  kHeadStride,  // between heads
  kNumPages,
  kLayoutSize,
};

// Fields of a row of context_pointers.
enum Pointer : int32_t {
  kAddress,   // K in the layer's first page, a multiple of 16
  kChecksum,  // context_checksum() of the address and the layout
  kPointerSize,
};

// Tells addresses and strides from the arbitrary values with which TensorRT's builder times a node: random values match
// with a probability of 2^-64, and values that are all equal, or equal within each of the two tensors, never do, because
// 2 a + 6 b + 1 is odd.
DFLASH_ANYWHERE constexpr int64_t context_checksum(int64_t address, const int64_t* layout) {
  auto sum = static_cast<uint64_t>(address);
  for (int32_t i = 0; i < kLayoutSize; ++i) sum += static_cast<uint64_t>(layout[i]);
  return static_cast<int64_t>(~sum);
}

struct Params {
  // Sizes.
  int32_t batch;         // B; 0 makes the call a no-op
  int32_t block;         // S
  int32_t num_heads;     // N
  int32_t num_kv_heads;  // G, divides N
  int32_t head_dim;      // D: 64, 96, 128 or 256
  int32_t slots;         // rows of the page table; slot ids are below it
  int32_t layers;        // L
  int32_t max_pages;     // M

  // Attributes.
  int32_t layer;           // the cache layer that this call reads, below L
  int32_t sliding_window;  // 0: off; else a key is visible if |q - k| < sliding_window (positions)
  int32_t causal;          // 1: block slots do not see later block slots
  float rms_norm_eps;
  float softmax_scale;
  float k_scale;  // an FP8 cache stores K / k_scale; 1 for other caches
  float v_scale;
  float out_scale;    // an FP8 output stores output / out_scale, at most 448; 1 for other outputs
  DType block_dtype;  // dtype of qkv, its bias, q_norm and k_norm: kF16 or kBF16
  DType cache_dtype;  // block_dtype or kF8E4M3
  DType out_dtype;    // block_dtype or kF8E4M3

  // The block, before norm and rotation: for each slot the query heads, then the key heads, then the value heads. The
  // bias is added first; values are then rounded to block_dtype.
  const void* qkv;       // [B*S, (N + 2G)*D] block_dtype
  const void* qkv_bias;  // [(N + 2G)*D] block_dtype; may be null
  const void* q_norm;    // [D] block_dtype
  const void* k_norm;    // [D] block_dtype
  const float* rope;     // [B, S, D]: cos, then sin, of each slot's position, including YaRN's factor

  // The context, read only. Row j of a slot is at position j, block slot s at position context_length + s. Row j of
  // head g lies at address + page_table[slot][j / page size] * page stride + j % page size * row stride + g * head
  // stride, D elements of cache_dtype: K, normalised and rotated; V lies kKVStride bytes further. Only page table
  // entries of pages with visible rows are read. A request whose slot id, length or entries are out of range reads no
  // other memory, and its output is NaN; so is every request's if pointers or layout are invalid (context_layout.h).
  const int64_t* context_pointers;  // [L][kPointerSize]
  const int64_t* context_layout;    // [kLayoutSize]
  const int32_t* page_table;        // [slots, M], each in [0, number of pages)
  const int32_t* slot_ids;          // [B], rows of the page table, each in [0, slots)
  const int32_t* context_lengths;   // [B], each in [0, M * page size]
  const float* sinks;               // [N] extra logits of the softmax that have no value; may be null

  void* out;  // [B*S, N*D] out_dtype

  // Scratch memory of the kernel; not used by the reference.
  void* workspace;         // 16-byte aligned; may be null if workspace_bytes is 0
  size_t workspace_bytes;  // at least workspace_size(params)
  void* stream;            // cudaStream_t; not used by the reference
};

}  // namespace dflash::kv_injection
