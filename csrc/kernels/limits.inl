// What the machine can do at most: reading memory, and multiply-adds that never leave the registers.
namespace {

float read(const uint8_t *buffer, int64_t bytes) {
  Vec sum[4] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
  for (int64_t i = 0; i + 256 <= bytes; i += 256)
    for (int j = 0; j < 4; j++) {
      prefetch(buffer + i + j * 64 + 4096);
      sum[j] = int_as_vec(int_or(vec_bits(sum[j]), int_load(buffer + i + j * 64)));
    }
  return vec_sum(vec_add(vec_add(sum[0], sum[1]), vec_add(sum[2], sum[3])));
}

float busy_float(int64_t rounds) {
  Vec a[6];
  for (int j = 0; j < 6; j++) a[j] = vec_set(0.5f);
  const Vec x = vec_set(1e-9f), y = vec_set(0.999f);
  for (int64_t i = 0; i < rounds; i++)
    for (int j = 0; j < 6; j++) a[j] = vec_fma(x, y, a[j]);
  for (int j = 1; j < 6; j++) a[0] = vec_add(a[0], a[j]);
  return vec_sum(a[0]);
}

}  // namespace
