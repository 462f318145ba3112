// Vectors of sixteen, one lane for each output of a panel, in plain C++: the kernels' specification of a Vec.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "codes.h"

namespace {

constexpr int VEC_REGISTERS = 8;  // vectors that the registers hold

struct Vec {
  float v[16];
};

struct Int {
  int32_t v[16];
};

#define BD_EACH(expression)                 \
  for (int i = 0; i < 16; i++) expression;

inline Vec vec_set(float a) { Vec r; BD_EACH(r.v[i] = a) return r; }
inline Vec vec_zero() { return vec_set(0.0f); }
inline Vec vec_load(const float *p) { Vec r; memcpy(r.v, p, 64); return r; }
inline void vec_store(float *p, Vec a) { memcpy(p, a.v, 64); }
inline Vec vec_add(Vec a, Vec b) { BD_EACH(a.v[i] += b.v[i]) return a; }
inline Vec vec_sub(Vec a, Vec b) { BD_EACH(a.v[i] -= b.v[i]) return a; }
inline Vec vec_mul(Vec a, Vec b) { BD_EACH(a.v[i] *= b.v[i]) return a; }
inline Vec vec_div(Vec a, Vec b) { BD_EACH(a.v[i] /= b.v[i]) return a; }
inline Vec vec_fma(Vec a, Vec b, Vec c) { BD_EACH(c.v[i] += a.v[i] * b.v[i]) return c; }  // rounds twice
inline Vec vec_max(Vec a, Vec b) { BD_EACH(a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]) return a; }
inline Vec vec_min(Vec a, Vec b) { BD_EACH(a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]) return a; }
/// Lane i comes from lane i ^ DISTANCE: 1, 2, 4 or 8.
template <int DISTANCE> inline Vec vec_swap(Vec a) { Vec r; BD_EACH(r.v[i] = a.v[i ^ DISTANCE]) return r; }
inline Vec vec_abs(Vec a) { BD_EACH(a.v[i] = fabsf(a.v[i])) return a; }
inline Vec vec_round(Vec a) { BD_EACH(a.v[i] = nearbyintf(a.v[i])) return a; }

