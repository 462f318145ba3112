// Vectors of sixteen for AVX-512 (F, BW, DQ, VL, VNNI): one register.
#pragma once
#ifdef BD_EMULATE_AVX512
#include "../tests/emulated_avx512.h"
#else
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 says it of its own header: GCC bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#include <stdint.h>

#include "codes.h"

namespace {

constexpr int VEC_REGISTERS = 32;  // vectors that the registers hold

using Vec = __m512;
using Int = __m512i;

inline Vec vec_set(float a) { return _mm512_set1_ps(a); }
inline Vec vec_zero() { return _mm512_setzero_ps(); }
inline Vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
inline void vec_store(float *p, Vec a) { _mm512_storeu_ps(p, a); }
inline Vec vec_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec vec_sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec vec_mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec vec_div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec vec_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec vec_min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
template <int DISTANCE> inline Vec vec_swap(Vec a) {
  if constexpr (DISTANCE == 1) return _mm512_permute_ps(a, 0xb1);
  else if constexpr (DISTANCE == 2) return _mm512_permute_ps(a, 0x4e);
  else if constexpr (DISTANCE == 4) return _mm512_shuffle_f32x4(a, a, 0xb1);
  else return _mm512_shuffle_f32x4(a, a, 0x4e);
}
inline Vec vec_abs(Vec a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
inline Vec vec_round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Int vec_bits(Vec a) { return _mm512_castps_si512(a); }
inline Vec int_as_vec(Int a) { return _mm512_castsi512_ps(a); }
inline Int int_set(int32_t a) { return _mm512_set1_epi32(a); }
inline Int int_add(Int a, Int b) { return _mm512_add_epi32(a, b); }
inline Int int_and(Int a, Int b) { return _mm512_and_si512(a, b); }
inline Int int_or(Int a, Int b) { return _mm512_or_si512(a, b); }
template <int N> inline Int int_left(Int a) { return _mm512_slli_epi32(a, N); }
template <int N> inline Int int_right(Int a) { return _mm512_srli_epi32(a, N); }
inline Vec int_to_vec(Int a) { return _mm512_cvtepi32_ps(a); }
inline Int vec_to_int(Vec a) { return _mm512_cvtps_epi32(a); }
inline Vec vec_below(Vec x, Vec limit, Vec a, Vec b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), b, a);
}

inline __m128i load16(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
inline __m256i load32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline Vec half_load(const uint16_t *p) { return _mm512_cvtph_ps(load32(p)); }
/// Sixteen E4M3 values, 2^-8 times: their bits are those of a float16 with a smaller exponent.
inline Vec e4m3_load(const uint8_t *p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load16(p)), 8);
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbf80)));
}
inline Vec e5m2_load(const uint8_t *p) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load16(p)), 8));
}
inline Int u8_load(const uint8_t *p) { return _mm512_cvtepu8_epi32(load16(p)); }
inline Int s8_load(const int8_t *p) { return _mm512_cvtepi8_epi32(load16(p)); }
inline Int u16_load(const uint16_t *p) { return _mm512_cvtepu16_epi32(load32(p)); }
inline Int int_load(const void *p) { return _mm512_loadu_si512(p); }
inline void int_store_s8(int8_t *p, Int a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
inline void int_store_u16(uint16_t *p, Int a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(a)); }

inline float vec_sum(Vec a) {
  const __m256 w = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float vec_largest(Vec a) { return _mm512_reduce_max_ps(a); }
inline int32_t int_sum(Int a) { return _mm512_reduce_add_epi32(a); }

inline void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

/// COUNT bits of each of 64 bytes, moved from bit FROM to bit TO.
template <int FROM, int COUNT, int TO> inline Int bits_of(const uint8_t *p) {
  const Int mask = _mm512_set1_epi8(((1 << COUNT) - 1) << TO);
  if constexpr (FROM > TO) return int_and(_mm512_srli_epi16(int_load(p), FROM - TO), mask);
  else if constexpr (FROM < TO) return int_and(_mm512_slli_epi16(int_load(p), TO - FROM), mask);
  else return int_and(int_load(p), mask);
}

/// The codes of a quad of inputs as bytes, [output][4]: unsigned but for 8 bits.
template <int BITS, int QUAD> inline Int unpack_quad(const uint8_t *p) {
  if constexpr (BITS == 8) return int_load(p + QUAD * 64);
  constexpr int low = width_of(BITS) < 4 ? 2 : 4;  // bits in the plane that comes first
  const Int u = bits_of<QUAD / low * low, low, 0>(p + QUAD % low * 64);
  if constexpr (BITS == FP4) return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load16(FP4_TABLE)), u);
  else if constexpr (BITS == low + 1) return int_or(u, bits_of<QUAD, 1, low>(p + low * 64));
  else if constexpr (BITS == low + 2) return int_or(u, bits_of<QUAD / 2 * 2, 2, low>(p + low * 64 + QUAD % 2 * 64));
  else return u;
}

/// One group of 32 inputs, an input at a time: see scalar.h.
template <int BITS> struct Codes {
  Int quads[8];

  explicit Codes(const uint8_t *p)
      : quads{unpack_quad<BITS, 0>(p), unpack_quad<BITS, 1>(p), unpack_quad<BITS, 2>(p), unpack_quad<BITS, 3>(p),
              unpack_quad<BITS, 4>(p), unpack_quad<BITS, 5>(p), unpack_quad<BITS, 6>(p), unpack_quad<BITS, 7>(p)} {}

  template <int WHICH> Int input(int quad) const {
    if constexpr (BITS == 8) return _mm512_srai_epi32(int_left<24 - 8 * WHICH>(quads[quad]), 24);
    else return int_and(int_right<8 * WHICH>(quads[quad]), int_set(255));
  }
};

inline Int inputs_of(const int8_t *q) {  // a quad of inputs, for every output
  int32_t four;
  __builtin_memcpy(&four, q, 4);
  return int_set(four);
}

/// See scalar.h. Signed codes are multiplied as code + 128, less 128 times the sum of the inputs.
template <int BITS, int FROM = 0, int TO = 8>
inline void group_dot(const uint8_t *codes, int rows, const int8_t *q, const float *sums, Vec scale, Vec offset,
                      Vec *acc) {
  Codes<BITS> u(codes);
#pragma GCC unroll 8
  for (int j = 0; BITS == 8 && j < 8; j++) u.quads[j] = _mm512_xor_si512(u.quads[j], _mm512_set1_epi8(-128));
  for (int m = 0; m < rows; m++, q += 32) {
    Int even = int_set(BITS == 8 ? -128 * (int32_t)sums[m] : 0), odd = int_set(0);
#pragma GCC unroll 4
    for (int j = FROM; j < TO; j += 2) {
      even = _mm512_dpbusd_epi32(even, u.quads[j], inputs_of(q + j * 4));
      odd = _mm512_dpbusd_epi32(odd, u.quads[j + 1], inputs_of(q + j * 4 + 4));
    }
    const Vec sum = vec_fma(int_to_vec(int_add(even, odd)), scale, acc[m]);
    acc[m] = BITS == 8 ? sum : vec_fma(vec_set(sums[m]), offset, sum);
  }
}

}  // namespace
