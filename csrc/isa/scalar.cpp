#include "../simd/scalar.h"

#include "kernels.inl"

const bd::Kernels bd::SCALAR = BD_KERNELS("scalar");