inline Int vec_bits(Vec a) { Int r; memcpy(&r, &a, 64); return r; }
inline Vec int_as_vec(Int a) { Vec r; memcpy(&r, &a, 64); return r; }
inline Int int_set(int32_t a) { Int r; BD_EACH(r.v[i] = a) return r; }
inline Int int_add(Int a, Int b) { BD_EACH(a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])) return a; }
inline Int int_and(Int a, Int b) { BD_EACH(a.v[i] &= b.v[i]) return a; }
inline Int int_or(Int a, Int b) { BD_EACH(a.v[i] |= b.v[i]) return a; }
template <int N> inline Int int_left(Int a) { BD_EACH(a.v[i] = (int32_t)((uint32_t)a.v[i] << N)) return a; }
template <int N> inline Int int_right(Int a) { BD_EACH(a.v[i] = (int32_t)((uint32_t)a.v[i] >> N)) return a; }
inline Vec int_to_vec(Int a) { Vec r; BD_EACH(r.v[i] = (float)a.v[i]) return r; }
inline Int vec_to_int(Vec a) { Int r; BD_EACH(r.v[i] = (int32_t)nearbyintf(a.v[i])) return r; }
/// Lane by lane: a where x < limit, else b.
inline Vec vec_below(Vec x, Vec limit, Vec a, Vec b) { BD_EACH(b.v[i] = x.v[i] < limit.v[i] ? a.v[i] : b.v[i]) return b; }

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits;
  if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
  else if (rest >= 0x400) bits = (rest << 13) + ((127 - 15) << 23);
  else {
    const float small = (float)rest * 5.9604644775390625e-8f;  // 2^-24
    memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline Vec half_load(const uint16_t *p) { Vec r; BD_EACH(r.v[i] = half_to_float(p[i])) return r; }
/// Sixteen E4M3 values, 2^-8 times: their bits are those of a float16 with a smaller exponent.
inline Vec e4m3_load(const uint8_t *p) {
  Vec r;
  BD_EACH(r.v[i] = half_to_float((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)))
  return r;
}
inline Vec e5m2_load(const uint8_t *p) { Vec r; BD_EACH(r.v[i] = half_to_float((uint16_t)(p[i] << 8))) return r; }
inline Int u8_load(const uint8_t *p) { Int r; BD_EACH(r.v[i] = p[i]) return r; }
inline Int s8_load(const int8_t *p) { Int r; BD_EACH(r.v[i] = p[i]) return r; }
inline Int u16_load(const uint16_t *p) { Int r; BD_EACH(r.v[i] = p[i]) return r; }
inline Int int_load(const void *p) { Int r; memcpy(&r, p, 64); return r; }
inline void int_store_s8(int8_t *p, Int a) { BD_EACH(p[i] = (int8_t)a.v[i]) }     // lanes from -128 to 127
inline void int_store_u16(uint16_t *p, Int a) { BD_EACH(p[i] = (uint16_t)a.v[i]) }  // lanes from 0 to 65535

/// The sum of the lanes, in the order that every instruction set keeps: halves, quarters, pairs.
inline float vec_sum(Vec a) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline float vec_largest(Vec a) {
  float m = a.v[0];
  BD_EACH(m = a.v[i] > m ? a.v[i] : m)
  return m;
}
inline int32_t int_sum(Int a) { int32_t s = 0; BD_EACH(s += a.v[i]) return s; }

inline void prefetch(const void *) {}

/// One group of 32 inputs: codes of a panel as bytes, quads of inputs one after the other: u[quad][output][4].
template <int BITS> struct Codes {
  uint8_t u[8][16][4];

  explicit Codes(const uint8_t *p) {
    for (int quad = 0; quad < 8; quad++)
      for (int byte = 0; byte < 64; byte++) {
        uint8_t code;
        if (BITS == 8) code = p[quad * 64 + byte];
        else if (width_of(BITS) >= 4) code = p[(quad & 3) * 64 + byte] >> (quad >> 2) * 4 & 15;
        else code = p[(quad & 1) * 64 + byte] >> (quad >> 1) * 2 & 3;
        if (BITS == 3) code |= (p[128 + byte] >> quad & 1) << 2;
        if (BITS == 5) code |= (p[256 + byte] >> quad & 1) << 4;
        if (BITS == 6) code |= (p[256 + (quad & 1) * 64 + byte] >> (quad >> 1) * 2 & 3) << 4;
        u[quad][byte / 4][byte % 4] = BITS == FP4 ? FP4_TABLE[code] : code;
      }
  }

  /// The codes of input 4 * quad + WHICH of the group; signed for 8 bits.
  template <int WHICH> Int input(int quad) const {
    Int r;
    BD_EACH(r.v[i] = BITS == 8 ? (int8_t)u[quad][i][WHICH] : u[quad][i][WHICH])
    return r;
  }
};

/// acc[row] += scale * dot(codes, q[row]) + offset * sum[row] for each row of a block; q has 32 bytes a row.
/// FROM and TO: the quads that count, all eight of them but for grids with a scale for 16 inputs.
template <int BITS, int FROM = 0, int TO = 8>
inline void group_dot(const uint8_t *codes, int rows, const int8_t *q, const float *sums, Vec scale, Vec offset, Vec *acc) {
  const Codes<BITS> c(codes);
  for (int m = 0; m < rows; m++) {
    Int dot = int_set(0);
    for (int quad = FROM; quad < TO; quad++)
      for (int k = 0; k < 4; k++)
        BD_EACH(dot.v[i] += (BITS == 8 ? (int8_t)c.u[quad][i][k] : c.u[quad][i][k]) * q[m * 32 + quad * 4 + k])
    acc[m] = vec_fma(int_to_vec(dot), scale, acc[m]);
    acc[m] = vec_fma(vec_set(sums[m]), offset, acc[m]);
  }
}

#undef BD_EACH

}  // namespace
