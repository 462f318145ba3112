// Input rows: RMSNorm, and rounding to what a weight's format multiplies by.
namespace {

using bd::Rounded;

/// Sixteen inputs from x[k] on, zeros past K.
inline Vec load_padded(const float *x, int64_t k, int64_t K) {
  if (k + 16 <= K) return vec_load(x + k);
  float tail[16] = {};
  for (int64_t i = k; i < K; i++) tail[i - k] = x[i];
  return vec_load(tail);
}

inline float inverse_rms(const float *x, int64_t K, float eps) {
  Vec squares = vec_zero();
  for (int64_t k = 0; k < K; k += 16) {
    const Vec v = load_padded(x, k, K);
    squares = vec_fma(v, v, squares);
  }
  return 1.0f / sqrtf(vec_sum(squares) / (float)K + eps);
}

/// To the nearest E4M3 (3 bits of fraction, least normal 2^-6) or E5M2 (2 bits, 2^-14) value; |a| within its range.
template <int DROPPED> inline Vec round_float8(Vec a) {
  const float least = DROPPED == 20 ? 0x1p-6f : 0x1p-14f;
  const Vec big = vec_set(least * 0x1.8p23f / (1 << (23 - DROPPED)));  // adding it leaves multiples of the least step
  return vec_below(vec_abs(a), vec_set(least), vec_sub(vec_add(a, big), big), vec_shorten<DROPPED>(a));
}

/// What the largest of some magnitudes is divided by to be the largest code; 1 for zeros.
inline float step_of(Vec magnitudes, float limit) {
  const float step = vec_largest(magnitudes) / limit;
  return step > 0 ? step : 1.0f;
}

/// 8-bit codes of a row, by a step of its own for each 32 inputs or by one for all of them.
void store_codes(const Rounded &out, int64_t row, bool grouped, float scale) {
  const int64_t groups = out.inputs / bd::GROUP, block = row / bd::ROW_BLOCK, m = row % bd::ROW_BLOCK;
  const int64_t left = out.rows - block * bd::ROW_BLOCK, rows = left < bd::ROW_BLOCK ? left : bd::ROW_BLOCK;
  const float *x = out.values + row * out.inputs;
  const Vec limit = vec_set(127.0f), low = vec_set(-127.0f);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t at = block * bd::ROW_BLOCK * groups + g * rows + m;
    if (grouped) {
      scale = step_of(vec_max(vec_abs(vec_load(x + g * 32)), vec_abs(vec_load(x + g * 32 + 16))), 127.0f);
      out.steps[at] = scale;
    }
    const Vec by = vec_set(scale);
    float part[2];
    for (int half = 0; half < 2; half++) {
      const Vec quotient = vec_div(vec_load(x + g * 32 + half * 16), by);
      const Int code = vec_to_int(vec_min(vec_max(quotient, low), limit));
      int_store_s8(out.codes + at * 32 + half * 16, code);
      part[half] = (float)int_sum(code);
    }
    out.half_sums[at * 2] = part[0];
    out.half_sums[at * 2 + 1] = part[1];
    out.sums[at] = part[0] + part[1];
  }
}

/// Sums and differences of lanes DISTANCE apart: the lower lane of a pair gets the sum.
template <int DISTANCE> inline Vec butterfly(Vec a) {
  float sign[16];
  for (int i = 0; i < 16; i++) sign[i] = i & DISTANCE ? -1.0f : 1.0f;
  return vec_fma(vec_load(sign), a, vec_swap<DISTANCE>(a));
}

/// Multiply blocks of inputs by Sylvester's Hadamard matrix over its root, in the order that ops.encoding.rotate says.
void rotate_row(float *y, int64_t inputs, int block) {
  const Vec share = vec_set((float)(1.0 / sqrt((double)block)));
  for (float *at = y; at < y + inputs; at += block) {
    for (int i = 0; i < block; i += 16)
      vec_store(at + i, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(vec_load(at + i))))));
    for (int distance = 16; distance < block; distance *= 2)
      for (int i = 0; i < block; i += 2 * distance)
        for (int j = i; j < i + distance; j += 16) {
          const Vec a = vec_load(at + j), b = vec_load(at + j + distance);
          vec_store(at + j, vec_add(a, b));
          vec_store(at + j + distance, vec_sub(a, b));
        }
    for (int i = 0; i < block; i += 16) vec_store(at + i, vec_mul(vec_load(at + i), share));
  }
}

void normalise(const float *x, int64_t K, const float *norm, float eps, int64_t padded, float *y) {
  const Vec r = vec_set(norm ? inverse_rms(x, K, eps) : 1.0f);
  for (int64_t k = 0; k < padded; k += 16) {
    Vec v = k < K ? load_padded(x, k, K) : vec_zero();
    if (norm && k < K) v = vec_mul(vec_mul(v, r), load_padded(norm, k, K));
    vec_store(y + k, v);
  }
}

/// Moves the inputs that are kept apart out of a row: to bfloat16, and the row is rounded as if they were 0.
void take_outliers(const bd_weight &w, float *y, float *out, int64_t stride) {
  for (int64_t i = 0; i < stride; i++) out[i] = i < w.outliers ? y[w.columns[i]] : 0.0f;
  for (int64_t i = 0; i < w.outliers; i++) y[w.columns[i]] = 0.0f;
  for (int64_t i = 0; i < stride; i += 16) vec_store(out + i, vec_shorten<16>(vec_load(out + i)));
}

void round_row(const float *x, int64_t K, const float *norm, float eps, const bd_weight &w, const Rounded &out, int64_t row) {
  float *y = out.values + row * out.inputs;
  normalise(x, K, norm, eps, out.inputs, y);
  if (w.outliers) take_outliers(w, y, out.outliers + row * out.outlier_stride, out.outlier_stride);
  if (w.rotation) rotate_row(y, K, w.rotation);
  const int activation = w.activation;
  Vec largest = vec_zero();
  for (int64_t k = 0; k < out.inputs; k += 16) {
    Vec v = vec_load(y + k);
    if (activation == BD_ACT_BF16) vec_store(y + k, v = vec_shorten<16>(v));
    largest = vec_max(largest, vec_abs(v));
  }
  out.scale[row] = 1.0f;
  if (activation == BD_ACT_F32 || activation == BD_ACT_BF16) return;
  if (activation == BD_ACT_INT8_G32) return store_codes(out, row, true, 1.0f);
  const float limit = activation == BD_ACT_INT8 ? 127.0f : activation == BD_ACT_E4M3 ? 448.0f : 57344.0f;
  const float scale = step_of(largest, limit);
  out.scale[row] = scale;
  if (activation == BD_ACT_INT8) return store_codes(out, row, false, scale);
  for (int64_t k = 0; k < out.inputs; k += 16) {
    Vec v = vec_div(vec_load(y + k), vec_set(scale));
    v = vec_min(vec_max(v, vec_set(-limit)), vec_set(limit));
    vec_store(y + k, activation == BD_ACT_E4M3 ? round_float8<20>(v) : round_float8<21>(v));
  }
}

void round_rows(const float *x, int64_t K, const float *norm, float eps, const bd_weight &w, const Rounded &out, int64_t from,
                int64_t to) {
  for (int64_t row = from; row < to; row++) round_row(x + row * K, K, norm, eps, w, out, row);
}

}  // namespace
