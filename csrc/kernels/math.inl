// Arithmetic on vectors of sixteen that every kernel needs, over the operations of simd/*.h.
namespace {

/// e^x to 2 units in the last place; 0 below -87, where float32 ends.
inline Vec vec_exp(Vec x) {
  const Vec low = vec_set(-87.0f);
  const Vec inside = vec_min(vec_max(x, low), vec_set(88.0f));
  const Vec n = vec_round(vec_mul(inside, vec_set(1.44269504f)));
  Vec r = vec_fma(n, vec_set(-0.693359375f), inside);  // ln 2 in two parts, the first exact in few bits
  r = vec_fma(n, vec_set(2.12194440e-4f), r);
  // Taylor's series, its terms moved a little so that six of them do within ln 2 / 2 of 0.
  Vec p = vec_fma(vec_set(1.38145406e-3f), r, vec_set(8.36874545e-3f));
  p = vec_fma(p, r, vec_set(4.16683890e-2f));
  p = vec_fma(p, r, vec_set(1.66665211e-1f));
  p = vec_fma(p, r, vec_set(4.99999940e-1f));
  p = vec_fma(p, r, vec_set(1.0f));
  p = vec_fma(p, r, vec_set(1.0f));
  const Vec e = int_as_vec(int_add(vec_bits(p), int_left<23>(vec_to_int(n))));
  return vec_below(x, low, vec_zero(), e);
}

/// To the nearest of the floats that have 23 - DROPPED bits of fraction, ties to even; finite values only.
template <int DROPPED> inline Vec vec_shorten(Vec a) {
  const Int bits = vec_bits(a);
  const Int odd = int_and(int_right<DROPPED>(bits), int_set(1));
  const Int rounded = int_add(bits, int_add(odd, int_set((1 << (DROPPED - 1)) - 1)));
  return int_as_vec(int_and(rounded, int_set(-(1 << DROPPED))));
}

/// Two inputs of bfloat16 from lanes that hold both.
inline Vec bf16_low(Int pair) { return int_as_vec(int_left<16>(pair)); }
inline Vec bf16_high(Int pair) { return int_as_vec(int_and(pair, int_set((int32_t)0xffff0000))); }
/// Sixteen bfloat16 values one after the other.
inline Vec bf16_load(const uint16_t *p) { return int_as_vec(int_left<16>(u16_load(p))); }

}  // namespace
