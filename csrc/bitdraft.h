/* The C interface of bitdraft's native kernels: plain structs, plain pointers, no allocation handed out.
 *
 * Every function that can fail returns 0, or a BD_E code; bd_error() then says what was given and what was expected.
 * Nothing here keeps a pointer past the call that it was given to, but for the weights inside a bd_layer.
 *
 * Shape suffixes: R rows (tokens of all sequences of a call), S sequences, D hidden size, N outputs, K inputs, H query
 * heads, J KV heads, C head dimension, M inner size of the MLP, V vocabulary, G groups along K.
 */
#ifndef BITDRAFT_H
#define BITDRAFT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BD_ABI 4
#if defined(_WIN32)
#define BD_API __declspec(dllexport)
#else
#define BD_API __attribute__((visibility("default")))
#endif

enum { BD_OK = 0, BD_E_SHAPE = 1, BD_E_POINTER = 2, BD_E_MEMORY = 3, BD_E_ISA = 4 };

/* How a weight's codes are stored. FP4: E2M1 floats, sign, two bits of exponent, one of fraction; u is twice the value. */
enum bd_codec { BD_F32, BD_BF16, BD_E4M3, BD_E5M2, BD_INT2, BD_INT3, BD_INT4, BD_INT5, BD_INT6, BD_INT8, BD_FP4, BD_CODECS };

/* What stands beside the codes along K; with code u, value = scale * u + offset.
 *   NONE  nothing: value = u (times the output's own scale, if there is one)
 *   SYM   float16 scale a group; offset = -scale * 2^(bits - 1), 0 for INT8 and FP4
 *   ASYM  float16 scale and uint8 zero point a group; offset = -scale * zero
 *   MIN   float16 scale and float16 offset a group                       (ggml's Q4_1, Q5_1)
 *   K     float16 d and m for 256 inputs, 6-bit s and t for 32: scale = d * s, offset = -m * t   (Q4_K, Q5_K)
 *   K16   float16 d for 256 inputs, int8 s for 16: scale = d * s, offset = -32 * scale           (Q6_K)
 *   SYM16 as SYM with a scale for each 16 inputs, FP4 only
 */
enum bd_grid { BD_GRID_NONE, BD_GRID_SYM, BD_GRID_ASYM, BD_GRID_MIN, BD_GRID_K, BD_GRID_K16, BD_GRID_SYM16, BD_GRIDS };

/* How an operation rounds its input rows before it multiplies. */
// INT8 has a scale for each row, INT8_G32 one for every 32 inputs of it.
enum bd_activation { BD_ACT_F32, BD_ACT_BF16, BD_ACT_INT8, BD_ACT_E4M3, BD_ACT_E5M2, BD_ACT_INT8_G32, BD_ACTIVATIONS };

/* What the gate of an MLP goes through: x sigmoid(x), or GELU in its tanh form. */
enum bd_gate { BD_GATE_SILU, BD_GATE_GELU_TANH, BD_GATES };

enum bd_kv_dtype { BD_KV_F32, BD_KV_BF16, BD_KV_INT8, BD_KV_E4M3 };

/* A weight [N, K] in panels of 16 outputs, as bd_pack lays it out (layout.h). A fused weight whose rows are stored in
 * several ways is a chain of up to BD_PARTS such parts, which read the same rounded inputs: the outputs of `next` follow.
 * A few inputs may be kept apart: they are 0 to the codes, and so when a row's scale is found, and meet `side` in bfloat16. */
enum { BD_PARTS = 3 };
typedef struct bd_weight {
  int32_t codec, grid, activation, group; /* group: inputs that share a scale, 0 where the grid has none */
  int32_t rotation; /* blocks of inputs that a Hadamard matrix mixes before they are rounded: 32, 64 or 128; 0 for none */
  int32_t outliers; /* inputs that are kept apart, in all parts alike; 0 for none */
  int64_t outputs, inputs;                /* outputs: of this part alone */
  const uint8_t *panels; /* 64-byte aligned, bd_weight_bytes() long */
  const float *channel;  /* a scale for each output, [N padded to 16], or NULL */
  const int32_t *columns; /* [outliers] which inputs are kept apart, ascending; those of the first part count */
  const struct bd_weight *side; /* [N, outliers] in BF16, or NULL */
  const struct bd_weight *next;
} bd_weight;

/* A ragged batch: see bitdraft.ops.Ragged. */
typedef struct {
  int64_t rows, sequences;
  const int64_t *positions;  /* [R] */
  const int64_t *slots;      /* [R] */
  const int64_t *row_starts; /* [S + 1] first row of each sequence */
  const int64_t *blocks;     /* block tables, one after the other */
  const int64_t *table_starts; /* [S + 1] first entry of each sequence's table */
  const int64_t *lengths;    /* [S] tokens in the KV after this call */
} bd_batch;

/* Blocks in codes with scales that tokens share: value = least + step * code, but for the outliers. A row at position i
 * reads tokens below (i - window) / 16 * 16 from here, the others from their full copy: bitdraft.ops.CodedBlocks. */
typedef struct {
  int32_t bits;          /* of a code: 8 or 4; 4: the low nibble is channel c, the high one channel c + C / 2 */
  int32_t outliers;      /* of a block and head, of its keys and of its values each */
  int64_t window, blocks;
  const int64_t *copies; /* [blocks] where a block's full copy lies in the layer's keys and values, or negative */
  const uint8_t *keys, *values;                  /* [blocks, J, C bits / 8, 16] and [blocks, J, 16, C bits / 8] */
  const uint16_t *key_grid, *value_grid;         /* bfloat16 steps, then least values: [blocks, J, 2, C], [blocks, J, 2, 16] */
  const uint16_t *key_outliers, *value_outliers; /* [blocks, J, outliers, 2]: place in the block's numbers, bfloat16 */
} bd_coded;

