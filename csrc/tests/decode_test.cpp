// All layers in one call, for one instruction set: to the bit what the operations give one after the other, on any
// number of threads, and whether the rows of a sequence come together or one by one.
#include <string>

#include "reference.h"

namespace {

using test::check;
using test::Form;
using test::Weight;

constexpr int64_t D = 64, H = 4, J = 2, C = 16, POSITIONS = 400, BLOCKS = 40;
constexpr float EPS = 1e-5f;

struct Model {
  const char *name;
  Form form;
  int activation, kv_dtype;
  std::vector<int64_t> inner;  // of each layer
  bool extras;                 // bias of q, k and v; norms of q and k
  bool parts = false;          // the second half of qkv and of gate_up is stored as `SECOND`
  bool gemma = false;  // norms after o and down, a gate of GELU, and two kinds of attention: see KINDS
};
const Form SECOND = {"int8", BD_INT8, BD_GRID_SYM, 32};

const Model MODELS[] = {
    {"w4a8", {"int4", BD_INT4, BD_GRID_ASYM, 32}, BD_ACT_INT8, BD_KV_INT8, {96, 96, 96}, false},
    {"w8a8", {"int8", BD_INT8, BD_GRID_NONE, 0}, BD_ACT_INT8, BD_KV_BF16, {20, 20}, true},
    {"bf16", {"bf16", BD_BF16, BD_GRID_NONE, 0}, BD_ACT_BF16, BD_KV_BF16, {64, 20}, true},
    {"fp8", {"e4m3", BD_E4M3, BD_GRID_NONE, 0}, BD_ACT_E4M3, BD_KV_F32, {48}, false},
    {"parts", {"int4", BD_INT4, BD_GRID_MIN, 32}, BD_ACT_INT8, BD_KV_BF16, {96, 160}, true, true},
    {"gemma", {"int4", BD_INT4, BD_GRID_SYM, 32}, BD_ACT_INT8, BD_KV_BF16, {96, 160, 96}, true, false, true},
    {"gemma of float inputs", {"bf16", BD_BF16, BD_GRID_NONE, 0}, BD_ACT_BF16, BD_KV_F32, {20, 64}, false, false, true},
    {"parts of float inputs", {"int5", BD_INT5, BD_GRID_SYM, 32}, BD_ACT_BF16, BD_KV_BF16, {160, 96}, false, true},
};

std::vector<float> normals(int64_t count, float scale, test::Random &random) {
  std::vector<float> x;
  for (int64_t i = 0; i < count; i++) x.push_back(random.normal() * scale);
  return x;
}

/// The cache of all layers, which calls change.
struct Cache {
  int dtype;
  std::vector<std::vector<uint8_t>> codes;  // keys and values of each layer
  std::vector<std::vector<float>> scales;   // likewise
  std::vector<bd_kv> layers() {
    std::vector<bd_kv> kv;
    for (size_t i = 0; i < codes.size(); i += 2)
      kv.push_back({.dtype = dtype,
                    .blocks = BLOCKS,
                    .keys = codes[i].data(),
                    .values = codes[i + 1].data(),
                    .key_scales = scales[i].data(),
                    .value_scales = scales[i + 1].data(),
                    .coded = nullptr});
    return kv;
  }
};

Cache filled(int dtype, size_t layers, test::Random &random) {
  Cache cache = {dtype, {}, {}};
  for (size_t i = 0; i < 2 * layers; i++) {
    const std::vector<float> x = normals(BLOCKS * J * C * 16, 1, random);
    std::vector<uint8_t> codes(x.size() * (dtype == BD_KV_F32 ? 4 : dtype == BD_KV_BF16 ? 2 : 1));
    for (size_t k = 0; k < x.size(); k++) {
      const uint32_t bits = test::bits_of_float(x[k]), high = bits >> 16;
      if (dtype == BD_KV_F32) std::memcpy(&codes[k * 4], &bits, 4);
      else if (dtype == BD_KV_BF16) codes[k * 2] = (uint8_t)high, codes[k * 2 + 1] = (uint8_t)(high >> 8);
      else codes[k] = (uint8_t)(int8_t)(random.below(255) - 127);
    }
    cache.codes.push_back(std::move(codes));
    std::vector<float> scales;
    for (int64_t k = 0; k < BLOCKS * J * 16; k++) scales.push_back(0.005f + 0.01f * (float)random.uniform());
    cache.scales.push_back(std::move(scales));
  }
  return cache;
}

/// Rows of sequences: sequence s has tokens before[s] .. before[s] + rows[s] - 1 in the call.
struct Batch {
  std::vector<int64_t> positions, slots, row_starts{0}, blocks, table_starts{0}, lengths;
  void add(const std::vector<int64_t> &table, int64_t before, int64_t rows) {
    for (int64_t p = before; p < before + rows; p++) {
      positions.push_back(p);
      slots.push_back(table[(size_t)(p / 16)] * 16 + p % 16);
    }
    blocks.insert(blocks.end(), table.begin(), table.end());
    row_starts.push_back((int64_t)positions.size());
    table_starts.push_back((int64_t)blocks.size());
    lengths.push_back(before + rows);
  }
  bd_batch view() const {
    return {.rows = (int64_t)positions.size(),
            .sequences = (int64_t)lengths.size(),
            .positions = positions.data(),
            .slots = slots.data(),
            .row_starts = row_starts.data(),
            .blocks = blocks.data(),
            .table_starts = table_starts.data(),
            .lengths = lengths.data()};
  }
};

class Decoder {
 public:
  Decoder(bd_pool *pool, const Model &model, test::Random &random)
      : cos_(normals(POSITIONS * C / 2, 1, random)), sin_(normals(POSITIONS * C / 2, 1, random)) {
    const auto stored = [&](Form form, int64_t N, int64_t K) {
      weights_.push_back(
          std::make_unique<Weight>(pool, form, model.activation, N, K, form.grid == BD_GRID_NONE, random));
      return &weights_.back()->packed;
    };
    const auto weight = [&](int64_t N, int64_t K) { return *stored(model.form, N, K); };
    const auto fused = [&](int64_t N, int64_t K) {
      bd_weight first = weight(model.parts ? N / 2 : N, K);
      if (model.parts) first.next = stored(SECOND, N - N / 2, K);
      return first;
    };
    const auto vector = [&](int64_t count, float scale) {
      vectors_.push_back(normals(count, scale, random));
      return vectors_.back().data();
    };
    const float size = model.form.codec == BD_INT8 ? 0.01f : 0.2f;
    for (int64_t M : model.inner)
      layers.push_back({.input_norm = vector(D, size),
                        .mlp_norm = vector(D, size),
                        .qkv_bias = model.extras ? vector((H + 2 * J) * C, 1) : nullptr,
                        .q_norm = model.extras ? vector(C, 1) : nullptr,
                        .k_norm = model.extras ? vector(C, 1) : nullptr,
                        .o_norm = model.gemma ? vector(D, 0.5f) : nullptr,
                        .down_norm = model.gemma && layers.size() != 1 ? vector(D, 0.5f) : nullptr,
                        .gate = model.gemma ? BD_GATE_GELU_TANH : BD_GATE_SILU,
                        .attention = model.gemma && layers.size() == 1 ? 1 : 0,
                        .qkv = fused((H + 2 * J) * C, D),
                        .o = weight(D, H * C),
                        .gate_up = fused(2 * M, D),
                        .down = weight(D, M)});
    attention = {.heads = H,
                 .kv_heads = J,
                 .head_dim = C,
                 .window = 0,
                 .rotary_positions = POSITIONS,
                 .cos = cos_.data(),
                 .sin = sin_.data(),
                 .eps = EPS,
                 .scale = 0,
                 .rotated = 0};
    kinds = {attention};
    if (model.gemma) {  // layer 1 sees all, and turns 6 channels by other angles; the others see 33 positions
      kinds = {attention, attention};
      kinds[0].window = 33;
      kinds[0].scale = 0.3f;
      kinds[1].rotated = 6;
      std::swap(kinds[1].cos, kinds[1].sin);
    }
  }

