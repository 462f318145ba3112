// One instruction set's table of kernels: included by isa/NAME.cpp after simd/NAME.h, compiled with that set's flags.
//
// Everything is in unnamed namespaces, and nothing of the C++ library is used: a function that the linker could share with
// another instruction set's copy might be the one with the wider instructions.
#include <math.h>

#include "../kernels.h"
#include "../kernels/math.inl"
#include "../kernels/rows.inl"
#include "../kernels/linear.inl"
#include "../kernels/attention.inl"
#include "../kernels/logits.inl"
#include "../kernels/limits.inl"

#define BD_KERNELS(NAME) \
  {NAME, round_rows, linear, gated, gate_rows, add_normed, unpack_row, rope_rows, attend, merge, \
   top,  softmax,    softcap, read, busy_float}
