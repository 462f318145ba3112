// What each instruction set offers: the inner work of every operation, for one thread's share of it.
//
// The functions behind this table are compiled once for each instruction set, from the same sources (kernels/*.inl)
// over the vectors of simd/*.h. What a row of a result is never depends on which rows, panels or threads are beside it.
#pragma once
#include "bitdraft.h"
#include "layout.h"

namespace bd {

struct AttentionItem;  // attention.h
struct SplitRow;

constexpr int ROW_BLOCK = 32;  // rows whose 8-bit codes lie together

// Input rows as a weight's format rounds them. `values` [R][K padded] float, also while 8-bit codes are made; the codes
// [R / 32][K / 32][rows of the block][32], their sums by 32 and by 16 inputs [R / 32][K / 32][rows of the block](2), and
// the steps of INT8_G32, as many as the sums by 32. `outliers` [R][outlier_stride] are the inputs that are kept apart, in
// bfloat16, zeros behind them.
struct Rounded {
  int64_t rows, inputs;
  float *values, *scale;  // scale: [R], what a row of codes is to be multiplied by
  int8_t *codes;
  float *sums, *half_sums, *steps;
  float *outliers;
  int64_t outlier_stride;
};

struct Kernels {
  const char *name;
  // Rows [from, to) of x [R, K]: RMSNorm unless norm is NULL, then outliers are taken out, and rotation and rounding
  // as a weight wants them.
  void (*round_rows)(const float *x, int64_t K, const float *norm, float eps, const bd_weight &, const Rounded &, int64_t from,
                     int64_t to);
  // Panels [from, to) of out = x W^T + bias + residual; bias and residual may be NULL, residual may be out. Rows of out
  // and residual are `width` apart, which is more than the outputs for a part of a weight.
  void (*linear)(const bd_weight &, const Layout &, const Rounded &, const float *bias, const float *residual, float *out,
                 int64_t width, int64_t from, int64_t to);
  // Panels [from, to) of act(gate) * up, out [R, M]; `gate` is a bd_gate.
  void (*gated)(const bd_weight &, const Layout &, const Rounded &, int gate, float *out, int64_t from, int64_t to);
  // Rows [from, to) of act(gate) * up where gate and up stand beside each other, [R, 2 M].
  void (*gate_rows)(const float *gate_up, int64_t M, int gate, float *out, int64_t from, int64_t to);
  // Rows [from, to) of out = residual + RMSNorm(x), [R, N]; residual may be out.
  void (*add_normed)(const float *x, int64_t N, const float *norm, float eps, const float *residual, float *out, int64_t from,
                     int64_t to);
  void (*unpack_row)(const bd_weight &, const Layout &, int64_t row, float *out);
  // Rows [from, to): rotate q and k, write k and v to the cache.
  void (*rope_rows)(const float *qkv, const bd_batch &, const bd_attention &, const bd_kv &, const float *q_norm,
                    const float *k_norm, float *q_out, int64_t from, int64_t to);
  // Work items [from, to) of an attention call: see attention.h.
  void (*attend)(const float *q, const bd_batch &, const bd_attention &, const bd_kv &, const AttentionItem *, float *partial,
                 float *out, int64_t from, int64_t to);
  // Queries [from, to) of split rows, query i being head i % H of rows[i / H].
  void (*merge)(const bd_attention &, const SplitRow *rows, const float *partial, float *out, int64_t from, int64_t to);
  // The largest logit, NaN if any is, and the first place where it is.
  void (*top)(const float *logits, int64_t width, int64_t *place, float *largest);
  void (*softmax)(const float *logits, int64_t width, float scale, float *out);
  void (*softcap)(float *logits, int64_t width, float cap);
  float (*read)(const uint8_t *buffer, int64_t bytes);
  float (*busy_float)(int64_t rounds);  // 6 * 16 multiply-adds a round
};

extern const Kernels SCALAR;
#ifdef BD_WITH_AVX2
extern const Kernels AVX2;
#endif
#ifdef BD_WITH_AVX512
extern const Kernels AVX512;
#endif

}  // namespace bd
