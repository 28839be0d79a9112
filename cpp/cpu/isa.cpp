// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <stdexcept>
#include <utility>

#if DFLASH_X86_KERNELS
#include <cpuid.h>
#endif

namespace dflash {
namespace {

#if DFLASH_X86_KERNELS
bool has_f16c() {  // Clang 14 does not know it as the name of a feature
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

std::vector<std::pair<std::string, Isa>> detect_isas() {
  std::vector<std::pair<std::string, Isa>> usable;
#if DFLASH_X86_KERNELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c() && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi")) {
    usable.emplace_back("avx512", Isa::kAvx512);
  }
  if (avx2) usable.emplace_back("avx2", Isa::kAvx2);
#endif
  usable.emplace_back("scalar", Isa::kScalar);
  return usable;
}

const std::vector<std::pair<std::string, Isa>>& detected_isas() {
  static const auto usable = detect_isas();
  return usable;
}

}  // namespace

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (const auto& [name, isa] : detected_isas()) names.push_back(name);
  return names;
}

Isa isa_named(std::string_view name) {
  if (name == "best") return detected_isas().front().second;
  std::string usable;
  for (const auto& [candidate, isa] : detected_isas()) {
    if (candidate == name) return isa;
    usable += ", " + candidate;
  }
  throw std::invalid_argument("expected an instruction set among best" + usable + "; found " +
                              std::string(name));
}

}  // namespace dflash
