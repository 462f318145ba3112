// What the C interface refuses, with which code, and that bd_error says why.
#include "reference.h"

namespace {

using test::check;

void refuses(const char *what, int code, int got) {
  check(got == code, "%s gives %d. Expected %d.", what, got, code);
  check(std::strlen(bd_error()) > 20, "%s: bd_error says only \"%s\"", what, bd_error());
}

alignas(64) float x[4096], y[4096], norm[4096], residual[4096];
alignas(64) uint8_t panels[1 << 16], codes[1 << 14], zeros[64];
float scales[64];

template <class T> T *misaligned(T *p) { return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(p) + 1); }

bd_weight weight(int codec, int grid, int group, int64_t inputs = 64, int activation = BD_ACT_BF16) {
  return {.codec = codec,
          .grid = grid,
          .activation = activation,
          .group = group,
          .outputs = 16,
          .inputs = inputs,
          .panels = panels,
          .channel = nullptr,
          .next = nullptr};
}

int linear(bd_pool *pool, const bd_weight *w) { return bd_norm_linear(pool, x, 1, norm, 1e-6f, w, nullptr, y); }

void weights(bd_pool *pool) {
  const auto refused = [&](const char *what, bd_weight w) { refuses(what, BD_E_SHAPE, linear(pool, &w)); };
  bd_weight good = weight(BD_INT4, BD_GRID_SYM, 32), w = good;
  check(linear(pool, &good) == BD_OK, "a weight that is all right: %s", bd_error());
  refuses("no weight", BD_E_POINTER, linear(pool, nullptr));
  w.panels = nullptr;
  refuses("no panels", BD_E_POINTER, linear(pool, &w));
  w.panels = panels + 32;
  refuses("panels on half a cache line", BD_E_POINTER, linear(pool, &w));
  for (int group : {0, 8, 16, 48, -32, 33, 128})
    refused("a group that does not fit", weight(BD_INT4, BD_GRID_SYM, group));
  refused("groups of 32 in 48 inputs", weight(BD_INT4, BD_GRID_ASYM, 32, 48));
  refused("half a block of 256", weight(BD_INT4, BD_GRID_K, 0, 128));
  refused("half a block of 256", weight(BD_INT6, BD_GRID_K16, 0, 384));
  refused("floats with scales", weight(BD_BF16, BD_GRID_SYM, 32));
  refused("floats with 8-bit inputs", weight(BD_E4M3, BD_GRID_NONE, 0, 64, BD_ACT_INT8));
  refused("floats with 8-bit inputs in groups", weight(BD_BF16, BD_GRID_NONE, 0, 64, BD_ACT_INT8_G32));
  refused("4 bits without scales", weight(BD_INT4, BD_GRID_NONE, 0));
  refused("an unknown codec", weight(BD_CODECS, BD_GRID_NONE, 0));
  refused("an unknown codec", weight(-1, BD_GRID_NONE, 0));
  refused("an unknown grid", weight(BD_INT4, BD_GRIDS, 32));
  refused("an unknown activation", weight(BD_INT4, BD_GRID_SYM, 32, 64, BD_ACTIVATIONS));
  refused("no inputs", weight(BD_F32, BD_GRID_NONE, 0, 0));
  const bd_weight none[] = {weight(BD_INT8, BD_GRID_ASYM, 32), weight(BD_INT5, BD_GRID_ASYM, 32),
                            weight(BD_INT2, BD_GRID_MIN, 32), weight(BD_INT2, BD_GRID_K, 0, 256),
                            weight(BD_INT4, BD_GRID_K16, 0, 256)};
  for (int group : {0, 8, 32}) refused("a group that is not of 16", weight(BD_FP4, BD_GRID_SYM16, group));
  refused("half a group of 16", weight(BD_FP4, BD_GRID_SYM16, 16, 40));
  refused("integers with a scale for 16", weight(BD_INT4, BD_GRID_SYM16, 16));
  refused("floats of 4 bits with zero points", weight(BD_FP4, BD_GRID_ASYM, 32));
  for (int rotation : {-32, 16, 48, 128}) {  // of 64 inputs
    bd_weight rotated = weight(BD_INT4, BD_GRID_SYM, 32);
    rotated.rotation = rotation;
    refused("inputs that are no whole blocks to rotate", rotated);
  }
  for (const bd_weight &unknown : none) refused("codes with a grid that no kernel knows", unknown);

  bd_weight parts[4] = {good, good, good, good};
  for (int i = 0; i < 3; i++) parts[i].next = &parts[i + 1];
  refuses("four parts", BD_E_SHAPE, linear(pool, parts));
  parts[2].next = nullptr;
  parts[1].activation = BD_ACT_INT8;
  refuses("parts that round their inputs in two ways", BD_E_SHAPE, linear(pool, parts));
  parts[1] = parts[2];
  parts[1].rotation = 32;
  refuses("parts that rotate their inputs in two ways", BD_E_SHAPE, linear(pool, parts));
  parts[1] = parts[2];
  parts[0].inputs = 32;
  refuses("parts with different inputs", BD_E_SHAPE, linear(pool, parts));
}

