// The operations: each one job of the pool, or a stretch of a job that runs several (decode).
#pragma once
#include "attention.h"
#include "kernels.h"
#include "pool.h"

namespace bd {

// The kernels of an instruction set by name, or the best that this machine runs for an empty one; NULL if it runs none such.
const Kernels *find_kernels(const char *isa);

void pack(Pool &, const bd_weight &, uint8_t *panels, const uint8_t *codes, const float *scales, const uint8_t *zeros);
// What a tensor type of GGUF, by ggml's number, is called here; false if it is not read or does not fit the inputs.
bool gguf_form(int type, int64_t inputs, int &codec, int &grid, int &group);
void pack_gguf(Pool &, const bd_weight &, uint8_t *panels, int type, const uint8_t *blocks);
// Put the codes of one output, a byte each, into its lane of a zeroed panel.
void place_codes(uint8_t *panel, const Layout &, int codec, int lane, int64_t K, const uint8_t *codes);

// Memory for one call, cut from the pool's scratch: take() in any order, then the sum of all is what bytes() says.
class Carver {
 public:
  explicit Carver(uint8_t *base) : base_(base) {}
  template <class T> T *take(int64_t count) {
    uint8_t *at = base_ ? base_ + used_ : nullptr;
    used_ += round_up(count * (int64_t)sizeof(T), 64);
    return reinterpret_cast<T *>(at);
  }
  int64_t bytes() const { return used_; }

 private:
  uint8_t *base_;
  int64_t used_ = 0;
};

// Run `carve` twice, to count and then to cut: it takes what a call needs for intermediate values from the pool's scratch.
template <class Carve> void take_scratch(Pool &pool, Carve carve) {
  Carver count(nullptr);
  carve(count);
  Carver memory((uint8_t *)pool.scratch(count.bytes()));
  carve(memory);
}

// Room for `rows` rounded rows of up to K inputs, `outliers` of them kept apart at most.
Rounded carve_rounded(Carver &, int64_t rows, int64_t K, int64_t outliers);

void norm_linear(Team &, const Rounded &, const float *x, int64_t rows, const float *norm, float eps, const bd_weight &,
                 const float *bias, const float *residual, float *out);
// Whether gate and up have to stand beside each other before they meet: they lie in different panels otherwise, or are
// stored in different ways.
bool needs_pair(const bd_weight &gate_up);
// act(gate) * up of the normalised rows; gate_up_rows [R, 2 M] is used where the above holds.
void gated_inputs(Team &, const Rounded &, const float *x, int64_t rows, const float *norm, float eps, const bd_weight &,
                  int gate, float *gate_up_rows, float *out);
// residual + RMSNorm(x W^T); product [R, N] is used on the way, residual may be out.
void linear_norm_add(Team &, const Rounded &, const float *x, int64_t rows, const bd_weight &, const float *norm, float eps,
                     const float *residual, float *product, float *out);

void rope_append(Team &, const float *qkv, const bd_batch &, const bd_attention &, const bd_kv &, const float *q_norm,
                 const float *k_norm, float *q);
// partial: plan.partial floats.
void attend(Team &, const AttentionPlan &, const float *q, const bd_batch &, const bd_attention &, const bd_kv &,
            float *partial, float *out);

struct Decode {  // all layers of a model on one batch
  float *x;
  int64_t hidden_size;
  const bd_layer *layers;
  int64_t count;
  const bd_kv *kv;
  const bd_batch &batch;
  const bd_attention *kinds;  // the layers' bd_attention
  int64_t kind_count;
};
void decode(Pool &, const Decode &);

}  // namespace bd
