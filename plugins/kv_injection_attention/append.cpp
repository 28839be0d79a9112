// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/append.h"

#include <cstring>
#include <limits>
#include <utility>

#include "common/text.h"
#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {
namespace {

constexpr int64_t kVectorBytes = 16;  // size of one copy of the kernel

Problem check_address(const char* name, const void* pointer, uintptr_t alignment) {
  if (pointer == nullptr) return text(name, ": expected a tensor, found a null pointer");
  if (reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return std::nullopt;
  return text(name, ": expected an address that ", alignment, " divides, found ", pointer);
}

}  // namespace

Problem check_append(const AppendParams& p) {
  if (p.row_bytes <= 0 || p.row_bytes % kVectorBytes != 0) {
    return text("a row: expected a multiple of ", kVectorBytes, " bytes, found ", p.row_bytes);
  }
  if (p.page_rows > kMaxContext) {
    return text("page_rows: expected at most ", kMaxContext, ", found ", p.page_rows);
  }
  // The kernel counts 16 bytes of K and V in 32 bits.
  const int64_t most =
      std::numeric_limits<int32_t>::max() / (p.row_bytes / kVectorBytes) / (p.layers > 0 ? 2 * p.layers : 1);
  if (p.rows > most) return text("rows: expected at most ", most, " of this size, found ", p.rows);
  if (p.rows == 0) return std::nullopt;  // empty tensors may be null
  for (const auto& [name, pointer] : {std::pair{"kv", p.kv},
                                      {"k_cache", static_cast<const void*>(p.k_cache)},
                                      {"v_cache", static_cast<const void*>(p.v_cache)}}) {
    if (Problem problem = check_address(name, pointer, kVectorBytes)) return problem;
  }
  for (const auto& [name, pointer] : {std::pair{"page_ids", p.page_ids}, {"offsets", p.offsets}}) {
    if (Problem problem = check_address(name, pointer, alignof(int32_t))) return problem;
  }
  return std::nullopt;
}

void append_reference(const AppendParams& p) {
  const auto* from = static_cast<const unsigned char*>(p.kv);
  const auto row_bytes = static_cast<size_t>(p.row_bytes);
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t page = p.page_ids[row], offset = p.offsets[row];
    const bool is_there = page >= 0 && page < p.num_pages && offset >= 0 && offset < p.page_rows;
    for (void* cache : {p.k_cache, p.v_cache}) {
      for (int64_t layer = 0; layer < p.layers; ++layer, from += p.row_bytes) {
        const int64_t to = (page * p.layers + layer) * p.page_rows + offset;
        if (is_there) std::memcpy(static_cast<unsigned char*>(cache) + to * p.row_bytes, from, row_bytes);
      }
    }
  }
}

}  // namespace dflash::kv_injection
