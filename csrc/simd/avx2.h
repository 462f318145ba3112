// Vectors of sixteen for AVX2, FMA and F16C: two registers of eight.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "codes.h"

namespace {

constexpr int VEC_REGISTERS = 8;  // vectors that the registers hold

struct Vec {
  __m256 lo, hi;
};

struct Int {
  __m256i lo, hi;
};

inline Vec vec_set(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline Vec vec_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec vec_load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void vec_store(float *p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec vec_add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec vec_sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec vec_mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec vec_div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec vec_max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec vec_min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
template <int DISTANCE> inline Vec vec_swap(Vec a) {
  if constexpr (DISTANCE == 1) return {_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)};
  else if constexpr (DISTANCE == 2) return {_mm256_permute_ps(a.lo, 0x4e), _mm256_permute_ps(a.hi, 0x4e)};
  else if constexpr (DISTANCE == 4) return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
  else return {a.hi, a.lo};
}
inline Vec vec_abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline Vec vec_round(Vec a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline Int vec_bits(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Vec int_as_vec(Int a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Int int_set(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline Int int_add(Int a, Int b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Int int_and(Int a, Int b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline Int int_or(Int a, Int b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N> inline Int int_left(Int a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N> inline Int int_right(Int a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
inline Vec int_to_vec(Int a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Int vec_to_int(Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Vec vec_below(Vec x, Vec limit, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_LT_OQ))};
}

inline __m128i load16(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
inline __m256i load32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline Vec half_load(const uint16_t *p) { return {_mm256_cvtph_ps(load16(p)), _mm256_cvtph_ps(load16(p + 8))}; }
/// Sixteen E4M3 values, 2^-8 times: their bits are those of a float16 with a smaller exponent.
inline Vec e4m3_load(const uint8_t *p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load16(p)), 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbf80));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
inline Vec e5m2_load(const uint8_t *p) {
  const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load16(p)), 8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
inline Int u8_load(const uint8_t *p) {
  const __m128i x = load16(p);
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline Int s8_load(const int8_t *p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}
inline Int u16_load(const uint16_t *p) { return {_mm256_cvtepu16_epi32(load16(p)), _mm256_cvtepu16_epi32(load16(p + 8))}; }
inline Int int_load(const void *p) { return {load32(p), load32((const char *)p + 32)}; }
inline __m256i int_pack16(Int a) {  // lanes in order, as int16
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a.lo, a.hi), 0xd8);
}
inline void int_store_s8(int8_t *p, Int a) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
inline void int_store_u16(uint16_t *p, Int a) { _mm256_storeu_si256((__m256i *)p, int_pack16(a)); }

inline float vec_sum(Vec a) {
  const __m256 w = _mm256_add_ps(a.lo, a.hi);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float vec_largest(Vec a) {
  const __m256 w = _mm256_max_ps(a.lo, a.hi);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline int32_t int_sum(Int a) {
  const __m256i w = _mm256_add_epi32(a.lo, a.hi);
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

inline void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

/// The codes of eight outputs for one group of 32 inputs as unsigned bytes: eight quads of inputs, [output][4] each.
template <int BITS> inline void unpack(const uint8_t *p, __m256i u[8]) {
  if constexpr (width_of(BITS) >= 4) {
    const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m256i v = load32(p + j * 64);
      u[j] = _mm256_and_si256(v, nibble);
      u[j + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
    }
  } else {
    const __m256i two = _mm256_set1_epi8(3);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const __m256i v = load32(p + j * 64);
      u[j] = _mm256_and_si256(v, two);
      u[j + 2] = _mm256_and_si256(_mm256_srli_epi16(v, 2), two);
      u[j + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), two);
      u[j + 6] = _mm256_and_si256(_mm256_srli_epi16(v, 6), two);
    }
  }
  if constexpr (BITS == FP4) {
    const __m256i table = _mm256_broadcastsi128_si256(load16(FP4_TABLE));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) u[j] = _mm256_shuffle_epi8(table, u[j]);
  }
  if constexpr (BITS == 3 || BITS == 5) {  // one more bit: bit j of a byte belongs to quad j
    const int place = BITS - 1;
    const __m256i bit = _mm256_set1_epi8(1 << place), v = load32(p + (BITS == 3 ? 128 : 256));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      const __m256i moved = j <= place ? _mm256_slli_epi16(v, place - j) : _mm256_srli_epi16(v, j - place);
      u[j] = _mm256_or_si256(u[j], _mm256_and_si256(moved, bit));
    }
  }
  if constexpr (BITS == 6) {  // two more bits: bits 2 i and 2 i + 1 of byte row j & 1 belong to quad j = 2 i + (j & 1)
    const __m256i two = _mm256_set1_epi8(0x30);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const __m256i v = load32(p + 256 + j * 64);
      u[j] = _mm256_or_si256(u[j], _mm256_and_si256(_mm256_slli_epi16(v, 4), two));
      u[j + 2] = _mm256_or_si256(u[j + 2], _mm256_and_si256(_mm256_slli_epi16(v, 2), two));
      u[j + 4] = _mm256_or_si256(u[j + 4], _mm256_and_si256(v, two));
      u[j + 6] = _mm256_or_si256(u[j + 6], _mm256_and_si256(_mm256_srli_epi16(v, 2), two));
    }
  }
}

inline __m256i quad(const int8_t *q) {
  int32_t four;
  __builtin_memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}

/// Dots of eight outputs with 4 (TO - FROM) inputs. Products of unsigned codes with int8 are added up in 16 bits for as
/// long as 2 * 127 * (2^BITS - 1) * terms < 2^15, and no longer; codes of FP4 reach 24.
template <int BITS, int FROM, int TO> inline __m256i dot_unsigned(const __m256i u[8], const int8_t *q) {
  constexpr int terms = BITS <= 4 ? TO - FROM : BITS == 5 || BITS == FP4 ? 4 : 2;
  const __m256i one = _mm256_set1_epi16(1);
  __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int first = FROM; first < TO; first += terms) {
    __m256i part = _mm256_maddubs_epi16(u[first], quad(q + first * 4));
#pragma GCC unroll 8
    for (int j = first + 1; j < first + terms; j++)
      part = _mm256_add_epi16(part, _mm256_maddubs_epi16(u[j], quad(q + j * 4)));
    const __m256i pair = _mm256_madd_epi16(part, one);
    sum = first == FROM ? pair : _mm256_add_epi32(sum, pair);
  }
  return sum;
}

/// Dots of sixteen outputs with signed bytes, for ROWS rows of 32: |w| * (q with the sign of w). |-128| is 128 as an unsigned
/// byte, and q, from -127 to 127, has its own negative, so pairs stay within 2 * 128 * 127 < 2^15. The operands the other way
/// round would want the negative of w = -128.
template <int FROM, int TO, int ROWS> inline void dot_signed(const uint8_t *w, const int8_t *q, Int sum[ROWS]) {
  const __m256i one = _mm256_set1_epi16(1);
#pragma GCC unroll 2
  for (int m = 0; m < ROWS; m++) sum[m] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
  for (int j = FROM; j < TO; j++) {
    const __m256i lo = load32(w + j * 64), hi = load32(w + j * 64 + 32);
    const __m256i size_lo = _mm256_abs_epi8(lo), size_hi = _mm256_abs_epi8(hi);
#pragma GCC unroll 2
    for (int m = 0; m < ROWS; m++) {
      const __m256i a = quad(q + m * 32 + j * 4);
      const __m256i dot_lo = _mm256_maddubs_epi16(size_lo, _mm256_sign_epi8(a, lo));
      const __m256i dot_hi = _mm256_maddubs_epi16(size_hi, _mm256_sign_epi8(a, hi));
      sum[m].lo = _mm256_add_epi32(sum[m].lo, _mm256_madd_epi16(dot_lo, one));
      sum[m].hi = _mm256_add_epi32(sum[m].hi, _mm256_madd_epi16(dot_hi, one));
    }
  }
}

/// acc + scale * dot + offset * sum, the latter two times *step if STEPS.
template <bool STEPS>
inline __m256 add_group(__m256 dot, float sum, const float *step, __m256 scale, __m256 offset, __m256 acc) {
  if constexpr (STEPS) {
    const __m256 group = _mm256_fmadd_ps(_mm256_set1_ps(sum), offset, _mm256_mul_ps(dot, scale));
    return _mm256_fmadd_ps(group, _mm256_set1_ps(*step), acc);
  }
  return _mm256_fmadd_ps(_mm256_set1_ps(sum), offset, _mm256_fmadd_ps(dot, scale, acc));
}

/// See scalar.h.
template <int BITS, bool STEPS = false, int FROM = 0, int TO = 8>
inline void group_dot(const uint8_t *codes, int rows, const int8_t *q, const float *sums, const float *steps, Vec scale,
                      Vec offset, Vec *acc) {
  if constexpr (BITS == 8) {
    auto add = [&](int m, Int dot) {
      const Vec v = int_to_vec(dot);
      acc[m] = STEPS ? vec_fma(vec_mul(v, scale), vec_set(steps[m]), acc[m]) : vec_fma(v, scale, acc[m]);
    };
    Int sum[2];
    int m = 0;
    for (; m + 1 < rows; m += 2) {  // two rows share the loads and the sizes of the codes
      dot_signed<FROM, TO, 2>(codes, q + m * 32, sum);
      add(m, sum[0]), add(m + 1, sum[1]);
    }
    if (m == rows) return;
    dot_signed<FROM, TO, 1>(codes, q + m * 32, sum);
    add(m, sum[0]);
  } else {
    __m256i u[8];
    unpack<BITS>(codes, u);
    for (int m = 0; m < rows; m++) {
      const __m256 dot = _mm256_cvtepi32_ps(dot_unsigned<BITS, FROM, TO>(u, q + m * 32));
      acc[m].lo = add_group<STEPS>(dot, sums[m], steps + m, scale.lo, offset.lo, acc[m].lo);
    }
    unpack<BITS>(codes + 32, u);
    for (int m = 0; m < rows; m++) {
      const __m256 dot = _mm256_cvtepi32_ps(dot_unsigned<BITS, FROM, TO>(u, q + m * 32));
      acc[m].hi = add_group<STEPS>(dot, sums[m], steps + m, scale.hi, offset.hi, acc[m].hi);
    }
  }
}

/// One group of 32 inputs, an input at a time: see scalar.h.
template <int BITS> struct Codes {
  alignas(64) uint8_t u[8][64];

  explicit Codes(const uint8_t *p) {
    if constexpr (BITS == 8) {
      __builtin_memcpy(u, p, 512);
    } else {
      __m256i half[8];
      for (int h = 0; h < 2; h++) {
        unpack<BITS>(p + 32 * h, half);
        for (int j = 0; j < 8; j++) _mm256_store_si256((__m256i *)(u[j] + 32 * h), half[j]);
      }
    }
  }

  /// The inputs of a quad, `which` 0 to 3, one byte of every 32-bit lane.
  template <int WHICH> Int input(int quad) const {
    const Int four = int_load(u[quad]);
    if constexpr (BITS == 8) {
      const Int high = WHICH == 3 ? four : int_left<24 - 8 * WHICH>(four);
      return {_mm256_srai_epi32(high.lo, 24), _mm256_srai_epi32(high.hi, 24)};
    } else {
      return int_and(int_right<8 * WHICH>(four), int_set(255));
    }
  }
};

}  // namespace
