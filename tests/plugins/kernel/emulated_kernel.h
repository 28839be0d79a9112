// SPDX-License-Identifier: Apache-2.0
// The emulated kernels that a program was compiled for (emulated_kernel.cpp).
#pragma once

#include <cstdint>
#include <functional>

#include "kv_injection_attention/kernel/launch_config.h"

namespace kv = dflash::kv_injection;

bool takes_workspace();
kv::LaunchConfig launch_config(const kv::Params& p, int ctas);
// False if it was compiled for other calls. `produce` is what the kernel before the call does; SEED orders CTAs and
// threads.
bool run(const std::function<void()>& produce, const kv::Params& p, const kv::LaunchConfig& config, uint32_t seed);
