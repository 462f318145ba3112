// Rotary embedding of queries and keys, and the paged cache of keys and values: how a token is written to it.
//
// Keys [blocks][J][C][16], so that the scores of a block's 16 tokens are one vector; values [blocks][J][16][C]; for
// 8-bit codes the scales of both, [blocks][J][16].
#include "../attention.h"

namespace {

using bd::KV_BLOCK;

/// Sixteen codes as the numbers that they stand for, but for the scale.
inline Vec widen(const float *p) { return vec_load(p); }
inline Vec widen(const uint16_t *p) { return bf16_load(p); }
inline Vec widen(const int8_t *p) { return int_to_vec(s8_load(p)); }

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

template <class Code> inline float scale_of(const Code *, const float *, int64_t) { return 1.0f; }
inline float scale_of(const int8_t *, const float *x, int64_t C) { return code_scale(x, C); }

template <class Code>
void write_token(const bd_kv &kv, int64_t slot, int64_t head, int64_t J, int64_t C, const float *key,
                 const float *value) {
  const int64_t at = slot / KV_BLOCK * J + head, token = slot % KV_BLOCK;
  Code *keys = (Code *)kv.keys + at * C * KV_BLOCK + token;
  Code *values = (Code *)kv.values + (at * KV_BLOCK + token) * C;
  const float key_scale = scale_of(keys, key, C), value_scale = scale_of(values, value, C);
  if (sizeof(Code) == 1) {
    kv.key_scales[at * KV_BLOCK + token] = key_scale;
    kv.value_scales[at * KV_BLOCK + token] = value_scale;
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
    const int64_t angles = batch.positions[row] * (rotated / 2), slot = batch.slots[row];
    const float *cosines = shape.cos + angles, *sines = shape.sin + angles;
    for (int64_t h = 0; h < H; h++)
      rotate_head(x + h * C, C, rotated, q_norm, shape.eps, cosines, sines, q_out + (row * H + h) * C);
    for (int64_t j = 0; j < J; j++) {
      rotate_head(x + (H + j) * C, C, rotated, k_norm, shape.eps, cosines, sines, key);
      const float *value = x + (H + J + j) * C;
      if (kv.dtype == BD_KV_F32) write_token<float>(kv, slot, j, J, C, key, value);
      else if (kv.dtype == BD_KV_BF16) write_token<uint16_t>(kv, slot, j, J, C, key, value);
      else write_token<int8_t>(kv, slot, j, J, C, key, value);
    }
  }
}

}  // namespace