/* One layer's KV: keys [blocks, J, C, 16], values [blocks, J, 16, C]. INT8 has a float32 scale per token and head,
 * [blocks, J, 16]; E4M3 one per head, [J]. With `coded`, these are full copies of some of its blocks, in BF16. */
typedef struct {
  int32_t dtype;
  int64_t blocks;
  void *keys, *values;
  float *key_scales, *value_scales;
  const bd_coded *coded; /* or NULL */
} bd_kv;

typedef struct {
  int64_t heads, kv_heads, head_dim;
  int64_t window;          /* positions that a row sees, itself included; 0 for all */
  int64_t rotary_positions;
  const float *cos, *sin;  /* [positions, rotated / 2] */
  float eps;
  float scale;             /* what scores are multiplied by; 0 for 1 / sqrt(C) */
  int64_t rotated;         /* channels that turn, the first of each head; 0 for all C */
} bd_attention;

typedef struct {
  const float *input_norm, *mlp_norm;
  const float *qkv_bias, *q_norm, *k_norm; /* NULL where the family has none */
  const float *o_norm, *down_norm; /* of what o and down make, before it is added to x; NULL for none */
  int32_t gate;      /* BD_GATE_SILU, ... */
  int32_t attention; /* which of the call's bd_attention is this layer's */
  bd_weight qkv, o, gate_up, down;
} bd_layer;

typedef struct bd_pool bd_pool;

/* Library and machine. */
BD_API int bd_abi(void);
BD_API const char *bd_error(void);                 /* of the calling thread's last failure */
BD_API const char *bd_isas(void);                  /* what this library was built with and this machine runs, "scalar avx2" */

/* Threads that run the kernels of one instruction set: scalar, avx2, avx512, or NULL for the best that this machine runs.
 * A pool serves one caller at a time, with fewer threads than asked where the system grants no more: bd_pool_threads says
 * how many. NULL if the machine does not run the instruction set. */
BD_API bd_pool *bd_pool_new(const char *isa, int threads);
BD_API void bd_pool_free(bd_pool *);
BD_API int bd_pool_threads(const bd_pool *);
BD_API const char *bd_pool_isa(const bd_pool *);

/* Weights, part by part. codes, scales, zeros as bitdraft.ops.packed.Packed holds them. bd_pack_gguf: the blocks of a
 * GGUF tensor, row by row, code by code and scale by scale; ggml_type is ggml's number. A table of rows has one part. */
BD_API int64_t bd_weight_bytes(int codec, int grid, int group, int64_t outputs, int64_t inputs);
BD_API int bd_pack(bd_pool *, bd_weight *weight, uint8_t *panels, const void *codes, const float *scales_NG,
                   const uint8_t *zeros_NG);
BD_API int bd_gguf_form(int ggml_type, bd_weight *weight); /* codec, grid and group for its number of inputs */
BD_API int bd_pack_gguf(bd_pool *, bd_weight *weight, uint8_t *panels, int ggml_type, const uint8_t *blocks);
BD_API int bd_unpack_rows(bd_pool *, const bd_weight *weight, const int64_t *rows, int64_t count, float *out_RK);

/* Operations: see bitdraft.ops for what each means. */
BD_API int bd_norm_linear(bd_pool *, const float *x_RD, int64_t rows, const float *norm_D, float eps,
                          const bd_weight *, const float *bias_N, float *out_RN);
BD_API int bd_linear_add(bd_pool *, const float *x_RK, int64_t rows, const bd_weight *, const float *residual_RN,
                         float *out_RN);
BD_API int bd_linear_norm_add(bd_pool *, const float *x_RK, int64_t rows, const bd_weight *, const float *norm_N,
                              float eps, const float *residual_RN, float *out_RN); /* residual + norm(x W^T) */
BD_API int bd_gated_inputs(bd_pool *, const float *x_RD, int64_t rows, const float *norm_D, float eps,
                           const bd_weight *gate_up, int gate, float *out_RM);
BD_API int bd_gated_mlp(bd_pool *, const float *x_RD, int64_t rows, const float *norm_D, float eps,
                        const bd_weight *gate_up, int gate, const bd_weight *down, float *out_RD);
BD_API int bd_rope_append(bd_pool *, const float *qkv_RN, const bd_batch *, const bd_attention *, const bd_kv *,
                          const float *q_norm_C, const float *k_norm_C, float *q_RHC);
BD_API int bd_attend(bd_pool *, const float *q_RHC, const bd_batch *, const bd_attention *, const bd_kv *,
                     float *out_RN);
BD_API int bd_decode(bd_pool *, float *x_RD, int64_t hidden_size, const bd_layer *, int64_t layers, const bd_kv *,
                     const bd_batch *, const bd_attention *kinds, int64_t count); /* all layers, x in place; the kinds
                     differ in window, angles and scale alone */
BD_API int bd_softcap(bd_pool *, float *logits_RV, int64_t rows, int64_t width, float cap); /* cap tanh(x / cap) */
/* The largest of each row, NaN if any of it is, and the first place where it is; `stride` floats lie between rows. */
BD_API int bd_top(bd_pool *, const float *logits_RV, int64_t rows, int64_t width, int64_t stride, int64_t *place_R,
                  float *largest_R);
BD_API int bd_softmax(bd_pool *, const float *logits_RV, int64_t rows, int64_t width, float scale, float *out_RV);

/* The machine's own limits, measured: bytes read or operations done in a second by all threads of the pool. */
BD_API double bd_measure_read(bd_pool *, const uint8_t *buffer, int64_t bytes);
BD_API double bd_measure_ops(bd_pool *); /* FP32 multiply-adds, two operations each */

#ifdef __cplusplus
}
#endif
#endif