  void at_once(bd_pool *pool, float *x, const Batch &batch, Cache &cache) const {
    const bd_batch b = batch.view();
    const std::vector<bd_kv> kv = cache.layers();
    const int code = bd_decode(pool, x, D, layers.data(), (int64_t)layers.size(), kv.data(), &b, kinds.data(),
                               (int64_t)kinds.size());
    check(code == BD_OK, "bd_decode: %s", bd_error());
  }

  void one_by_one(bd_pool *pool, float *x, const Batch &batch, Cache &cache) const {
    const bd_batch b = batch.view();
    const int64_t R = b.rows;
    const std::vector<bd_kv> kv = cache.layers();
    for (size_t i = 0; i < layers.size(); i++) {
      const bd_layer &l = layers[i];
      const int64_t M = l.down.inputs;
      std::vector<float> qkv((size_t)(R * (H + 2 * J) * C)), q((size_t)(R * H * C)), mixed(q.size()),
          y((size_t)(R * D)), inner((size_t)(R * M)), z(y.size()), other(y.size());
      bd_norm_linear(pool, x, R, l.input_norm, EPS, &l.qkv, l.qkv_bias, qkv.data());
      const bd_attention &kind = kinds[(size_t)l.attention];
      bd_rope_append(pool, qkv.data(), &b, &kind, &kv[i], l.q_norm, l.k_norm, q.data());
      bd_attend(pool, q.data(), &b, &kind, &kv[i], mixed.data());
      const auto add = [&](const float *in, const bd_weight &w, const float *norm, const float *before, float *out) {
        if (norm) bd_linear_norm_add(pool, in, R, &w, norm, EPS, before, out);
        else bd_linear_add(pool, in, R, &w, before, out);
      };
      add(mixed.data(), l.o, l.o_norm, x, y.data());
      bd_gated_inputs(pool, y.data(), R, l.mlp_norm, EPS, &l.gate_up, l.gate, inner.data());
      add(inner.data(), l.down, l.down_norm, y.data(), z.data());
      bd_gated_mlp(pool, y.data(), R, l.mlp_norm, EPS, &l.gate_up, l.gate, &l.down, other.data());
      check(l.down_norm || z == other, "layer %zu: bd_gated_mlp differs from its two halves", i);
      std::copy(z.begin(), z.end(), x);
    }
  }

