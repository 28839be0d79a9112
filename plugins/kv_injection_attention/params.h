// SPDX-License-Identifier: Apache-2.0
// The whole contract between host and device: sizes, pointers and attributes of one attention call.
//
// B requests, S block, N query heads, G key/value heads, D head_dim, L draft layers, M pages of a row of the page
// table. Tensors are dense and row-major, but for the context, whose strides are inputs. Pointers are the device's for
// the kernel, the host's for the reference.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::kv_injection {

enum class DType : int32_t { kF16 = 0, kBF16 = 1, kF8E4M3 = 2 };

inline constexpr int32_t kMaxBlock = 32;
inline constexpr int32_t kMaxContext = 131072;
inline constexpr int32_t kMaxBatch = 256;
inline constexpr int32_t kMaxHeads = 1024;   // so that N * D fits anywhere
inline constexpr int32_t kMaxPageSize = 64;  // of a row of several pages

// The fields of context_layout: a page's size in context rows, and strides in bytes, each a multiple of 16.
enum Layout : int32_t {
  kPageSize,    // 16, 32 or 64; where M is 1, any size
  kPageStride,  // from a page to the next, of one layer
  kKVStride,    // from K to V of the same page
  kRowStride,   // from a context row to the next in its page
  kHeadStride,  // from a head to the next
  kLayoutSize,
};

struct Params {
  // Sizes.
  int32_t batch;         // B, 0 is an empty call
  int32_t block;         // S
  int32_t num_heads;     // N
  int32_t num_kv_heads;  // G, divides N
  int32_t head_dim;      // D: 64, 96, 128 or 256
  int32_t slots;         // rows of the page table; a request's slot id is below it
  int32_t layers;        // L
  int32_t max_pages;     // M

  // Attributes.
  int32_t layer;           // which of the L layers of the cache this call reads
  int32_t sliding_window;  // 0: none; else a key is visible if |q - k| < sliding_window (positions)
  int32_t causal;          // 1: a block slot does not see later block slots
  float rms_norm_eps;
  float softmax_scale;
  float k_scale;  // an FP8 cache holds K / k_scale; 1 for other caches
  float v_scale;
  float out_scale;    // an FP8 out holds the output / out_scale, at most 448; 1 for other outputs
  DType block_dtype;  // of qkv, its bias, q_norm and k_norm: kF16 or kBF16
  DType cache_dtype;  // block_dtype or kF8E4M3
  DType out_dtype;    // block_dtype or kF8E4M3

  // The block, before norm and rotation: of each slot the query heads, then the key heads, then the value heads. The
  // bias is added to them first, and values are rounded to block_dtype again.
  const void* qkv;       // [B*S, (N + 2G)*D] block_dtype
  const void* qkv_bias;  // [(N + 2G)*D] block_dtype; may be null
  const void* q_norm;    // [D] block_dtype
  const void* k_norm;    // [D] block_dtype
  const float* rope;     // [B, S, D]: cos, then sin, of each slot's position, YaRN's factor included

  // The context, read only: row j of a slot stands at position j, block slot s at context_length + s. Row j of head g
  // lies at context_pointers[layer] + page_table[slot][j / page size] * page stride + j % page size * row stride
  // + g * head stride, D elements of cache_dtype: K, normed and rotated, and kKVStride behind it V. Of a row of the
  // page table only the entries of pages that hold visible rows are read.
  const int64_t* context_pointers;  // [L] addresses, multiples of 16
  const int64_t* context_layout;    // [kLayoutSize]
  const int32_t* page_table;        // [slots, M]
  const int32_t* slot_ids;          // [B], rows of the page table, each in [0, slots)
  const int32_t* context_lengths;   // [B], each in [0, M * page size]
  const float* sinks;               // [N] logits of the softmax without a value; may be null

  void* out;  // [B*S, N*D] out_dtype

  // Scratch of the kernel; the reference leaves it alone.
  void* workspace;         // 16-byte aligned; may be null if workspace_bytes is 0
  size_t workspace_bytes;  // at least workspace_size(params)
  void* stream;            // cudaStream_t; the reference leaves it alone
};

}  // namespace dflash::kv_injection
