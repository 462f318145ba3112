// Which instruction sets this machine runs.
#include <cstring>
#include <string>

#include "ops.h"

namespace bd {

namespace {

bool runs_avx2() {
#if defined(BD_WITH_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool runs_avx512() {
#if defined(BD_EMULATE_AVX512)
  return true;  // compiled for what the machine has, with the wider instructions emulated: for tests
#elif defined(BD_WITH_AVX512)
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

const Kernels *find(const char *isa) {
  if (!std::strcmp(isa, "scalar")) return &SCALAR;
#ifdef BD_WITH_AVX2
  if (!std::strcmp(isa, "avx2") && runs_avx2()) return &AVX2;
#endif
#ifdef BD_WITH_AVX512
  if (!std::strcmp(isa, "avx512") && runs_avx512()) return &AVX512;
#endif
  return nullptr;
}

}  // namespace

const Kernels *find_kernels(const char *isa) {
  if (*isa) return find(isa);
#ifndef BD_EMULATE_AVX512  // an emulation is for tests that ask for it
  if (const Kernels *found = find("avx512")) return found;
#endif
  if (const Kernels *found = find("avx2")) return found;
  return &SCALAR;
}

}  // namespace bd

extern "C" const char *bd_isas(void) {
  static const std::string names = std::string("scalar") + (bd::runs_avx2() ? " avx2" : "") + (bd::runs_avx512() ? " avx512" : "");
  return names.c_str();
}
