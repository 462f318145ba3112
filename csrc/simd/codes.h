// Codes that are not plain integers, for every instruction set.
#pragma once
#include <stdint.h>

namespace {

/// In place of a number of bits: E2M1 floats of four bits. Twice such a value is one of -12 to 12, and comes as that number
/// plus 12, so that it is unsigned like an integer code whose 0 stands at 12.
constexpr int FP4 = 104;

/// Bits that a code takes.
constexpr int width_of(int bits) { return bits == FP4 ? 4 : bits; }

alignas(16) constexpr uint8_t FP4_TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace
