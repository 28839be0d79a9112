// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>

inline void expect(bool holds, const char* text, int64_t found) {
  if (!holds) throw std::invalid_argument(std::string("expected ") + text + ", found " + std::to_string(found));
}

// One function per area; module.cpp is the list.
void bind_decoding(nanobind::module_& module);
void bind_kv_injection(nanobind::module_& module);
void bind_packing(nanobind::module_& module);
void bind_paged_attention(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_rms_norm(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
