// Attention to blocks in codes: against a plain bfloat16 or float cache that holds what a row is to read, and to the bit
// against itself, a row alone and among others.
//
// Tolerance: sums of at most some hundred float products of numbers around one, as in attention_test.cpp.
#include <string>
#include <vector>

#include "../ops.h"
#include "check.h"

namespace {

using test::check;

constexpr int64_t J = 2, G = 3, H = J * G, TOKENS = 300, BLOCKS = (TOKENS + 15) / 16, WINDOW = 48;

uint16_t bf16(float x) { return (uint16_t)(test::bits_of_float(x) >> 16); }
float value_of(uint16_t bits) { return test::float_of_bits((uint32_t)bits << 16); }

struct Cache {
  int64_t C;
  int bits, outliers;
  std::vector<int64_t> table, copies;
  std::vector<uint8_t> keys, values;
  std::vector<uint16_t> key_grid, value_grid, key_outliers, value_outliers, full_keys, full_values;
  std::vector<float> q;
  bd_coded coded;
  bd_kv kv;

  Cache(int64_t c, int b, int o, test::Random &random) : C(c), bits(b), outliers(o) {
    const int64_t heads = BLOCKS * J, bytes = heads * C * 16 * bits / 8;
    for (int64_t i = 0; i < BLOCKS; i++) table.push_back((i * 7 + 3) % BLOCKS), copies.push_back(BLOCKS - 1 - i);
    auto codes = [&] {
      std::vector<uint8_t> x(bytes);
      for (uint8_t &code : x) code = (uint8_t)random.below(256);
      return x;
    };
    auto numbers = [&](int64_t count, float size) {
      std::vector<uint16_t> x(count);
      for (uint16_t &v : x) v = bf16((float)(random.uniform() - 0.5) * size);
      return x;
    };
    auto apart = [&] {
      std::vector<uint16_t> x(heads * outliers * 2);
      for (size_t i = 0; i < x.size(); i++) x[i] = i % 2 ? bf16((float)random.uniform() * 3) : (uint16_t)random.below(C * 16);
      for (size_t i = 2; i < x.size(); i += 2)  // every place of a block once
        if (i / 2 % outliers) x[i] = (uint16_t)((x[i - 2] + 5) % (C * 16));
      return x;
    };
    keys = codes(), values = codes();
    const float step = 2.0f / (float)(1 << bits);
    key_grid = numbers(heads * 2 * C, step), value_grid = numbers(heads * 32, step);
    key_outliers = apart(), value_outliers = apart();
    full_keys = numbers(heads * C * 16, 2), full_values = numbers(heads * C * 16, 2);
    for (int64_t i = 0; i < TOKENS * H * C; i++) q.push_back((float)(random.uniform() - 0.5) * 2);
    coded = {bits, outliers, WINDOW, BLOCKS, copies.data(), keys.data(), values.data(), key_grid.data(), value_grid.data(),
             key_outliers.data(), value_outliers.data()};
    kv = {BD_KV_BF16, BLOCKS, full_keys.data(), full_values.data(), nullptr, nullptr, &coded};
  }

  double number(const std::vector<uint8_t> &codes, const std::vector<uint16_t> &apart, int64_t at, int64_t place,
                int64_t row, int shift, float step, float least) const {
    for (int64_t i = 0; i < outliers; i++)
      if (apart[(at * outliers + i) * 2] == place) return value_of(apart[(at * outliers + i) * 2 + 1]);
    return least + (double)step * (codes[row] >> shift & ((1 << bits) - 1));
  }

  // The key or value that a row at `position` reads, by the definition: block b in codes if position >= 16 (b + 1) + WINDOW.
  double read(bool key, int64_t position, int64_t token, int64_t j, int64_t c) const {
    const int64_t b = token / 16, t = token % 16, block = table[b], at = block * J + j, rows = C * bits / 8;
    const int64_t place = key ? c * 16 + t : t * C + c;
    if (position < 16 * (b + 1) + WINDOW) {
      const int64_t copy = (copies[block] * J + j) * C * 16 + place;
      return value_of(key ? full_keys[copy] : full_values[copy]);
    }
    const int64_t row = c % rows;
    const int shift = c >= rows ? 4 : 0;
    if (key)
      return number(keys, key_outliers, at, place, (at * rows + row) * 16 + t, shift, value_of(key_grid[at * 2 * C + c]),
                    value_of(key_grid[(at * 2 + 1) * C + c]));
    return number(values, value_outliers, at, place, (at * 16 + t) * rows + row, shift, value_of(value_grid[at * 32 + t]),
                  value_of(value_grid[at * 32 + 16 + t]));
  }

  std::vector<float> attend(const bd::Kernels &kernels, int64_t window, int64_t first, int64_t rows, int threads) const {
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < rows; i++) positions.push_back(first + i);
    const int64_t starts[] = {0, rows}, tables[] = {0, BLOCKS}, lengths[] = {first + rows};
    const bd_batch batch = {rows, 1, positions.data(), positions.data(), starts, table.data(), tables, lengths};
    const bd_attention shape = {H, J, C, window, 0, nullptr, nullptr, 0, 0, 0};
    const bd::AttentionPlan plan(batch, shape, threads);
    std::vector<float> partial(plan.partial), out(rows * H * C);
    const float *queries = q.data() + first * H * C;
    kernels.attend(queries, batch, shape, kv, plan.items.data(), partial.data(), out.data(), 0, (int64_t)plan.items.size());
    kernels.merge(shape, plan.splits.data(), partial.data(), out.data(), 0, (int64_t)plan.splits.size() * H);
    return out;
  }
};

void test_kernels(const bd::Kernels &kernels, int64_t C, int bits, int outliers, int64_t window) {
  test::Random random(3);
  const Cache cache(C, bits, outliers, random);
  const std::string name = std::string(kernels.name) + ", C " + std::to_string(C) + ", bits " + std::to_string(bits) +
                           ", window " + std::to_string(window);
  const auto all = cache.attend(kernels, window, 0, TOKENS, 1);
  for (const int64_t p : {0, 15, 16, 63, 64, 65, 79, 80, 255, 256, 299}) {
    const auto one = cache.attend(kernels, window, p, 1, 2);
    for (int64_t i = 0; i < H * C; i++) check(test::same(one[i], all[p * H * C + i]), "%s: a row is alone", name.c_str());
    const int64_t from = window && p + 1 > window ? p + 1 - window : 0;
    for (int64_t h = 0; h < H; h++) {
      std::vector<double> mixed(C);
      double sum = 0;
      for (int64_t t = from; t <= p; t++) {
        double dot = 0;
        for (int64_t c = 0; c < C; c++) dot += cache.q[(p * H + h) * C + c] * cache.read(true, p, t, h / G, c);
        const double weight = std::exp(dot / std::sqrt((double)C));
        sum += weight;
        for (int64_t c = 0; c < C; c++) mixed[c] += weight * cache.read(false, p, t, h / G, c);
      }
      for (int64_t c = 0; c < C; c++)
        check(std::fabs(one[h * C + c] - mixed[c] / sum) < 2e-5, "%s: what a row reads", name.c_str());
    }
  }
}

}  // namespace

int main() {
  for (const char *isa : {"scalar", "avx2", "avx512"}) {
    const bd::Kernels *kernels = bd::find_kernels(isa);
    if (!kernels) continue;
    for (const int64_t C : {4, 20, 64, 80})
      for (const int64_t window : {0, 100})
        for (const int bits : {4, 8}) test_kernels(*kernels, C, bits, bits == 4 ? 5 : 0, window);
  }
  return test::result("coded");
}
