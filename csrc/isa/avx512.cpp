#include "../simd/avx512.h"

#include "kernels.inl"

const bd::Kernels bd::AVX512 = BD_KERNELS("avx512");
