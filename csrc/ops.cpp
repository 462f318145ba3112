#include "ops.h"

#include <vector>

namespace bd {

Rounded carve_rounded(Carver &memory, int64_t rows, int64_t K, int64_t outliers) {
  Rounded r;
  r.rows = rows;
  r.inputs = round_up(K, GROUP);
  r.values = memory.take<float>(rows * r.inputs);
  r.scale = memory.take<float>(rows);
  r.codes = memory.take<int8_t>(rows * r.inputs);
  r.sums = memory.take<float>(rows * r.inputs / 32);
  r.half_sums = memory.take<float>(rows * r.inputs / 16);
  r.steps = memory.take<float>(rows * r.inputs / 32);
  r.outlier_stride = round_up(outliers, PANEL);
  r.outliers = memory.take<float>(rows * r.outlier_stride);
  return r;
}

namespace {

// A thread's share of `count` panels at a time: small enough that a thread that was held up does not hold up the others.
int64_t panel_chunk(int64_t count, int threads) {
  const int64_t chunk = count / (threads * 8);
  return chunk < 1 ? 1 : chunk;
}

Rounded round_inputs(Team &team, Rounded room, const float *x, int64_t rows, const float *norm, float eps,
                     const bd_weight &w) {
  const int64_t K = w.inputs;
  room.rows = rows;
  room.inputs = round_up(K, GROUP);
  room.outlier_stride = round_up(w.outliers, PANEL);
  team.share(rows, 1, [&](int64_t from, int64_t to) { team.kernels().round_rows(x, K, norm, eps, w, room, from, to); });
  return room;
}

// The panels of all parts, one after the other, are shared out as one loop.
void multiply(Team &team, const Rounded &rounded, const bd_weight &w, const float *bias, const float *residual, float *out) {
  int64_t panels = 0;
  for (const bd_weight *part = &w; part; part = part->next) panels += Layout(*part).panels;
  const int64_t width = outputs_of(w);
  team.share(panels, panel_chunk(panels, team.pool.threads()), [&](int64_t from, int64_t to) {
    int64_t column = 0;
    for (const bd_weight *part = &w; part && to > 0; part = part->next) {
      const Layout l(*part);
      const int64_t end = to < l.panels ? to : l.panels;
      if (from < end)
        team.kernels().linear(*part, l, rounded, bias ? bias + column : nullptr, residual ? residual + column : nullptr,
                              out + column, width, from, end);
      column += part->outputs;
      from = from > l.panels ? from - l.panels : 0;
      to -= l.panels;
    }
  });
}

}  // namespace

void norm_linear(Team &team, const Rounded &room, const float *x, int64_t rows, const float *norm, float eps,
                 const bd_weight &w, const float *bias, const float *residual, float *out) {
  const Rounded rounded = round_inputs(team, room, x, rows, norm, eps, w);
  multiply(team, rounded, w, bias, residual, out);
}

bool needs_pair(const bd_weight &gate_up) { return gate_up.next || gate_up.outputs / 2 % PANEL; }

void gated_inputs(Team &team, const Rounded &room, const float *x, int64_t rows, const float *norm, float eps,
                  const bd_weight &w, int gate, float *gate_up_rows, float *out) {
  const Rounded rounded = round_inputs(team, room, x, rows, norm, eps, w);
  const int64_t M = outputs_of(w) / 2;
  if (!needs_pair(w)) {
    const Layout l(w);
    team.share(M / PANEL, panel_chunk(M / PANEL, team.pool.threads()),
               [&](int64_t from, int64_t to) { team.kernels().gated(w, l, rounded, gate, out, from, to); });
  } else {
    multiply(team, rounded, w, nullptr, nullptr, gate_up_rows);
    team.share(rows, 1, [&](int64_t from, int64_t to) { team.kernels().gate_rows(gate_up_rows, M, gate, out, from, to); });
  }
}

void linear_norm_add(Team &team, const Rounded &room, const float *x, int64_t rows, const bd_weight &w, const float *norm,
                     float eps, const float *residual, float *product, float *out) {
  const Rounded rounded = round_inputs(team, room, x, rows, nullptr, 0, w);
  multiply(team, rounded, w, nullptr, nullptr, product);
  team.share(rows, 1, [&](int64_t from, int64_t to) {
    team.kernels().add_normed(product, outputs_of(w), norm, eps, residual, out, from, to);
  });
}

void rope_append(Team &team, const float *qkv, const bd_batch &batch, const bd_attention &shape, const bd_kv &kv,
                 const float *q_norm, const float *k_norm, float *q) {
  team.share(batch.rows, 8, [&](int64_t from, int64_t to) {  // neighbours in the cache share lines
    team.kernels().rope_rows(qkv, batch, shape, kv, q_norm, k_norm, q, from, to);
  });
}

void attend(Team &team, const AttentionPlan &plan, const float *q, const bd_batch &batch, const bd_attention &shape,
            const bd_kv &kv, float *partial, float *out) {
  team.share((int64_t)plan.items.size(), 1, [&](int64_t from, int64_t to) {
    team.kernels().attend(q, batch, shape, kv, plan.items.data(), partial, out, from, to);
  });
  if (plan.splits.empty()) return;
  team.share((int64_t)plan.splits.size() * shape.heads, 4, [&](int64_t from, int64_t to) {
    team.kernels().merge(shape, plan.splits.data(), partial, out, from, to);
  });
}

void decode(Pool &pool, const Decode &d) {
  const bd_attention &heads = d.kinds[0];  // as many, and as large, in all kinds
  const int64_t rows = d.batch.rows, D = d.hidden_size, width = heads.heads * heads.head_dim;
  const int64_t qkv_width = width + 2 * heads.kv_heads * heads.head_dim;
  int64_t inner = 0, paired = 0, projected = 0, widest = D > width ? D : width, partials = 0, outliers = 0;
  for (int64_t i = 0; i < d.count; i++) {
    const bd_layer &layer = d.layers[i];
    const int64_t M = outputs_of(layer.gate_up) / 2;
    inner = M > inner ? M : inner;
    if (needs_pair(layer.gate_up) && M > paired) paired = M;
    if (layer.o_norm || layer.down_norm) projected = D;
    for (const bd_weight *w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
      outliers = w->outliers > outliers ? w->outliers : outliers;
  }
  widest = inner > widest ? inner : widest;
  std::vector<AttentionPlan> plans;
  for (int64_t k = 0; k < d.kind_count; k++) {
    plans.emplace_back(d.batch, d.kinds[k], pool.threads());
    partials = plans.back().partial > partials ? plans.back().partial : partials;
  }
  Rounded room;
  float *qkv, *q, *mixed, *partial, *gate, *pair, *product;
  take_scratch(pool, [&](Carver &memory) {
    room = carve_rounded(memory, rows, widest, outliers);
    qkv = memory.take<float>(rows * qkv_width);
    q = memory.take<float>(rows * width);
    mixed = memory.take<float>(rows * width);
    partial = memory.take<float>(partials);
    gate = memory.take<float>(rows * inner);
    pair = memory.take<float>(rows * 2 * paired);
    product = memory.take<float>(rows * projected);
  });
  const float eps = heads.eps;
  pool.run([&](Team &team) {
    const auto add = [&](const float *inputs, const bd_weight &w, const float *norm) {  // to x, what w makes of the inputs
      if (norm) linear_norm_add(team, room, inputs, rows, w, norm, eps, d.x, product, d.x);
      else norm_linear(team, room, inputs, rows, nullptr, 0, w, nullptr, d.x, d.x);
    };
    for (int64_t i = 0; i < d.count; i++) {
      const bd_layer &layer = d.layers[i];
      const bd_attention &kind = d.kinds[layer.attention];
      const bd_kv &kv = d.kv[i];
      norm_linear(team, room, d.x, rows, layer.input_norm, eps, layer.qkv, layer.qkv_bias, nullptr, qkv);
      rope_append(team, qkv, d.batch, kind, kv, layer.q_norm, layer.k_norm, q);
      attend(team, plans[(size_t)layer.attention], q, d.batch, kind, kv, partial, mixed);
      add(mixed, layer.o, layer.o_norm);
      gated_inputs(team, room, d.x, rows, layer.mlp_norm, eps, layer.gate_up, layer.gate, pair, gate);
      add(gate, layer.down, layer.down_norm);
    }
  });
}

}  // namespace bd