void outliers(bd_pool *pool) {
  const int32_t columns[] = {0, 5, 63}, twice[] = {0, 5, 5}, far[] = {0, 5, 64}, negative[] = {-1, 5, 6};
  bd_weight side = weight(BD_BF16, BD_GRID_NONE, 0, 3), good = weight(BD_INT4, BD_GRID_SYM, 32, 64, BD_ACT_INT8), w = good;
  good.outliers = 3, good.columns = columns, good.side = &side;
  check(linear(pool, &good) == BD_OK, "a weight with outliers that is all right: %s", bd_error());
  for (const int32_t *some : {twice, far, negative}) {
    (w = good).columns = some;
    refuses("columns that are no ascending numbers of inputs", BD_E_SHAPE, linear(pool, &w));
  }
  (w = good).columns = nullptr;
  refuses("no columns", BD_E_POINTER, linear(pool, &w));
  (w = good).side = nullptr;
  refuses("outliers without weights", BD_E_SHAPE, linear(pool, &w));
  (w = good).outliers = 2;
  refuses("fewer outliers than weights for them", BD_E_SHAPE, linear(pool, &w));
  (w = good).rotation = 32;
  refuses("outliers beside a rotation", BD_E_SHAPE, linear(pool, &w));
  bd_weight wrong = weight(BD_F32, BD_GRID_NONE, 0, 3);
  (w = good).side = &wrong;
  refuses("outliers in float32", BD_E_SHAPE, linear(pool, &w));
  (wrong = side).outputs = 8;
  refuses("outliers of fewer outputs", BD_E_SHAPE, linear(pool, &w));
  bd_weight parts[2] = {good, good};
  parts[0].next = &parts[1], parts[1].outliers = 0, parts[1].side = nullptr;
  refuses("outliers in one part of two", BD_E_SHAPE, linear(pool, parts));
  const int64_t row = 0;
  refuses("a table with outliers", BD_E_SHAPE, bd_unpack_rows(pool, &good, &row, 1, y));
}

void refused_inputs(bd_pool *pool) {
  const bd_weight wide = weight(BD_INT4, BD_GRID_SYM, 32, (1 << 21) + 32);
  refuses("more inputs than groups are counted for", BD_E_SHAPE, linear(pool, &wide));
}

