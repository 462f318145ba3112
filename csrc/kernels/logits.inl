// Whole rows of logits: the largest, its place, and the softmax.
namespace {

/// Whether any lane ever given to `add` was no number: the bits of its magnitude are above those of infinity.
class NoNumbers {
 public:
  inline void add(Vec v) {
    const Int magnitude = int_and(vec_bits(v), int_set(0x7fffffff));
    seen_ = int_or(seen_, int_add(magnitude, int_set(0x7fffffff - 0x7f800000)));  // sets the sign bit
  }
  bool any() const { return int_sum(int_right<31>(seen_)) != 0; }

 private:
  Int seen_ = int_set(0);
};

/// Sixteen logits from logits[i] on, -infinity past the row's end.
inline Vec load_logits(const float *logits, int64_t i, int64_t width) {
  if (i + 16 <= width) return vec_load(logits + i);
  float tail[16];
  for (int j = 0; j < 16; j++) tail[j] = i + j < width ? logits[i + j] : -INFINITY;
  return vec_load(tail);
}

void top(const float *logits, int64_t width, int64_t *place, float *largest) {
  constexpr int64_t STRETCH = 1024;  // remembered as a whole, and searched only if the largest is in it
  NoNumbers wrong;
  float best = -INFINITY;
  int64_t at = 0;
  for (int64_t from = 0; from < width; from += STRETCH) {
    const int64_t to = from + STRETCH < width ? from + STRETCH : width;
    Vec most = vec_set(-INFINITY);
    for (int64_t i = from; i < to; i += 16) {
      const Vec v = load_logits(logits, i, width);
      wrong.add(v);
      most = vec_max(most, v);
    }
    if (vec_largest(most) > best) best = vec_largest(most), at = from;
  }
  *largest = wrong.any() ? NAN : best;
  while (at < width && !(logits[at] == best)) at++;
  *place = at < width ? at : 0;
}

void softmax(const float *logits, int64_t width, float scale, float *out) {
  Vec most = vec_set(-INFINITY);
  for (int64_t i = 0; i < width; i += 16) most = vec_max(most, load_logits(logits, i, width));
  const Vec by = vec_set(scale), minus = vec_set(-vec_largest(most) * scale);
  Vec sum = vec_zero();
  for (int64_t i = 0; i < width; i += 16) sum = vec_add(sum, vec_exp(vec_fma(load_logits(logits, i, width), by, minus)));
  const Vec share = vec_set(1.0f / vec_sum(sum));
  for (int64_t i = 0; i < width; i += 16) {
    const Vec v = vec_mul(vec_exp(vec_fma(load_logits(logits, i, width), by, minus)), share);
    if (i + 16 <= width) {
      vec_store(out + i, v);
      continue;
    }
    float tail[16];
    vec_store(tail, v);
    for (int j = 0; i + j < width; j++) out[i + j] = tail[j];
  }
}

/// cap tanh(logit / cap), in place: tanh z = sign(z) (1 - e) / (1 + e) with e = e^(-2 |z|). What is no finite number stays
/// as it is, for whoever looks for such.
void softcap(float *logits, int64_t width, float cap) {
  const Vec by = vec_set(2.0f / cap), one = vec_set(1.0f), up = vec_set(cap), down = vec_set(-cap);
  for (int64_t i = 0; i < width; i += 16) {
    const Vec x = load_padded(logits, i, width);
    const Vec e = vec_exp(vec_sub(vec_zero(), vec_mul(vec_abs(x), by)));
    const Vec share = vec_div(vec_sub(one, e), vec_add(one, e));
    const Vec y = vec_mul(share, vec_below(x, vec_zero(), down, up));
    store_some(logits + i, vec_below(vec_abs(x), vec_set(INFINITY), y, x), width - i);
  }
}

}  // namespace
