// Rotary embedding of queries and keys, and the paged cache of keys and values: how a token is written to it.
//
// Keys [blocks][J][C][16], so that the scores of a block's 16 tokens are one vector; values [blocks][J][16][C]; for
// 8-bit integers the scales of both, [blocks][J][16]; for E4M3 those of a head, [J].
#include "../attention.h"

namespace {

using bd::KV_BLOCK;

/// Sixteen codes as the numbers that they stand for, but for the scale.
inline Vec widen(const float *p) { return vec_load(p); }
inline Vec widen(const uint16_t *p) { return bf16_load(p); }
inline Vec widen(const int8_t *p) { return int_to_vec(s8_load(p)); }
struct E4M3 {
  uint8_t bits;
};
inline Vec widen(const E4M3 *p) { return e4m3_load(&p->bits); }  // times 2^-8

inline void store_padded(float *p, Vec x, int64_t count) {
  if (count >= 16) return vec_store(p, x);
  float all[16];
  vec_store(all, x);
  for (int64_t i = 0; i < count; i++) p[i] = all[i];
}

/// Sixteen finite or infinite numbers to codes.
inline void narrow(float *p, Vec x, float) { vec_store(p, x); }
inline void narrow(uint16_t *p, Vec x, float) { int_store_u16(p, int_right<16>(vec_bits(vec_shorten<16>(x)))); }
inline void narrow(int8_t *p, Vec x, float scale) {
  const Vec quotient = vec_div(x, vec_set(scale));
  int_store_s8(p, vec_to_int(vec_min(vec_max(quotient, vec_set(-127.0f)), vec_set(127.0f))));
}

/// Saturates; what is not a number becomes -448.
inline void narrow(E4M3 *p, Vec x, float scale) {
  const Vec quotient = vec_div(x, vec_set(scale));
  const Vec v = round_float8<20>(vec_min(vec_max(quotient, vec_set(-448.0f)), vec_set(448.0f))), size = vec_abs(v);
  const Int normal = int_add(int_right<20>(vec_bits(size)), int_set(-(120 << 3)));  // the exponent's bias: 127 to 7
  const Int small = vec_to_int(vec_mul(size, vec_set(512.0f)));
  const Int code = vec_bits(vec_below(size, vec_set(0x1p-6f), int_as_vec(small), int_as_vec(normal)));
  const Int sign = int_and(int_right<24>(vec_bits(v)), int_set(128));
  int_store_s8((int8_t *)p, vec_to_int(vec_sub(int_to_vec(code), int_to_vec(sign))));
}

/// What the codes of a head's vector are to be multiplied by: the largest magnitude over 127, 1 for zeros. Not a number
/// where the vector holds something else than numbers: codes could not tell.
float code_scale(const float *x, int64_t C) {
  Vec largest = vec_zero(), nothing = vec_zero();
  for (int64_t c = 0; c < C; c += 16) {
    const Vec v = load_padded(x, c, C);
    largest = vec_max(largest, vec_abs(v));
    nothing = vec_fma(v, vec_zero(), nothing);
  }
  const float scale = vec_largest(largest) / 127.0f;
  return (scale > 0 ? scale : 1.0f) + vec_sum(nothing);
}

template <class Code> constexpr bool IS_INT8 = false;
template <> constexpr bool IS_INT8<int8_t> = true;
template <class Code> constexpr bool IS_E4M3 = false;
template <> constexpr bool IS_E4M3<E4M3> = true;

template <class Code>
void write_token(const bd_kv &kv, int64_t slot, int64_t head, int64_t J, int64_t C, const float *key,
                 const float *value) {
  const int64_t at = slot / KV_BLOCK * J + head, token = slot % KV_BLOCK;
  Code *keys = (Code *)kv.keys + at * C * KV_BLOCK + token;
  Code *values = (Code *)kv.values + (at * KV_BLOCK + token) * C;
  float key_scale = 1.0f, value_scale = 1.0f;
  if constexpr (IS_INT8<Code>) {
    kv.key_scales[at * KV_BLOCK + token] = key_scale = code_scale(key, C);
    kv.value_scales[at * KV_BLOCK + token] = value_scale = code_scale(value, C);
  } else if constexpr (IS_E4M3<Code>) {
    key_scale = kv.key_scales[head], value_scale = kv.value_scales[head];
  }
  for (int64_t c = 0; c < C; c += 16) {
    const int64_t count = C - c < 16 ? C - c : 16;
    Code codes[16];
    narrow(codes, load_padded(key, c, C), key_scale);
    for (int64_t i = 0; i < count; i++) keys[(c + i) * KV_BLOCK] = codes[i];
    narrow(codes, load_padded(value, c, C), value_scale);
    for (int64_t i = 0; i < count; i++) values[c + i] = codes[i];
  }
}

/// One head: RMSNorm unless norm is NULL, then channel c and channel c + rotated / 2 turn by the c-th angle. Channels from
/// `rotated` on stay.
void rotate_head(const float *x, int64_t C, int64_t rotated, const float *norm, float eps, const float *cosines,
                 const float *sines, float *out) {
  const int64_t half = rotated / 2;
  const Vec r = vec_set(norm ? inverse_rms(x, C, eps) : 1.0f);
  for (int64_t c = 0; c < half; c += 16) {
    Vec first = load_padded(x, c, half), second = load_padded(x + half, c, half);
    if (norm) {
      first = vec_mul(vec_mul(first, r), load_padded(norm, c, half));
      second = vec_mul(vec_mul(second, r), load_padded(norm + half, c, half));
    }
    const Vec turn = load_padded(cosines, c, half), lift = load_padded(sines, c, half);
    store_padded(out + c, vec_sub(vec_mul(first, turn), vec_mul(second, lift)), half - c);
    store_padded(out + half + c, vec_add(vec_mul(second, turn), vec_mul(first, lift)), half - c);
  }
  for (int64_t c = rotated; c < C; c += 16) {
    const Vec v = load_padded(x, c, C);
    store_padded(out + c, norm ? vec_mul(vec_mul(v, r), load_padded(norm, c, C)) : v, C - c);
  }
}

void rope_rows(const float *qkv, const bd_batch &batch, const bd_attention &shape, const bd_kv &kv, const float *q_norm,
               const float *k_norm, float *q_out, int64_t from, int64_t to) {
  const int64_t H = shape.heads, J = shape.kv_heads, C = shape.head_dim, rotated = shape.rotated ? shape.rotated : C;
  float key[bd::MAX_HEAD_DIM];
  for (int64_t row = from; row < to; row++) {
    const float *x = qkv + row * (H + 2 * J) * C;
    const int64_t angles = batch.positions[row] * (rotated / 2);
    int64_t slot = batch.slots[row];
    if (kv.coded) slot = kv.coded->copies[slot / KV_BLOCK] * KV_BLOCK + slot % KV_BLOCK;
    const float *cosines = shape.cos + angles, *sines = shape.sin + angles;
    for (int64_t h = 0; h < H; h++)
      rotate_head(x + h * C, C, rotated, q_norm, shape.eps, cosines, sines, q_out + (row * H + h) * C);
    for (int64_t j = 0; j < J; j++) {
      rotate_head(x + (H + j) * C, C, rotated, k_norm, shape.eps, cosines, sines, key);
      const float *value = x + (H + J + j) * C;
      if (kv.dtype == BD_KV_F32) write_token<float>(kv, slot, j, J, C, key, value);
      else if (kv.dtype == BD_KV_BF16) write_token<uint16_t>(kv, slot, j, J, C, key, value);
      else if (kv.dtype == BD_KV_INT8) write_token<int8_t>(kv, slot, j, J, C, key, value);
      else write_token<E4M3>(kv, slot, j, J, C, key, value);
    }
  }
}

}  // namespace