  std::vector<bd_layer> layers;
  bd_attention attention;
  std::vector<bd_attention> kinds;

 private:
  std::vector<std::unique_ptr<Weight>> weights_;
  std::vector<std::vector<float>> vectors_;
  std::vector<float> cos_, sin_;
};

struct Sequence {
  int64_t before, rows;
};
const std::vector<Sequence> SEQUENCES = {{290, 1}, {0, 9}, {17, 4}, {255, 3}};

void decode(const char *isa, const Model &model) {
  test::Random random(11);
  bd_pool *pools[4] = {};
  for (int threads = 1; threads <= 3; threads++) pools[threads] = bd_pool_new(isa, threads);
  const Decoder decoder(pools[1], model, random);
  const Cache cache = filled(model.kv_dtype, model.inner.size(), random);
  std::vector<int64_t> free;
  for (int64_t b = 0; b < BLOCKS; b++) free.push_back(b * 7 % BLOCKS);
  Batch batch;
  std::vector<std::vector<int64_t>> tables;
  for (const Sequence &s : SEQUENCES) {
    const int64_t count = (s.before + s.rows + 15) / 16;
    tables.emplace_back(free.end() - count, free.end());
    free.resize(free.size() - (size_t)count);
    batch.add(tables.back(), s.before, s.rows);
  }
  const std::vector<float> x = normals((int64_t)batch.positions.size() * D, 1, random);

  std::vector<float> expected = x;
  Cache filled = cache;
  decoder.one_by_one(pools[1], expected.data(), batch, filled);
  for (float v : expected) check(std::isfinite(v), "%s: a result is no number", model.name);
  const auto compare = [&](const char *how, int threads, const std::vector<float> &y, const Cache &after) {
    check(y == expected, "%s %s, %d threads: rows differ", model.name, how, threads);
    check(after.codes == filled.codes && after.scales == filled.scales, "%s %s, %d threads: caches differ", model.name,
          how, threads);
  };
  for (int threads = 1; threads <= 3; threads++) {
    std::vector<float> y = x;
    Cache after = cache;
    decoder.at_once(pools[threads], y.data(), batch, after);
    compare("at once", threads, y, after);

    y = x, after = cache;
    float *row = y.data();
    for (size_t s = 0; s < SEQUENCES.size(); s++)
      for (int64_t r = 0; r < SEQUENCES[s].rows; r++, row += D) {
        Batch single;
        single.add(tables[s], SEQUENCES[s].before + r, 1);
        decoder.at_once(pools[threads], row, single, after);
      }
    compare("row by row", threads, y, after);
  }
  for (bd_pool *pool : pools)
    if (pool) bd_pool_free(pool);
}

}  // namespace

/// decode_test ISA
int main(int count, char **arguments) {
  const char *isa = count > 1 ? arguments[1] : "scalar";
  if (!bd::find_kernels(isa)) return std::printf("%s does not run here\n", isa), test::SKIPPED;
  for (const Model &model : MODELS) decode(isa, model);
  return test::result(isa);
}
