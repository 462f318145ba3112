#include "../simd/avx2.h"

#include "kernels.inl"

const bd::Kernels bd::AVX2 = BD_KERNELS("avx2");
