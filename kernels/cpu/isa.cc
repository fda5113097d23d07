#include <vector>

#include "kernels/cpu/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace certkv::cpu {
namespace {

#if defined(__x86_64__)

struct CpuidRegisters {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
};

CpuidRegisters Cpuid(unsigned leaf) {
  CpuidRegisters r;
  if (__get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return CpuidRegisters{};
  return r;
}

// Which register states the operating system saves on a switch (XCR0).
unsigned long long SavedStates() {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<unsigned long long>(high) << 32 | low;
}

bool HasAll(unsigned value, unsigned bits) { return (value & bits) == bits; }

struct Support {
  bool avx2 = false;
  bool avx512 = false;
};

Support ReadSupport() {
  constexpr unsigned kOsxsave = 1u << 27, kAvx = 1u << 28, kFma = 1u << 12, kF16c = 1u << 29;
  constexpr unsigned kAvx2 = 1u << 5;
  constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr unsigned kVnni = 1u << 11;
  constexpr unsigned kYmmState = 0x6, kZmmState = 0xe6;  // SSE, AVX; and opmask, upper ZMM
  Support support;
  const unsigned basic = Cpuid(1).ecx;
  if (!HasAll(basic, kOsxsave | kAvx | kFma | kF16c)) return support;
  const unsigned saved = static_cast<unsigned>(SavedStates());
  const CpuidRegisters extended = Cpuid(7);
  support.avx2 = HasAll(saved, kYmmState) && HasAll(extended.ebx, kAvx2);
  support.avx512 = support.avx2 && HasAll(saved, kZmmState) &&
                   HasAll(extended.ebx, kF | kDq | kBw | kVl) && HasAll(extended.ecx, kVnni);
  return support;
}

#endif

}  // namespace

std::vector<CpuIsa> SupportedIsas() {
  std::vector<CpuIsa> isas = {CpuIsa::kPortable};
#if defined(__x86_64__)
  const Support support = ReadSupport();
  if (support.avx2) isas.push_back(CpuIsa::kAvx2);
  if (support.avx512) isas.push_back(CpuIsa::kAvx512Vnni);
#endif
  return isas;
}

}  // namespace certkv::cpu
