// Rotary embedding, the paged cache and attention against plain loops in double precision, and to the bit against
// themselves: a row alone, among others, and with its work cut in other ways.
//
// Tolerances: sums of at most some hundred float products of numbers around one, and an exponential that is right to
// two units in the last place: 2e-5 leaves a factor of ten. A cached number differs from the exact one by half a step
// of its kind: 2^-9 of itself in bfloat16, half a scale in 8-bit integers, 2^-4 of itself in E4M3.
#include <algorithm>
#include <string>
#include <vector>

#include "../ops.h"
#include "check.h"

namespace {

constexpr double TOLERANCE = 2e-5;

void check(bool ok, const char *what, const std::string &where) { test::check(ok, "%s: %s", where.c_str(), what); }

struct Shape {
  int64_t H, J, C, window;
  int dtype;
  int64_t turned = 0;  // channels that rotary positions turn; 0 for all
  std::string name() const {
    const char *kinds[] = {"f32", "bf16", "int8", "e4m3"};
    return "H " + std::to_string(H) + ", J " + std::to_string(J) + ", C " + std::to_string(C) + ", window " +
           std::to_string(window) + ", " + kinds[dtype];
  }
};

struct Feed {  // the last `rows` of `length` tokens of a sequence
  int64_t sequence, length, rows;
};

float bf16_value(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Several sequences of `tokens` tokens each, with their blocks all over a pool whose unused places are not numbers.
class World {
 public:
  World(const bd::Kernels &k, Shape s, int64_t sequences, int64_t tokens, bool norms = false)
      : kernels(k), shape(s), tokens_(tokens), table_((tokens + 15) / 16) {
    const int64_t blocks = sequences * table_ + 3, size = blocks * s.J * 16;
    std::vector<int64_t> order(blocks);
    for (int64_t i = 0; i < blocks; i++) order[i] = i;
    shuffle(order, random_);
    tables_.assign(order.begin(), order.begin() + sequences * table_);
    const int64_t width = s.dtype == BD_KV_F32 ? 4 : s.dtype == BD_KV_BF16 ? 2 : 1;
    keys_.assign(size * s.C * width, 0xff);  // not a number in float and bfloat16
    values_.assign(size * s.C * width, 0xff);
    key_scales_.assign(size, s.dtype == BD_KV_E4M3 ? 0.03f : NAN);  // 448 of them are more than any number here
    value_scales_.assign(size, s.dtype == BD_KV_E4M3 ? 0.03f : NAN);
    kv = {s.dtype, blocks, keys_.data(), values_.data(), key_scales_.data(), value_scales_.data(), nullptr};
    for (int64_t p = 0; p < tokens; p++)
      for (int64_t c = 0, turned = s.turned ? s.turned : s.C; c < turned / 2; c++) {
        const double angle = (double)p * std::pow(10000.0, -2.0 * (double)c / (double)turned);
        cos_.push_back((float)std::cos(angle));
        sin_.push_back((float)std::sin(angle));
      }
    attention = {s.H, s.J, s.C, s.window, tokens, cos_.data(), sin_.data(), 1e-6f, 0, s.turned};
    if (norms) q_norm = random(s.C), k_norm = random(s.C);
    qkv = random(sequences * tokens * (s.H + 2 * s.J) * s.C);
    q.resize(sequences * tokens * s.H * s.C);
    std::vector<Feed> all;
    for (int64_t i = 0; i < sequences; i++) all.push_back({i, tokens, tokens});
    const Batch batch = make_batch(all);
    const int64_t rows = sequences * tokens, half = rows / 2;
    for (const auto &[from, to] : {std::pair(half, rows), std::pair((int64_t)0, half)})
      kernels.rope_rows(qkv.data(), batch.view, attention, kv, norms ? q_norm.data() : nullptr,
                        norms ? k_norm.data() : nullptr, q.data(), from, to);
  }

  // Numbers with a variance of one; not normal ones, which take longer than all the rest.
  std::vector<float> random(int64_t count) {
    std::vector<float> x(count);
    for (float &v : x) v = (float)(random_.uniform() + random_.uniform() + random_.uniform() - 1.5) * 2;
    return x;
  }

  static void shuffle(std::vector<int64_t> &order, test::Random &random) {
    for (int64_t i = (int64_t)order.size(); i > 1; i--) std::swap(order[i - 1], order[random.below(i)]);
  }

  struct Batch {
    std::vector<int64_t> positions, slots, row_starts, blocks, table_starts, lengths;
    bd_batch view;
  };

  Batch make_batch(const std::vector<Feed> &feeds) const {
    Batch b;
    b.row_starts = {0};
    b.table_starts = {0};
    for (const Feed &f : feeds) {
      const int64_t *table = tables_.data() + f.sequence * table_, used = (f.length + 15) / 16;
      b.blocks.insert(b.blocks.end(), table, table + used);
      for (int64_t p = f.length - f.rows; p < f.length; p++) {
        b.positions.push_back(p);
        b.slots.push_back(table[p / 16] * 16 + p % 16);
      }
      b.row_starts.push_back((int64_t)b.positions.size());
      b.table_starts.push_back((int64_t)b.blocks.size());
      b.lengths.push_back(f.length);
    }
    b.view = {(int64_t)b.positions.size(), (int64_t)feeds.size(), b.positions.data(), b.slots.data(),
              b.row_starts.data(), b.blocks.data(), b.table_starts.data(), b.lengths.data()};
    return b;
  }

  // Attention of the last rows of sequences, the work as for `threads` threads and taken in an order of `seed`.
  std::vector<float> attend(const std::vector<Feed> &feeds, int threads, unsigned seed = 0) const {
    const Batch batch = make_batch(feeds);
    std::vector<float> queries;
    for (const Feed &f : feeds) {
      const float *first = q.data() + (f.sequence * tokens_ + f.length - f.rows) * shape.H * shape.C;
      queries.insert(queries.end(), first, first + f.rows * shape.H * shape.C);
    }
    const bd::AttentionPlan plan(batch.view, attention, threads);
    std::vector<float> partial(plan.partial, NAN), out(queries.size(), NAN);
    std::vector<int64_t> order(plan.items.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = (int64_t)i;
    test::Random random(seed);
    if (seed) shuffle(order, random);
    const bd::AttentionItem *items = plan.items.data();
    for (const int64_t i : order)
      kernels.attend(queries.data(), batch.view, attention, kv, items, partial.data(), out.data(), i, i + 1);
    const int64_t merges = (int64_t)plan.splits.size() * shape.H, part = merges / 3;
    kernels.merge(attention, plan.splits.data(), partial.data(), out.data(), part, merges);
    kernels.merge(attention, plan.splits.data(), partial.data(), out.data(), 0, part);
    return out;
  }

  int64_t place(int64_t sequence, int64_t position, int64_t j) const {  // of the token's scale
    return (tables_[sequence * table_ + position / 16] * shape.J + j) * 16 + position % 16;
  }
  double cached_key(int64_t sequence, int64_t position, int64_t j, int64_t c) const {
    const int64_t at = place(sequence, position, j);
    return number(keys_.data(), (at / 16 * shape.C + c) * 16 + at % 16, key_scales_[at]);
  }
  double cached_value(int64_t sequence, int64_t position, int64_t j, int64_t c) const {
    const int64_t at = place(sequence, position, j);
    return number(values_.data(), at * shape.C + c, value_scales_[at]);
  }

  // What a row of a sequence is, from the numbers that are in the cache.
  std::vector<double> expected(int64_t sequence, int64_t position) const {
    const int64_t C = shape.C, first = shape.window ? std::max<int64_t>(0, position + 1 - shape.window) : 0;
    std::vector<double> out;
    for (int64_t h = 0; h < shape.H; h++) {
      const float *x = q.data() + ((sequence * tokens_ + position) * shape.H + h) * C;
      const int64_t j = h / (shape.H / shape.J);
      std::vector<double> score, mixed(C);
      for (int64_t t = first; t <= position; t++) {
        double dot = 0;
        for (int64_t c = 0; c < C; c++) dot += x[c] * cached_key(sequence, t, j, c);
        score.push_back(dot / std::sqrt((double)C));
      }
      const double top = *std::max_element(score.begin(), score.end());
      double sum = 0;
      for (int64_t t = first; t <= position; t++) {
        const double weight = std::exp(score[t - first] - top);
        sum += weight;
        for (int64_t c = 0; c < C; c++) mixed[c] += weight * cached_value(sequence, t, j, c);
      }
      for (const double v : mixed) out.push_back(v / sum);
    }
    return out;
  }

  const bd::Kernels &kernels;
  const Shape shape;
  bd_kv kv;
  bd_attention attention;
  std::vector<float> qkv, q, q_norm, k_norm;

 private:
  double number(const uint8_t *codes, int64_t i, float scale) const {
    if (shape.dtype == BD_KV_F32) return ((const float *)codes)[i];
    if (shape.dtype == BD_KV_BF16) return bf16_value(((const uint16_t *)codes)[i]);
    if (shape.dtype == BD_KV_INT8) return (double)scale * ((const int8_t *)codes)[i];
    return test::small_float(codes[i], 4, 3, false) * scale;
  }

  test::Random random_{7};
  int64_t tokens_, table_;
  std::vector<int64_t> tables_;
  std::vector<uint8_t> keys_, values_;
  std::vector<float> key_scales_, value_scales_, cos_, sin_;
};

std::vector<double> rotated(const float *x, int64_t C, int64_t turned, int64_t position, const std::vector<float> &norm) {
  double squares = 0;
  for (int64_t c = 0; c < C; c++) squares += (double)x[c] * x[c];
  const double by = norm.empty() ? 1 : 1 / std::sqrt(squares / (double)C + 1e-6);
  auto at = [&](int64_t c) { return x[c] * by * (norm.empty() ? 1 : norm[c]); };
  std::vector<double> out(C);
  for (int64_t c = 0; c < C; c++) out[c] = at(c);
  for (int64_t c = 0, half = turned / 2; c < half; c++) {
    const double angle = (double)position * std::pow(10000.0, -2.0 * (double)c / (double)turned);
    out[c] = at(c) * std::cos(angle) - at(c + half) * std::sin(angle);
    out[c + half] = at(c + half) * std::cos(angle) + at(c) * std::sin(angle);
  }
  return out;
}

void test_rope(const bd::Kernels &kernels, Shape shape, bool norms) {
  const int64_t tokens = 37, H = shape.H, J = shape.J, C = shape.C, turned = shape.turned ? shape.turned : C;
  const World world(kernels, shape, 2, tokens, norms);
  const std::string name = std::string(kernels.name) + " rope, " + shape.name() + (norms ? ", norms" : "");
  for (int64_t s = 0; s < 2; s++)
    for (int64_t p = 0; p < tokens; p++) {
      const int64_t row = s * tokens + p;
      const float *x = world.qkv.data() + row * (H + 2 * J) * C;
      for (int64_t h = 0; h < H; h++) {
        const auto want = rotated(x + h * C, C, turned, p, world.q_norm);
        for (int64_t c = 0; c < C; c++)
          check(std::fabs(world.q[(row * H + h) * C + c] - want[c]) < TOLERANCE, "a query", name);
      }
      for (int64_t j = 0; j < J; j++) {
        const auto key = rotated(x + (H + j) * C, C, turned, p, world.k_norm);
        const float *value = x + (H + J + j) * C;
        double largest_key = 0, largest_value = 0;
        for (int64_t c = 0; c < C; c++) {
          largest_key = std::max(largest_key, std::fabs(key[c]));
          largest_value = std::max(largest_value, (double)std::fabs(value[c]));
        }
        auto step = [&](double v, double largest) {
          if (shape.dtype == BD_KV_E4M3) return std::max(std::fabs(v) / 16, std::ldexp(0.03, -10));
          return shape.dtype == BD_KV_F32 ? 0 : shape.dtype == BD_KV_BF16 ? std::fabs(v) / 256 : 0.5 * largest / 127;
        };
        for (int64_t c = 0; c < C; c++) {
          const double turned = world.cached_key(s, p, j, c), stored = world.cached_value(s, p, j, c);
          check(std::fabs(turned - key[c]) <= TOLERANCE + step(key[c], largest_key), "a key", name);
          check(std::fabs(stored - value[c]) <= step(value[c], largest_value) * (1 + 1e-6), "a value", name);
        }
      }
    }
}

// What a code has to be, bit by bit.
void test_codes(const bd::Kernels &kernels) {
  const auto one_token = [&](int dtype, std::vector<float> value) {
    const int64_t C = (int64_t)value.size();
    World world(kernels, {1, 1, C, 0, dtype}, 1, 1);
    std::copy(value.begin(), value.end(), world.qkv.begin() + 2 * C);
    const auto batch = world.make_batch({{0, 1, 1}});
    kernels.rope_rows(world.qkv.data(), batch.view, world.attention, world.kv, nullptr, nullptr, world.q.data(), 0, 1);
    std::vector<double> stored;
    for (int64_t c = 0; c < C; c++) stored.push_back(world.cached_value(0, 0, 0, c));
    return stored;
  };
  const std::string name = kernels.name;
  check(one_token(BD_KV_INT8, {127, 0.5f, 1.5f, -2.5f}) == std::vector<double>({127, 0, 2, -2}), "ties to even", name);
  check(one_token(BD_KV_INT8, {0, 0, 0, 0}) == std::vector<double>({0, 0, 0, 0}), "zeros have codes", name);
  check(one_token(BD_KV_BF16, {1.00390625f, 1.01171875f, INFINITY, -3}) ==
            std::vector<double>({1, 1.015625, INFINITY, -3}),
        "bfloat16 ties to even", name);
  for (const int dtype : {BD_KV_F32, BD_KV_BF16, BD_KV_INT8})
    check(std::isnan(one_token(dtype, {NAN, 1, 2, 3})[0]), "what is not a number stays none", name);
}

void test_agreement(const bd::Kernels &kernels, Shape shape, int64_t tokens, const std::vector<Feed> &feeds) {
  const World world(kernels, shape, 3, tokens);
  std::vector<double> want;
  for (const Feed &f : feeds)
    for (int64_t p = f.length - f.rows; p < f.length; p++) {
      const std::vector<double> row = world.expected(f.sequence, p);
      want.insert(want.end(), row.begin(), row.end());
    }
  for (const int threads : {1, 2, 16}) {
    const std::vector<float> got = world.attend(feeds, threads, threads);
    bool close = got.size() == want.size();
    for (size_t i = 0; close && i < got.size(); i++) close = std::fabs(got[i] - want[i]) < TOLERANCE;
    check(close, "attention", kernels.name + (", " + shape.name()) + ", threads " + std::to_string(threads));
  }
}

// Rows of position `first` on, many ways: always the bits of each row alone, on one thread.
void test_invariance(const bd::Kernels &kernels, Shape shape, int64_t first) {
  const World world(kernels, shape, 3, first + 24);
  const size_t width = shape.H * shape.C;
  std::vector<std::vector<float>> alone;
  for (int64_t i = 0; i < 9; i++) alone.push_back(world.attend({{1, first + i + 1, 1}}, 1));
  auto same = [&](const std::vector<float> &got, int64_t from, int64_t rows, const char *what) {
    for (int64_t i = 0; i < rows; i++)
      check(!std::memcmp(got.data() + (from + i) * width, alone[i].data(), width * 4), what,
            kernels.name + (", " + shape.name()) + ", position " + std::to_string(first + i));
  };
  for (const int64_t rows : {1, 2, 3, 5, 9})
    for (const int threads : {1, 2, 7}) {
      same(world.attend({{1, first + rows, rows}}, threads, threads), 0, rows, "among following rows");
      same(world.attend({{0, first + 24, 4}, {1, first + rows, rows}, {2, 5, 3}}, threads, threads), 4, rows,
           "among other sequences");
    }
  same(world.attend({{1, first + 9, first + 9}}, 3, 1), first, 9, "at the end of a prompt");
}

// A number that is none, where a row sees it, must not become one.
void test_not_a_number(const bd::Kernels &kernels, int dtype) {
  World world(kernels, {2, 1, 32, 0, dtype}, 1, 300);
  const int64_t at = world.place(0, 100, 0);
  if (dtype == BD_KV_F32) ((float *)world.kv.keys)[at / 16 * 32 * 16 + at % 16] = NAN;
  else if (dtype == BD_KV_BF16) ((uint16_t *)world.kv.keys)[at / 16 * 32 * 16 + at % 16] = 0x7fc0;
  else world.kv.key_scales[at] = NAN;
  check(std::isnan(world.attend({{0, 300, 1}}, 2)[0]), "a key that is not a number is seen", kernels.name);
  check(!std::isnan(world.attend({{0, 100, 1}}, 2)[0]), "a later key is not seen", kernels.name);
}

// Every query of every row once, split or not; enough items; bounded memory.
void test_plan() {
  struct {
    int64_t H, J, C, window;
    std::vector<std::pair<int64_t, int64_t>> feeds;  // length, rows
    size_t least;                                    // items
  } cases[] = {{14, 2, 64, 0, {{4096, 1}}, 32},
               {9, 3, 64, 0, {{4000, 1}}, 48},
               {9, 3, 64, 0, {{255, 1}}, 3},
               {12, 2, 128, 0, {{2048, 2048}}, 500},
               {32, 8, 128, 0, {{131072, 9}}, 8},
               {60, 1, 16, 100, {{700, 3}, {1, 1}, {300, 300}}, 10},
               {14, 2, 64, 0, {{50, 1}, {4096, 6}, {70, 70}, {60, 0}}, 20},
               {14, 2, 64, 0, {}, 0}};
  for (const auto &c : cases) {
    std::vector<int64_t> positions, starts = {0};
    for (const auto &[length, rows] : c.feeds) {
      for (int64_t p = length - rows; p < length; p++) positions.push_back(p);
      starts.push_back((int64_t)positions.size());
    }
    const int64_t rows = (int64_t)positions.size(), G = c.H / c.J;
    const int64_t sequences = (int64_t)c.feeds.size();
    const bd_batch batch = {rows, sequences, positions.data(), nullptr, starts.data(), nullptr, nullptr, nullptr};
    const bd_attention shape = {c.H, c.J, c.C, c.window, 0, nullptr, nullptr, 0, 0, 0};
    const bd::AttentionPlan plan(batch, shape, 2);
    const std::string name = "plan of " + std::to_string(rows) + " rows";
    check(plan.items.size() >= c.least, "too few items", name);
    check(plan.partial <= bd::MAX_PARTIAL, "too much memory", name);
    std::vector<int64_t> seen(rows * c.H);  // chunks of each query
    for (const bd::AttentionItem &item : plan.items) {
      check(item.to - item.from <= bd::QUERY_BLOCK && item.from < item.to, "size of an item", name);
      check(item.partial < 0 || item.last == item.first + 1, "a split item has one chunk", name);
      for (int64_t i = item.from; i < item.to; i++) {
        const int64_t row = i / G;
        check(row >= starts[item.sequence] && row < starts[item.sequence + 1], "a row of another sequence", name);
        const bd::Visible v = bd::visible(shape, positions[row]);
        for (int64_t chunk = item.first; chunk < item.last; chunk++)
          seen[row * c.H + item.head * G + i % G] += chunk * 256 < v.to && (chunk + 1) * 256 > v.from;
      }
    }
    for (int64_t i = 0; i < rows * c.H; i++) {
      const bd::Visible v = bd::visible(shape, positions[i / c.H]);
      check(seen[i] == (v.to - 1) / 256 - v.from / 256 + 1, "every chunk of every query once", name);
    }
    for (const bd::SplitRow &split : plan.splits)
      check(split.partial >= 0 && split.partial + split.chunks * c.H * bd::partial_width(c.C) <= plan.partial,
            "a split row outside its memory", name);
  }
}

void test_kernels(const bd::Kernels &kernels) {
  test_codes(kernels);
  for (const int dtype : {BD_KV_F32, BD_KV_BF16, BD_KV_INT8, BD_KV_E4M3}) {
    for (const bool norms : {false, true})
      for (const int64_t C : {2, 8, 20, 64, 80, 128}) test_rope(kernels, {6, 2, C, 0, dtype}, norms);
    for (const bool norms : {false, true}) {  // Phi-4's 96 of 128, and a rest that is no whole vector
      test_rope(kernels, {6, 2, 128, 0, dtype, 96}, norms);
      test_rope(kernels, {6, 2, 20, 0, dtype, 6}, norms);
    }
    for (const int64_t C : {2, 8, 20, 64, 80, 128})
      for (const int64_t window : {0, 40})
        test_agreement(kernels, {6, 2, C, window, dtype}, 90, {{0, 11, 5}, {1, 1, 1}, {2, 90, 90}, {0, 33, 2}});
    for (const int64_t window : {0, 1, 17, 300})
      test_agreement(kernels, {14, 2, 64, window, dtype}, 700, {{0, 255, 1}, {1, 256, 1}, {2, 257, 3}, {1, 700, 6}});
    test_agreement(kernels, {3, 3, 128, 0, dtype}, 257, {{1, 257, 20}, {0, 100, 100}});
    test_agreement(kernels, {60, 1, 16, 0, dtype}, 300, {{1, 300, 3}});
    test_agreement(kernels, {2, 1, 512, 0, dtype}, 60, {{1, 60, 17}});
    for (const int64_t first : {0, 15, 250, 254, 284, 300})  // with a window of 33, row 288 is beyond the first chunk
      for (const int64_t window : {0, 33}) {
        test_invariance(kernels, {7, 1, 20, window, dtype}, first);
        test_invariance(kernels, {4, 2, 64, window, dtype}, first);
      }
    test_invariance(kernels, {12, 2, 128, 0, dtype}, 600);
    if (dtype != BD_KV_E4M3) test_not_a_number(kernels, dtype);
  }
}

}  // namespace

/// attention_test [ISA]; without one, all that the machine runs
int main(int count, char **arguments) {
  bool any = false;
  test_plan();
  for (const char *isa : {"scalar", "avx2", "avx512"}) {
    if (count > 1 && std::strcmp(arguments[1], isa)) continue;
    const bd::Kernels *kernels = bd::find_kernels(isa);
    if (!kernels) continue;
    test_kernels(*kernels);
    any = true;
  }
  return any ? test::result("attention") : test::SKIPPED;
}
