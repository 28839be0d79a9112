// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

// One function per area; module.cpp is the list.
void bind_kv_injection(nanobind::module_& module);
void bind_packing(nanobind::module_& module);
void bind_paged_attention(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_rms_norm(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