void buffers(bd_pool *pool) {
  const bd_weight w = weight(BD_BF16, BD_GRID_NONE, 0), down = weight(BD_BF16, BD_GRID_NONE, 0, 8);
  refuses("no x", BD_E_POINTER, bd_norm_linear(pool, nullptr, 1, norm, 0, &w, nullptr, y));
  refuses("no norm", BD_E_POINTER, bd_norm_linear(pool, x, 1, nullptr, 0, &w, nullptr, y));
  refuses("no output", BD_E_POINTER, bd_norm_linear(pool, x, 1, norm, 0, &w, nullptr, nullptr));
  refuses("a misaligned x", BD_E_POINTER, bd_norm_linear(pool, misaligned(x), 1, norm, 0, &w, nullptr, y));
  refuses("a misaligned bias", BD_E_POINTER, bd_norm_linear(pool, x, 1, norm, 0, &w, misaligned(y), y));
  refuses("no residual", BD_E_POINTER, bd_linear_add(pool, x, 1, &w, nullptr, y));
  refuses("a misaligned residual", BD_E_POINTER, bd_linear_add(pool, x, 1, &w, misaligned(residual), y));
  refuses("a misaligned output", BD_E_POINTER, bd_linear_add(pool, x, 1, &w, residual, misaligned(y)));
  refuses("no gate", BD_E_POINTER, bd_gated_mlp(pool, x, 1, norm, 0, nullptr, 0, &down, y));
  refuses("no norm", BD_E_POINTER, bd_gated_inputs(pool, x, 1, nullptr, 0, &w, 0, y));
  refuses("a misaligned x", BD_E_POINTER, bd_gated_mlp(pool, misaligned(x), 1, norm, 0, &w, 0, &down, y));
  refuses("an unknown gate", BD_E_SHAPE, bd_gated_mlp(pool, x, 1, norm, 0, &w, BD_GATES, &down, y));
  refuses("no norm", BD_E_POINTER, bd_linear_norm_add(pool, x, 1, &w, nullptr, 0, residual, y));
  refuses("a misaligned residual", BD_E_POINTER, bd_linear_norm_add(pool, x, 1, &w, norm, 0, misaligned(residual), y));
  refuses("a cap of nothing", BD_E_SHAPE, bd_softcap(pool, y, 1, 8, 0));
  const bd_weight other = weight(BD_BF16, BD_GRID_NONE, 0, 24);
  refuses("a down projection of another inner size", BD_E_SHAPE, bd_gated_mlp(pool, x, 1, norm, 0, &w, 0, &other, y));
  check(bd_norm_linear(pool, x, 0, norm, 0, &w, nullptr, y) == BD_OK, "no rows: %s", bd_error());
  refuses("fewer rows than none", BD_E_SHAPE, bd_norm_linear(pool, x, -1, norm, 0, &w, nullptr, y));
  refuses("fewer rows than none", BD_E_SHAPE, bd_gated_inputs(pool, x, -1, norm, 0, &w, 0, y));

  int64_t rows[] = {0, 16};
  refuses("a row past the table", BD_E_SHAPE, bd_unpack_rows(pool, &w, rows, 2, y));
  rows[1] = -1;
  refuses("a row before the table", BD_E_SHAPE, bd_unpack_rows(pool, &w, rows, 2, y));
  refuses("no table", BD_E_POINTER, bd_unpack_rows(pool, nullptr, rows, 1, y));
  refuses("no room for rows", BD_E_POINTER, bd_unpack_rows(pool, &w, rows, 1, nullptr));
  refuses("no logits", BD_E_POINTER, bd_softmax(pool, nullptr, 1, 8, 1, y));
  int64_t place;
  refuses("no logits", BD_E_POINTER, bd_top(pool, nullptr, 1, 8, 8, &place, y));
  refuses("nowhere to put a place", BD_E_POINTER, bd_top(pool, x, 1, 8, 8, nullptr, y));
  refuses("rows of nothing", BD_E_SHAPE, bd_top(pool, x, 1, 0, 0, &place, y));
  refused_inputs(pool);
}

void packing(bd_pool *pool) {
  bd_weight w = weight(BD_INT4, BD_GRID_ASYM, 32);
  check(bd_pack(pool, &w, panels, codes, scales, zeros) == BD_OK, "bd_pack: %s", bd_error());
  refuses("no codes", BD_E_POINTER, bd_pack(pool, &w, panels, nullptr, scales, zeros));
  refuses("no scales", BD_E_POINTER, bd_pack(pool, &w, panels, codes, nullptr, zeros));
  refuses("no zero points", BD_E_POINTER, bd_pack(pool, &w, panels, codes, scales, nullptr));
  refuses("nowhere to pack to", BD_E_POINTER, bd_pack(pool, &w, nullptr, codes, scales, zeros));
  refuses("panels on an odd address", BD_E_POINTER, bd_pack(pool, &w, panels + 1, codes, scales, zeros));
  w = weight(BD_INT4, BD_GRID_MIN, 32);
  refuses("a grid that only GGUF has", BD_E_SHAPE, bd_pack(pool, &w, panels, codes, scales, zeros));
}

