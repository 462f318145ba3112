// The C interface: looks at what it was given, then calls the operations.
#include <chrono>
#include <new>
#include <stdexcept>
#include <string>

#include "ops.h"

struct bd_pool {
  bd::Pool pool;
  bd_pool(const bd::Kernels &kernels, int threads) : pool(kernels, threads) {}
};

namespace {

thread_local std::string last_error;

struct Refused {
  int code;
};

[[noreturn]] void refuse(int code, const std::string &message) {
  last_error = message;
  throw Refused{code};
}

void need(bool ok, int code, const char *what) {
  if (!ok) refuse(code, what);
}

void need_floats(const void *p, const char *name) {
  if (!p) refuse(BD_E_POINTER, std::string(name) + ": a null pointer. Expected a buffer.");
  if ((uintptr_t)p % 4) refuse(BD_E_POINTER, std::string(name) + ": a buffer that is not 4-byte aligned. Expected float32.");
}

void need_grid(const bd_weight &w) {
  const bool ok = w.codec >= 0 && w.codec < BD_CODECS && w.grid >= 0 && w.grid < BD_GRIDS && w.outputs > 0 && w.inputs > 0 &&
                  w.activation >= 0 && w.activation < BD_ACTIVATIONS;
  need(ok, BD_E_SHAPE, "a weight of an unknown codec, grid or activation, or of no size.");
  const bool floats = w.codec <= BD_E5M2;
  need(!(floats && bd::integer_inputs(w.activation)), BD_E_SHAPE, "a weight of floats with 8-bit integer inputs. Expected float inputs.");
  need(bd::known_form(w.codec, w.grid), BD_E_SHAPE, "codes with scales of a kind that they never have, or without any.");
  const bool blocks = w.rotation == 32 || w.rotation == 64 || w.rotation == 128;
  need(!w.rotation || (blocks && w.inputs % w.rotation == 0), BD_E_SHAPE,
       "inputs to rotate that are no whole blocks. Expected blocks of 32, 64 or 128 that divide them.");
  need(w.inputs <= bd::MAX_INPUTS, BD_E_SHAPE, "a weight of more than 2^21 inputs. Expected at most that.");
  if (w.grid == BD_GRID_NONE) return;
  if (w.grid == BD_GRID_SYM16)
    return need(w.group == 16 && w.inputs % 16 == 0, BD_E_SHAPE, "groups that are not of 16 inputs or do not divide them.");
  const bool unit = w.grid == BD_GRID_K || w.grid == BD_GRID_K16;  // their groups are 256 inputs, whatever `group` says
  const bool fits = unit ? w.inputs % 256 == 0 : w.group >= 32 && w.group % 32 == 0 && w.inputs % w.group == 0;
  need(fits, BD_E_SHAPE, "a group size that is no multiple of 32 or does not divide the inputs.");
}

void need_part(const bd_weight &w, const char *name) {
  need_grid(w);
  if (!w.panels || (uintptr_t)w.panels % 64)
    refuse(BD_E_POINTER, std::string(name) + ": panels that are null or not 64-byte aligned.");
}

// What a part keeps apart, beside the first part of its weight.
void need_outliers(const bd_weight &w, const bd_weight &first, const char *name) {
  if (w.outliers != first.outliers || !w.outliers != !w.side)
    refuse(BD_E_SHAPE, std::string(name) + ": inputs that are kept apart in some parts only, or without their weights.");
  if (!w.outliers) return;
  const bd_weight &side = *w.side;
  need_part(side, name);
  if (w.outliers < 0 || w.rotation || side.codec != BD_BF16 || side.activation != BD_ACT_BF16 || side.outliers || side.side ||
      side.next || side.rotation || side.outputs != w.outputs || side.inputs != w.outliers)
    refuse(BD_E_SHAPE, std::string(name) + ": inputs that are kept apart beside rotated ones, or whose weights are not "
                       "bfloat16 [outputs, outliers].");
  if (&w != &first) return;
  if (!w.columns) refuse(BD_E_POINTER, std::string(name) + ": columns: a null pointer. Expected those that are kept apart.");
  for (int32_t i = 0; i < w.outliers; i++)
    if (w.columns[i] < (i ? w.columns[i - 1] + 1 : 0) || w.columns[i] >= w.inputs)
      refuse(BD_E_SHAPE, std::string(name) + ": columns that are no ascending numbers of inputs.");
}

void need_weight(const bd_weight *w, const char *name) {
  if (!w) refuse(BD_E_POINTER, std::string(name) + ": a null pointer. Expected a weight.");
  int parts = 0;
  for (const bd_weight *part = w; part; part = part->next) {
    if (++parts > BD_PARTS) refuse(BD_E_SHAPE, std::string(name) + ": more parts than q, k and v. Expected 3 at most.");
    need_part(*part, name);
    if (part->inputs != w->inputs || part->activation != w->activation || part->rotation != w->rotation)
      refuse(BD_E_SHAPE, std::string(name) + ": parts of other inputs, or that round them otherwise. Expected the same.");
    need_outliers(*part, *w, name);
  }
}

void need_gate(int gate) {
  need(gate >= 0 && gate < BD_GATES, BD_E_SHAPE, "an unknown gate. Expected SiLU or GELU's tanh form.");
}

void need_kv(const bd_kv *kv) {
  need(kv && kv->keys && kv->values, BD_E_POINTER, "kv: a null pointer. Expected keys and values.");
  need(kv->dtype >= BD_KV_F32 && kv->dtype <= BD_KV_E4M3, BD_E_SHAPE, "kv: an unknown dtype.");
  need(kv->dtype < BD_KV_INT8 || (kv->key_scales && kv->value_scales), BD_E_POINTER, "kv: 8-bit codes without their scales.");
  const bd_coded *coded = kv->coded;
  if (!coded) return;
  need(kv->dtype == BD_KV_BF16, BD_E_SHAPE, "kv: full copies that are not bfloat16. Expected that beside blocks in codes.");
  need((coded->bits == 8 || coded->bits == 4) && coded->window > 0 && coded->outliers >= 0, BD_E_SHAPE,
       "kv: blocks in codes of an unknown width, without a window, or with fewer outliers than none.");
  need(coded->copies && coded->keys && coded->values && coded->key_grid && coded->value_grid &&
           (!coded->outliers || (coded->key_outliers && coded->value_outliers)),
       BD_E_POINTER, "kv: a null pointer. Expected the codes of blocks, their grids and outliers.");
}

void need_batch(const bd_batch *batch, const bd_attention *shape) {
  need(batch && shape, BD_E_POINTER, "a null pointer. Expected a batch and the shape of attention.");
  need(shape->heads > 0 && shape->kv_heads > 0 && shape->heads % shape->kv_heads == 0 && shape->head_dim > 0 &&
           shape->head_dim % 2 == 0,
       BD_E_SHAPE, "heads that are no multiple of the KV heads, or an odd head dimension.");
  need(shape->head_dim <= bd::MAX_HEAD_DIM, BD_E_SHAPE, "a head dimension above 512. Expected at most that.");
  need(shape->rotated >= 0 && shape->rotated <= shape->head_dim && shape->rotated % 2 == 0, BD_E_SHAPE,
       "rotary positions on an odd number of channels, or on more than there are.");
}

// Nothing that a batch says may lead outside its own arrays, the blocks, or the table of angles.
void need_places(const bd_batch &b, const bd_attention &shape, const bd_kv &kv) {
  const int64_t blocks = kv.coded ? kv.coded->blocks : kv.blocks;
  auto copied = [&](int64_t block) {
    return !kv.coded || (kv.coded->copies[block] >= 0 && kv.coded->copies[block] < kv.blocks);
  };
  for (int64_t s = 0; s < b.sequences; s++) {
    const int64_t entries = b.table_starts[s + 1] - b.table_starts[s], length = b.lengths[s];
    need(length >= 0 && length <= entries * bd::KV_BLOCK, BD_E_SHAPE, "a length that its block table does not hold.");
    for (int64_t i = b.table_starts[s]; i < b.table_starts[s + 1]; i++)
      need(b.blocks[i] >= 0 && b.blocks[i] < blocks, BD_E_SHAPE, "a block table with a block that there is not.");
    need(b.row_starts[s] <= b.row_starts[s + 1], BD_E_SHAPE, "a sequence of a negative number of rows.");
    for (int64_t r = b.row_starts[s]; r < b.row_starts[s + 1]; r++) {
      need(b.positions[r] >= 0 && b.positions[r] < length, BD_E_SHAPE, "a position outside its sequence. Expected 0 to length - 1.");
      need(b.positions[r] < shape.rotary_positions, BD_E_SHAPE, "a position that there are no rotary angles for.");
      need(b.slots[r] >= 0 && b.slots[r] < blocks * bd::KV_BLOCK, BD_E_SHAPE, "a slot outside the blocks.");
      need(copied(b.slots[r] / bd::KV_BLOCK), BD_E_SHAPE, "a slot in a block without its full copy.");
      if (!kv.coded) continue;
      const int64_t *table = b.blocks + b.table_starts[s];
      for (int64_t i = bd::coded_tokens(kv.coded->window, b.positions[r]) / bd::KV_BLOCK; i <= b.positions[r] / bd::KV_BLOCK; i++)
        need(copied(table[i]), BD_E_SHAPE, "a row that reads the full copy of a block that has none.");
    }
  }
}

// Run an operation; turn what it throws into a code.
template <class Body> int guarded(Body body) {
  try {
    body();
    return BD_OK;
  } catch (const Refused &refused) {
    return refused.code;
  } catch (const std::bad_alloc &) {
    last_error = "out of memory for intermediate values. Expected some; feed fewer rows at once.";
    return BD_E_MEMORY;
  }
}

// norm and bias, or residual; NULL for what an operation does not have.
void run_linear(bd::Pool &pool, const float *x, int64_t rows, const float *norm, float eps, const bd_weight *w,
               const float *bias, const float *residual, float *out) {
  need_weight(w, "weight");
  need_floats(x, "x"), need_floats(out, "out");
  if (bias) need_floats(bias, "bias");
  bd::Rounded room;
  bd::take_scratch(pool, [&](bd::Carver &memory) { room = bd::carve_rounded(memory, rows, w->inputs, w->outliers); });
  pool.run([&](bd::Team &team) { bd::norm_linear(team, room, x, rows, norm, eps, *w, bias, residual, out); });
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

int bd_abi(void) { return BD_ABI; }
const char *bd_error(void) { return last_error.c_str(); }

bd_pool *bd_pool_new(const char *isa, int threads) {
  const bd::Kernels *kernels = bd::find_kernels(isa ? isa : "");
  if (!kernels) {
    last_error = std::string("instruction set ") + isa + ". Expected one that this machine runs: " + bd_isas() + ".";
    return nullptr;
  }
  try {
    return new bd_pool(*kernels, threads < 1 ? 1 : threads);
  } catch (const std::exception &error) {
    last_error = error.what();
    return nullptr;
  }
}
void bd_pool_free(bd_pool *pool) { delete pool; }
int bd_pool_threads(const bd_pool *pool) { return pool->pool.threads(); }
const char *bd_pool_isa(const bd_pool *pool) { return pool->pool.kernels().name; }

int64_t bd_weight_bytes(int codec, int grid, int group, int64_t outputs, int64_t inputs) {
  const bd::Layout l(codec, grid, group, outputs, inputs);
  return l.panels * l.panel_bytes;
}

int bd_pack(bd_pool *pool, bd_weight *w, uint8_t *panels, const void *codes, const float *scales, const uint8_t *zeros) {
  return guarded([&] {
    w->panels = panels;
    need_part(*w, "weight");
    need(w->grid <= BD_GRID_ASYM || w->grid == BD_GRID_SYM16, BD_E_SHAPE, "scales of a kind that only GGUF has. Expected bd_pack_gguf.");
    need(codes, BD_E_POINTER, "codes: a null pointer. Expected a buffer.");
    need((w->grid != BD_GRID_SYM && w->grid != BD_GRID_SYM16) || scales, BD_E_POINTER, "scales: a null pointer. Expected one for each group.");
    need(w->grid != BD_GRID_ASYM || (scales && zeros), BD_E_POINTER, "zeros: a null pointer. Expected one for each group.");
    bd::pack(pool->pool, *w, panels, static_cast<const uint8_t *>(codes), scales, zeros);
  });
}

int bd_gguf_form(int type, bd_weight *w) {
  return bd::gguf_form(type, w->inputs, w->codec, w->grid, w->group) ? BD_OK : BD_E_SHAPE;
}

int bd_pack_gguf(bd_pool *pool, bd_weight *w, uint8_t *panels, int type, const uint8_t *blocks) {
  return guarded([&] {
    need(bd_gguf_form(type, w) == BD_OK, BD_E_SHAPE, "a GGUF tensor type that is not read, or inputs that are no whole blocks.");
    w->panels = panels;
    need_part(*w, "weight");
    need(blocks, BD_E_POINTER, "blocks: a null pointer. Expected a buffer.");
    bd::pack_gguf(pool->pool, *w, panels, type, blocks);
  });
}

int bd_unpack_rows(bd_pool *pool, const bd_weight *w, const int64_t *rows, int64_t count, float *out) {
  return guarded([&] {
    need_weight(w, "table");
    need(!w->next, BD_E_SHAPE, "table: a weight of several parts. Expected one.");
    need(!w->rotation && !w->outliers, BD_E_SHAPE, "table: a weight for rotated inputs, or with some kept apart. Expected none.");
    need_floats(out, "out");
    for (int64_t i = 0; i < count; i++) need(rows[i] >= 0 && rows[i] < w->outputs, BD_E_SHAPE, "a row outside the table.");
    const bd::Layout l(*w);
    auto unpack = [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++) pool->pool.kernels().unpack_row(*w, l, rows[i], out + i * w->inputs);
    };
    if (count <= 16) return unpack(0, count);  // less work than waking a thread
    pool->pool.run([&](bd::Team &team) { team.share(count, 4, unpack); });
  });
}

int bd_norm_linear(bd_pool *pool, const float *x, int64_t rows, const float *norm, float eps, const bd_weight *w,
                   const float *bias, float *out) {
  return guarded([&] {
    need(rows >= 0, BD_E_SHAPE, "fewer rows than none.");
    if (rows == 0) return;
    need_floats(norm, "norm");
    run_linear(pool->pool, x, rows, norm, eps, w, bias, nullptr, out);
  });
}

int bd_linear_add(bd_pool *pool, const float *x, int64_t rows, const bd_weight *w, const float *residual, float *out) {
  return guarded([&] {
    need(rows >= 0, BD_E_SHAPE, "fewer rows than none.");
    if (rows == 0) return;
    need_floats(residual, "residual");
    run_linear(pool->pool, x, rows, nullptr, 0, w, nullptr, residual, out);
  });
}

int bd_linear_norm_add(bd_pool *pool, const float *x, int64_t rows, const bd_weight *w, const float *norm, float eps,
                       const float *residual, float *out) {
  return guarded([&] {
    need(rows >= 0, BD_E_SHAPE, "fewer rows than none.");
    if (rows == 0) return;
    need_weight(w, "weight");
    need_floats(x, "x"), need_floats(norm, "norm"), need_floats(residual, "residual"), need_floats(out, "out");
    bd::Rounded room;
    float *product = nullptr;
    bd::take_scratch(pool->pool, [&](bd::Carver &memory) {
      room = bd::carve_rounded(memory, rows, w->inputs, w->outliers);
      product = memory.take<float>(rows * bd::outputs_of(*w));
    });
    pool->pool.run(
        [&](bd::Team &team) { bd::linear_norm_add(team, room, x, rows, *w, norm, eps, residual, product, out); });
  });
}

int bd_gated_mlp(bd_pool *pool, const float *x, int64_t rows, const float *norm, float eps, const bd_weight *gate_up,
                 int gate, const bd_weight *down, float *out) {
  return guarded([&] {
    need(rows >= 0, BD_E_SHAPE, "fewer rows than none.");
    if (rows == 0) return;
    need_weight(gate_up, "gate_up");
    if (down) need_weight(down, "down");
    need_floats(x, "x"), need_floats(norm, "norm"), need_floats(out, "out");
    need_gate(gate);
    need(!down || (down->inputs == bd::outputs_of(*gate_up) / 2 && bd::outputs_of(*down) == gate_up->inputs), BD_E_SHAPE,
         "a down projection of other inputs than the gate has outputs.");
    const int64_t M = bd::outputs_of(*gate_up) / 2;
    bd::Rounded room;
    float *inner = nullptr, *pair = nullptr;
    bd::take_scratch(pool->pool, [&](bd::Carver &memory) {
      const int64_t outliers = down && down->outliers > gate_up->outliers ? down->outliers : gate_up->outliers;
      room = bd::carve_rounded(memory, rows, M > gate_up->inputs ? M : gate_up->inputs, outliers);
      inner = memory.take<float>(rows * M);
      pair = memory.take<float>(bd::needs_pair(*gate_up) ? rows * 2 * M : 0);
    });
    pool->pool.run([&](bd::Team &team) {
      bd::gated_inputs(team, room, x, rows, norm, eps, *gate_up, gate, pair, down ? inner : out);
      if (down) bd::norm_linear(team, room, inner, rows, nullptr, 0, *down, nullptr, x, out);
    });
  });
}

int bd_gated_inputs(bd_pool *pool, const float *x, int64_t rows, const float *norm, float eps, const bd_weight *gate_up,
                    int gate, float *out) {
  return bd_gated_mlp(pool, x, rows, norm, eps, gate_up, gate, nullptr, out);
}

int bd_rope_append(bd_pool *pool, const float *qkv, const bd_batch *batch, const bd_attention *shape, const bd_kv *kv,
                   const float *q_norm, const float *k_norm, float *q) {
  return guarded([&] {
    need_batch(batch, shape);
    if (batch->rows == 0) return;
    need_kv(kv);
    need_floats(qkv, "qkv"), need_floats(q, "q");
    pool->pool.run([&](bd::Team &team) { bd::rope_append(team, qkv, *batch, *shape, *kv, q_norm, k_norm, q); });
  });
}

int bd_attend(bd_pool *pool, const float *q, const bd_batch *batch, const bd_attention *shape, const bd_kv *kv, float *out) {
  return guarded([&] {
    need_batch(batch, shape);
    if (batch->rows == 0) return;
    need_kv(kv);
    need_floats(q, "q"), need_floats(out, "out");
    const bd::AttentionPlan plan(*batch, *shape, pool->pool.threads());
    float *partial = (float *)pool->pool.scratch(plan.partial * sizeof(float));
    pool->pool.run([&](bd::Team &team) { bd::attend(team, plan, q, *batch, *shape, *kv, partial, out); });
  });
}

int bd_decode(bd_pool *pool, float *x, int64_t hidden_size, const bd_layer *layers, int64_t count, const bd_kv *kv,
              const bd_batch *batch, const bd_attention *kinds, int64_t kind_count) {
  return guarded([&] {
    need(kind_count > 0, BD_E_SHAPE, "no kind of attention. Expected one that layers have.");
    for (int64_t k = 0; k < kind_count; k++) {
      need_batch(batch, kinds + k);
      need(kinds[k].heads == kinds->heads && kinds[k].kv_heads == kinds->kv_heads && kinds[k].head_dim == kinds->head_dim,
           BD_E_SHAPE, "kinds of attention with other heads. Expected the same in all.");
    }
    if (batch->rows == 0) return;
    need_floats(x, "x");
    need(count > 0 && batch->row_starts[0] == 0 && batch->row_starts[batch->sequences] == batch->rows, BD_E_SHAPE,
         "no layers, or counts of rows that do not add up to the rows.");
    for (int64_t i = 0; i < count; i++) need_kv(kv + i);
    for (int64_t k = 0; k < kind_count; k++) need_places(*batch, kinds[k], *kv);
    for (int64_t i = 0; i < count; i++) {
      need_weight(&layers[i].qkv, "qkv"), need_weight(&layers[i].o, "o");
      need_weight(&layers[i].gate_up, "gate_up"), need_weight(&layers[i].down, "down");
      need_gate(layers[i].gate);
      need(layers[i].attention >= 0 && layers[i].attention < kind_count, BD_E_SHAPE,
           "a layer with a kind of attention that there is not.");
    }
    bd::decode(pool->pool, {x, hidden_size, layers, count, kv, *batch, kinds, kind_count});
  });
}

int bd_top(bd_pool *pool, const float *logits, int64_t rows, int64_t width, int64_t stride, int64_t *place, float *largest) {
  return guarded([&] {
    need_floats(logits, "logits"), need_floats(largest, "largest");
    need(place, BD_E_POINTER, "place: a null pointer. Expected a buffer.");
    need(width > 0, BD_E_SHAPE, "rows of no logits. Expected one at least.");
    auto find = [&](int64_t from, int64_t to) {
      for (int64_t r = from; r < to; r++) pool->pool.kernels().top(logits + r * stride, width, place + r, largest + r);
    };
    if (rows == 1) return find(0, 1);  // less work than waking a thread
    pool->pool.run([&](bd::Team &team) { team.share(rows, 1, find); });
  });
}

int bd_softmax(bd_pool *pool, const float *logits, int64_t rows, int64_t width, float scale, float *out) {
  return guarded([&] {
    need_floats(logits, "logits"), need_floats(out, "out");
    pool->pool.run([&](bd::Team &team) {
      team.share(rows, 1, [&](int64_t from, int64_t to) {
        for (int64_t r = from; r < to; r++) team.kernels().softmax(logits + r * width, width, scale, out + r * width);
      });
    });
  });
}

int bd_softcap(bd_pool *pool, float *logits, int64_t rows, int64_t width, float cap) {
  return guarded([&] {
    need_floats(logits, "logits");
    need(cap > 0, BD_E_SHAPE, "a cap of logits that is no positive number.");
    pool->pool.run([&](bd::Team &team) {
      team.share(rows, 1, [&](int64_t from, int64_t to) {
        for (int64_t r = from; r < to; r++) team.kernels().softcap(logits + r * width, width, cap);
      });
    });
  });
}

double bd_measure_read(bd_pool *pool, const uint8_t *buffer, int64_t bytes) {
  const int64_t piece = bytes / 64 / 256 * 256;
  const double started = seconds();
  pool->pool.run([&](bd::Team &team) {
    team.share(64, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++) {
        volatile float seen = team.kernels().read(buffer + i * piece, piece);
        (void)seen;
      }
    });
  });
  return (double)piece * 64 / (seconds() - started);
}

double bd_measure_ops(bd_pool *pool) {
  const int64_t rounds = 2000000;
  const double started = seconds();
  pool->pool.run([&](bd::Team &team) {
    volatile float seen = team.kernels().busy_float(rounds);
    (void)seen;
  });
  return (double)rounds * 6 * 16 * 2 * pool->pool.threads() / (seconds() - started);
}
}
