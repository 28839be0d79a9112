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
// CPU features whose registers the operating system saves. __builtin_cpu_supports() is always false with zig's runtime.
struct Features {
  bool avx2 = false, avx512 = false, avx512_bf16 = false;

  Features() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kFirst = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & kFirst) != kFirst) return;
    unsigned saved, high;
    asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    constexpr unsigned kYmm = 0x6, kZmm = 0xe6;  // register sets enabled in XCR0
    if ((saved & kYmm) != kYmm || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return;
    avx2 = (ebx & bit_AVX2) != 0;
    constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    avx512 = avx2 && (saved & kZmm) == kZmm && (ebx & kAvx512) == kAvx512 && (ecx & bit_AVX512VBMI) != 0;
    const unsigned last_subleaf = eax;
    if (avx512 && last_subleaf > 0 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx))
      avx512_bf16 = (eax >> 5 & 1) != 0;
  }
};

const Features& features() {
  static const Features detected;
  return detected;
}
#endif

std::vector<std::pair<std::string, Isa>> detect_isas() {
  std::vector<std::pair<std::string, Isa>> usable;
#if DFLASH_X86_KERNELS
  if (features().avx512) usable.emplace_back("avx512", Isa::kAvx512);
  if (features().avx2) usable.emplace_back("avx2", Isa::kAvx2);
#endif
  usable.emplace_back("scalar", Isa::kScalar);
  return usable;
}

const std::vector<std::pair<std::string, Isa>>& detected_isas() {
  static const auto usable = detect_isas();
  return usable;
}

}  // namespace

bool has_avx512_bf16() {
#if DFLASH_X86_KERNELS
  return features().avx512_bf16;
#else
  return false;
#endif
}

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
  throw std::invalid_argument("expected an instruction set among best" + usable + "; found " + std::string(name));
}

}  // namespace dflash
