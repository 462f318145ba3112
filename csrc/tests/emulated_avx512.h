// The AVX-512 instructions of simd/avx512.h on a machine with AVX2: those of SIMDe, and here those that it has not
// (0.7.4).
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <immintrin.h>

namespace {

struct Halves {  // what AVX2 does to one half, it does to the other
  __m256i lo, hi;
};
inline Halves halves(__m512i a) {
  Halves h;
  __builtin_memcpy(&h, &a, 64);
  return h;
}
inline __m512i whole(__m256i lo, __m256i hi) {
  const Halves h = {lo, hi};
  __m512i a;
  __builtin_memcpy(&a, &h, 64);
  return a;
}
inline __m512 whole(__m256 lo, __m256 hi) {
  return simde_mm512_castsi512_ps(whole(_mm256_castps_si256(lo), _mm256_castps_si256(hi)));
}

inline __m512 emulated_cvtepi32_ps(__m512i a) {
  const Halves h = halves(a);
  return whole(_mm256_cvtepi32_ps(h.lo), _mm256_cvtepi32_ps(h.hi));
}
inline __m512i emulated_cvtps_epi32(__m512 a) {
  const Halves h = halves(simde_mm512_castps_si512(a));
  return whole(_mm256_cvtps_epi32(_mm256_castsi256_ps(h.lo)), _mm256_cvtps_epi32(_mm256_castsi256_ps(h.hi)));
}
inline __m512 emulated_cvtph_ps(__m256i a) {
  return whole(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
inline __m512i emulated_cvtepu8_epi32(__m128i a) {
  return whole(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
inline __m512i emulated_cvtepi8_epi32(__m128i a) {
  return whole(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
inline __m512i emulated_cvtepu16_epi32(__m256i a) {
  return whole(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
inline __m128i emulated_cvtepi32_epi8(__m512i a) {
  int32_t lanes[16];
  int8_t bytes[16];
  __builtin_memcpy(lanes, &a, 64);
  for (int i = 0; i < 16; i++) bytes[i] = (int8_t)lanes[i];
  return _mm_loadu_si128((const __m128i *)bytes);
}
inline __m256i emulated_cvtepi32_epi16(__m512i a) {
  int32_t lanes[16];
  int16_t words[16];
  __builtin_memcpy(lanes, &a, 64);
  for (int i = 0; i < 16; i++) words[i] = (int16_t)lanes[i];
  return _mm256_loadu_si256((const __m256i *)words);
}
inline __m512i emulated_srai_epi32(__m512i a, unsigned count) {
  const Halves h = halves(a);
  return whole(_mm256_srai_epi32(h.lo, (int)count), _mm256_srai_epi32(h.hi, (int)count));
}
inline __m256 emulated_extractf32x8_ps(__m512 a, int half) {
  const Halves h = halves(simde_mm512_castps_si512(a));
  return _mm256_castsi256_ps(half ? h.hi : h.lo);
}
inline __m512 emulated_permute_ps(__m512 a, int order) {  // of each four lanes
  float from[16], to[16];
  __builtin_memcpy(from, &a, 64);
  for (int i = 0; i < 16; i++) to[i] = from[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
  __builtin_memcpy(&a, to, 64);
  return a;
}
inline __m512 emulated_shuffle_f32x4(__m512 a, __m512 b, int order) {  // fours: two of a, then two of b
  float from[2][16], to[16];
  __builtin_memcpy(from[0], &a, 64);
  __builtin_memcpy(from[1], &b, 64);
  for (int i = 0; i < 16; i++) to[i] = from[i / 8][(order >> i / 4 * 2 & 3) * 4 + i % 4];
  __builtin_memcpy(&a, to, 64);
  return a;
}
inline float emulated_reduce_max_ps(__m512 a) {
  float lanes[16];
  __builtin_memcpy(lanes, &a, 64);
  for (int i = 1; i < 16; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}
inline int emulated_reduce_add_epi32(__m512i a) {
  int32_t lanes[16];
  __builtin_memcpy(lanes, &a, 64);
  for (int i = 1; i < 16; i++) lanes[0] += lanes[i];
  return lanes[0];
}

}  // namespace

#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 emulated_srai_epi32
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps emulated_extractf32x8_ps
#undef _mm512_permute_ps
#define _mm512_permute_ps emulated_permute_ps
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 emulated_shuffle_f32x4
#define _mm512_reduce_max_ps emulated_reduce_max_ps
#define _mm512_reduce_add_epi32 emulated_reduce_add_epi32