void attention(bd_pool *pool) {
  const int64_t zero[] = {0}, ends[] = {0, 1}, one[] = {1};
  const bd_batch batch = {1, 1, zero, zero, ends, zero, ends, one};
  const bd_attention shape = {2, 1, 16, 0, 1, x, x, 1e-6f, 0, 0};
  const bd_kv kv = {BD_KV_F32, 1, y, y, nullptr, nullptr, nullptr};
  float *const q = residual;
  check(bd_attend(pool, q, &batch, &shape, &kv, x) == BD_OK, "bd_attend: %s", bd_error());
  refuses("no batch", BD_E_POINTER, bd_attend(pool, q, nullptr, &shape, &kv, x));
  refuses("no shape", BD_E_POINTER, bd_attend(pool, q, &batch, nullptr, &kv, x));
  refuses("no cache", BD_E_POINTER, bd_attend(pool, q, &batch, &shape, nullptr, x));
  refuses("no queries", BD_E_POINTER, bd_attend(pool, nullptr, &batch, &shape, &kv, x));
  bd_kv wrong = kv;
  wrong.dtype = 7;
  refuses("an unknown cache", BD_E_SHAPE, bd_attend(pool, q, &batch, &shape, &wrong, x));
  wrong.dtype = BD_KV_INT8;
  refuses("8-bit codes without scales", BD_E_POINTER,
          bd_rope_append(pool, x, &batch, &shape, &wrong, nullptr, nullptr, q));
  wrong.dtype = BD_KV_E4M3;
  refuses("8-bit floats without scales", BD_E_POINTER, bd_attend(pool, q, &batch, &shape, &wrong, x));
  const auto grid = reinterpret_cast<const uint16_t *>(x);
  bd_coded coded = {8, 0, 64, 1, zero, codes, codes, grid, grid, nullptr, nullptr};
  wrong = {BD_KV_BF16, 1, y, y, nullptr, nullptr, &coded};
  check(bd_attend(pool, q, &batch, &shape, &wrong, x) == BD_OK, "bd_attend with codes: %s", bd_error());
  wrong.dtype = BD_KV_F32;
  refuses("full copies in float32", BD_E_SHAPE, bd_attend(pool, q, &batch, &shape, &wrong, x));
  wrong.dtype = BD_KV_BF16, coded.bits = 5;
  refuses("codes of five bits", BD_E_SHAPE, bd_attend(pool, q, &batch, &shape, &wrong, x));
  coded.bits = 4, coded.outliers = 2;
  refuses("no outliers where there are two", BD_E_POINTER, bd_attend(pool, q, &batch, &shape, &wrong, x));
  bd_attention odd = shape;
  odd.heads = 3, odd.kv_heads = 2;
  refuses("three heads over two", BD_E_SHAPE, bd_attend(pool, q, &batch, &odd, &kv, x));
  odd = shape, odd.head_dim = 15;
  refuses("an odd head", BD_E_SHAPE, bd_rope_append(pool, x, &batch, &odd, &kv, nullptr, nullptr, q));
  odd = shape, odd.rotated = 18;
  refuses("more channels that turn than there are", BD_E_SHAPE, bd_attend(pool, q, &batch, &odd, &kv, x));
  refuses("no kind of attention", BD_E_SHAPE, bd_decode(pool, x, 16, nullptr, 1, &kv, &batch, &shape, 0));
  const bd_attention unlike[] = {shape, {1, 1, 16, 0, 1, x, x, 1e-6f, 0, 0}};
  refuses("kinds with other heads", BD_E_SHAPE, bd_decode(pool, x, 16, nullptr, 1, &kv, &batch, unlike, 2));
  odd = shape, odd.head_dim = 1024;
  refuses("a head that is too large", BD_E_SHAPE, bd_attend(pool, q, &batch, &odd, &kv, x));
}

}  // namespace

int main() {
  check(!bd_pool_new("mmx", 1) && std::strstr(bd_error(), "mmx"), "an unknown instruction set: %s", bd_error());
  bd_pool *pool = bd_pool_new(nullptr, 2);
  check(pool && bd_pool_threads(pool) == 2 && std::strstr(bd_isas(), bd_pool_isa(pool)), "the best pool: %s",
        bd_error());
  for (float &f : norm) f = 1;
  weights(pool);
  outliers(pool);
  buffers(pool);
  packing(pool);
  attention(pool);
  bd_pool_free(pool);
  return test::result("refusals");
}
