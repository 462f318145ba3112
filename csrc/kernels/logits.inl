// Whole rows of logits: the largest, its place, and the softmax.
namespace {

/// argmax (the first of equals), the largest of scale * logits, and ln sum e^(scale * logit - largest).
void row_stats(const float *logits, int64_t width, float scale, int64_t *argmax, float *largest, float *log_sum) {
  Vec top = vec_set(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) top = vec_max(top, vec_load(logits + i));
  float best = vec_largest(top);
  for (; i < width; i++) best = logits[i] > best ? logits[i] : best;
  int64_t at = 0;
  while (at < width && logits[at] != best) at++;
  *argmax = at < width ? at : 0;
  *largest = best * scale;
  const Vec by = vec_set(scale), minus = vec_set(-best * scale);
  Vec sum = vec_zero();
  for (i = 0; i + 16 <= width; i += 16) sum = vec_add(sum, vec_exp(vec_fma(vec_load(logits + i), by, minus)));
  float tail[16];
  for (int j = 0; j < 16; j++) tail[j] = i + j < width ? logits[i + j] : -INFINITY;
  if (i < width) sum = vec_add(sum, vec_exp(vec_fma(vec_load(tail), by, minus)));
  *log_sum = logf(vec_sum(sum));
}

void softmax(const float *logits, int64_t width, float scale, float *out) {
  int64_t argmax;
  float largest, log_sum;
  row_stats(logits, width, scale, &argmax, &largest, &log_sum);
  const Vec by = vec_set(scale), minus = vec_set(-largest), share = vec_set(expf(-log_sum));
  int64_t i = 0;
  for (; i + 16 <= width; i += 16)
    vec_store(out + i, vec_mul(vec_exp(vec_fma(vec_load(logits + i), by, minus)), share));
  float tail[16];
  for (int j = 0; j < 16; j++) tail[j] = i + j < width ? logits[i + j] : -INFINITY;
  if (i < width) {
    vec_store(tail, vec_mul(vec_exp(vec_fma(vec_load(tail), by, minus)), share));
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
