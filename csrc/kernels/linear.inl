// Low-bit products: a panel of 16 outputs with a block of rows. Every output of every row is one chain of additions along
// K, a lane of its own: the same whatever rows and panels are beside it.
namespace {

using bd::Layout;

constexpr int FEW = 12;           // rows of float inputs up to which a panel is better read again than decoded
constexpr int FLOAT_ROWS = 126;   // rows that share one decoding: tiles of six; a stretch of their inputs is 126 KB
constexpr int FLOAT_PANELS = 8;   // panels that share such a stretch while it is in the second-level cache
constexpr int DECODED = 256;      // inputs of a panel that are decoded at a time: 16 KB, half of a small L1 cache
constexpr int AHEAD = 3072;       // bytes: how far ahead of the codes memory is asked for

/// Whether there is a scale for each 16 inputs.
constexpr bool halved(int grid) { return grid == BD_GRID_K16 || grid == BD_GRID_SYM16; }

/// Scale and offset of a panel's group of 32 inputs, `half` 0 or 1 where there is one for 16.
template <int GRID> struct Grid {
  const uint8_t *panel;
  int64_t zeros_at;
  uint64_t inverse;  // 2^32 over the groups of 32 inputs that share a scale, rounded up: no division in the inner loop
  float center;      // the code that stands for 0 in SYM and SYM16

  Grid(const bd_weight &w, const Layout &l, const uint8_t *at)
      : panel(at), zeros_at(l.zeros_at), inverse(inverse_of(w.group > 32 ? w.group / 32 : 1)),
        center(w.codec == BD_INT8 ? 0.0f : w.codec == BD_FP4 ? 12.0f : (float)(1 << (bd::codec_bits(w.codec) - 1))) {}

  /// Exact for groups below 2^32 / per: need_grid refuses what has more.
  static uint64_t inverse_of(int64_t per) { return ((uint64_t(1) << 32) + (uint64_t)per - 1) / (uint64_t)per; }

  inline void at(int64_t group, int half, Vec &scale, Vec &offset) const {
    const int64_t g = (int64_t)((uint64_t)group * inverse >> 32);
    if constexpr (GRID == BD_GRID_NONE) {
      scale = vec_set(1.0f);
      offset = vec_zero();
    } else if constexpr (GRID == BD_GRID_SYM) {
      scale = half_load((const uint16_t *)(panel + g * 32));
      offset = vec_mul(scale, vec_set(-center));
    } else if constexpr (GRID == BD_GRID_SYM16) {
      scale = half_load((const uint16_t *)(panel + (group * 2 + half) * 32));
      offset = vec_mul(scale, vec_set(-center));
    } else if constexpr (GRID == BD_GRID_ASYM) {
      scale = half_load((const uint16_t *)(panel + g * 32));
      const Vec zero = int_to_vec(u8_load(panel + zeros_at + g * 16));
      offset = vec_sub(vec_zero(), vec_mul(scale, zero));
    } else if constexpr (GRID == BD_GRID_MIN) {
      scale = half_load((const uint16_t *)(panel + g * 64));
      offset = half_load((const uint16_t *)(panel + g * 64 + 32));
    } else if constexpr (GRID == BD_GRID_K) {
      const uint8_t *block = panel + group / 8 * 320, *small = block + 64 + group % 8 * 32;
      scale = vec_mul(half_load((const uint16_t *)block), int_to_vec(u8_load(small)));
      offset = vec_sub(vec_zero(), vec_mul(half_load((const uint16_t *)(block + 32)), int_to_vec(u8_load(small + 16))));
    } else {
      const uint8_t *block = panel + group / 8 * 288;
      const int8_t *small = (const int8_t *)block + 32 + (group % 8 * 2 + half) * 16;
      scale = vec_mul(half_load((const uint16_t *)block), int_to_vec(s8_load(small)));
      offset = vec_mul(scale, vec_set(-32.0f));
    }
  }
};

/// 8-bit inputs: acc[row] += codes of the panel times codes of the rows, for a block of `rows` rows; STEPS: each group of
/// a row's inputs has a scale of its own.
template <int BITS, int GRID, bool STEPS, int ROWS>
inline void int_groups(const bd_weight &w, const Layout &l, const uint8_t *panel, int64_t groups, int count, const int8_t *q,
                       const float *sums, const float *half_sums, const float *steps, Vec *acc) {
  const int rows = ROWS ? ROWS : count;
  const Grid<GRID> grid(w, l, panel);
  const uint8_t *codes = panel + l.codes_at;
  constexpr int bytes = 64 * width_of(BITS);
  Vec scale, offset;
  for (int64_t g = 0; g < groups; g++, codes += bytes) {
#pragma GCC unroll 8
    for (int line = 0; line < bytes; line += 64) prefetch(codes + AHEAD + line);
    grid.at(g, 0, scale, offset);
    if constexpr (halved(GRID)) {
      float both[2][bd::ROW_BLOCK];
      for (int m = 0; m < rows; m++)
        for (int half = 0; half < 2; half++) both[half][m] = half_sums[(g * rows + m) * 2 + half];
      group_dot<BITS, STEPS, 0, 4>(codes, rows, q + g * rows * 32, both[0], steps + g * rows, scale, offset, acc);
      grid.at(g, 1, scale, offset);
      group_dot<BITS, STEPS, 4, 8>(codes, rows, q + g * rows * 32, both[1], steps + g * rows, scale, offset, acc);
    } else {
      group_dot<BITS, STEPS>(codes, rows, q + g * rows * 32, sums + g * rows, steps + g * rows, scale, offset, acc);
    }
  }
}

template <int BITS, int GRID, bool STEPS>
void int_panel(const bd_weight &w, const Layout &l, const uint8_t *panel, const Rounded &x, int64_t row, int rows, Vec *acc) {
  const int64_t groups = x.inputs / 32, at = row * groups;
  const int8_t *q = x.codes + at * 32;
  const float *sums = x.sums + at, *halves = x.half_sums + at * 2, *steps = x.steps + at;
  if (rows == 1) {  // a copy that keeps its accumulator in registers
    Vec one = acc[0];
    int_groups<BITS, GRID, STEPS, 1>(w, l, panel, groups, 1, q, sums, halves, steps, &one);
    acc[0] = one;
    return;
  }
  int_groups<BITS, GRID, STEPS, 0>(w, l, panel, groups, rows, q, sums, halves, steps, acc);
}

// Float inputs. A source gives the values of a panel for an even input and for the odd one after it.

struct Decoded {
  const float *values;  // [inputs][16]
  inline Vec even(int64_t k) const { return vec_load(values + k * 16); }
  inline Vec odd(int64_t k) const { return vec_load(values + k * 16 + 16); }
};

struct Bfloat {
  const uint16_t *values;  // [inputs / 2][16][2]
  inline Vec even(int64_t k) const {
    prefetch((const uint8_t *)(values + k * 16) + AHEAD);
    return bf16_low(int_load(values + k * 16));
  }
  inline Vec odd(int64_t k) const { return bf16_high(int_load(values + k * 16)); }
};

template <int CODEC> struct Float8 {
  const uint8_t *values;  // [inputs][16]; E4M3 comes out 2^-8 times too small, see `products`
  inline Vec even(int64_t k) const {
    prefetch(values + k * 16 + AHEAD);
    return CODEC == BD_E4M3 ? e4m3_load(values + k * 16) : e5m2_load(values + k * 16);
  }
  inline Vec odd(int64_t k) const {
    return CODEC == BD_E4M3 ? e4m3_load(values + k * 16 + 16) : e5m2_load(values + k * 16 + 16);
  }
};

template <class Source> inline Source source(const uint8_t *codes) {
  return {reinterpret_cast<decltype(Source::values)>(codes)};
}

template <int ROWS, class Source>
inline void multiply(const Source &w, int64_t inputs, const float *x, int64_t stride, Vec *acc) {
  Vec sum[ROWS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++) sum[m] = acc[m];
  for (int64_t k = 0; k < inputs; k += 2) {
    const Vec a = w.even(k);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) sum[m] = vec_fma(a, vec_set(x[m * stride + k]), sum[m]);
    const Vec b = w.odd(k);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) sum[m] = vec_fma(b, vec_set(x[m * stride + k + 1]), sum[m]);
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++) acc[m] = sum[m];
}

template <class Source>
inline void multiply_rows(const Source &w, int64_t inputs, const float *x, int64_t stride, int rows, Vec *acc) {
  for (; rows > 6; rows -= 6, x += 6 * stride, acc += 6) multiply<6>(w, inputs, x, stride, acc);
  switch (rows) {
    case 1: return multiply<1>(w, inputs, x, stride, acc);
    case 2: return multiply<2>(w, inputs, x, stride, acc);
    case 3: return multiply<3>(w, inputs, x, stride, acc);
    case 4: return multiply<4>(w, inputs, x, stride, acc);
    case 5: return multiply<5>(w, inputs, x, stride, acc);
    case 6: return multiply<6>(w, inputs, x, stride, acc);
  }
}

template <class Source>
void decode_floats(const bd_weight &, const Layout &l, const uint8_t *panel, int64_t k, int64_t inputs, float *out) {
  const Source w = source<Source>(panel + l.codes_at);
  for (int64_t i = 0; i < inputs; i += 2) {
    vec_store(out + i * 16, w.even(k + i));
    vec_store(out + i * 16 + 16, w.odd(k + i));
  }
}

template <int BITS, int GRID>
void decode_groups(const bd_weight &w, const Layout &l, const uint8_t *panel, int64_t k, int64_t inputs, float *out) {
  const Grid<GRID> grid(w, l, panel);
  for (int64_t g = k / 32; g < (k + inputs) / 32; g++) {
    const uint8_t *at = panel + l.codes_at + g * l.group_bytes;
    for (int line = 0; line < 64 * width_of(BITS); line += 64) prefetch(at + AHEAD + line);
    const Codes<BITS> codes(at);
    Vec scale, offset;
    grid.at(g, 0, scale, offset);
    for (int quad = 0; quad < 8; quad++, out += 64) {
      if (halved(GRID) && quad == 4) grid.at(g, 1, scale, offset);
      vec_store(out, vec_fma(int_to_vec(codes.template input<0>(quad)), scale, offset));
      vec_store(out + 16, vec_fma(int_to_vec(codes.template input<1>(quad)), scale, offset));
      vec_store(out + 32, vec_fma(int_to_vec(codes.template input<2>(quad)), scale, offset));
      vec_store(out + 48, vec_fma(int_to_vec(codes.template input<3>(quad)), scale, offset));
    }
  }
}

using Panel = void (*)(const bd_weight &, const Layout &, const uint8_t *panel, const Rounded &, int64_t row, int rows, Vec *);
using Decode = void (*)(const bd_weight &, const Layout &, const uint8_t *panel, int64_t k, int64_t inputs, float *out);

/// A few rows: the inner loop reads the panel itself.
template <class Source>
void few_rows(const bd_weight &, const Layout &l, const uint8_t *panel, const Rounded &x, int64_t row, int rows, Vec *acc) {
  multiply_rows(source<Source>(panel + l.codes_at), x.inputs, x.values + row * x.inputs, x.inputs, rows, acc);
}

/// What there is for a format. integer, stepped: for 8-bit inputs with a scale for each row, or for each 32 inputs of it;
/// few: for up to FEW rows of float inputs, or none; decode.
struct Form {
  Panel integer, stepped, few;
  Decode decode;
};
template <class Source> constexpr Form floats() { return {nullptr, nullptr, few_rows<Source>, decode_floats<Source>}; }
template <int BITS, int GRID> constexpr Form integers() {
  return {int_panel<BITS, GRID, false>, int_panel<BITS, GRID, true>, nullptr, decode_groups<BITS, GRID>};
}

Form form_of(const bd_weight &w) {
  switch (w.codec * (int)BD_GRIDS + w.grid) {
#define BD_FLOATS(CODEC, SOURCE) \
  case BD_##CODEC * (int)BD_GRIDS + (int)BD_GRID_NONE: return floats<SOURCE>();
#define BD_INTEGERS(BITS, GRID) \
  case BD_INT##BITS * (int)BD_GRIDS + (int)BD_GRID_##GRID: return integers<BITS, BD_GRID_##GRID>();
    BD_FLOATS(F32, Decoded) BD_FLOATS(BF16, Bfloat) BD_FLOATS(E4M3, Float8<BD_E4M3>) BD_FLOATS(E5M2, Float8<BD_E5M2>)
    BD_INTEGERS(2, SYM) BD_INTEGERS(2, ASYM) BD_INTEGERS(3, SYM) BD_INTEGERS(3, ASYM)
    BD_INTEGERS(4, SYM) BD_INTEGERS(4, ASYM) BD_INTEGERS(4, MIN) BD_INTEGERS(4, K)
    BD_INTEGERS(5, SYM) BD_INTEGERS(5, MIN) BD_INTEGERS(5, K)
    BD_INTEGERS(6, SYM) BD_INTEGERS(6, ASYM) BD_INTEGERS(6, K16)
    BD_INTEGERS(8, NONE) BD_INTEGERS(8, SYM)
    case BD_FP4 * (int)BD_GRIDS + (int)BD_GRID_SYM: return integers<FP4, BD_GRID_SYM>();
    case BD_FP4 * (int)BD_GRIDS + (int)BD_GRID_SYM16: return integers<FP4, BD_GRID_SYM16>();
#undef BD_FLOATS
#undef BD_INTEGERS
  }
  return {nullptr, nullptr, nullptr, nullptr};
}

/// Many rows: each stretch of inputs of a panel is decoded once for all rows, and is taken for several panels in turn, so
/// that the rows' inputs stay in the second-level cache for them.
void many_rows(Decode decode, const bd_weight &w, const Layout &l, int64_t p, int panels, const Rounded &x, int64_t row,
               int rows, Vec *acc) {
  alignas(64) float decoded[DECODED * 16];
  for (int64_t k = 0; k < x.inputs; k += DECODED) {
    const int64_t inputs = x.inputs - k < DECODED ? x.inputs - k : DECODED;
    for (int i = 0; i < panels; i++) {
      decode(w, l, w.panels + (p + i) * l.panel_bytes, k, inputs, decoded);
      multiply_rows(Decoded{decoded}, inputs, x.values + row * x.inputs + k, x.inputs, rows, acc + i * rows);
    }
  }
}

/// Adds what the inputs that are kept apart make with their own weights: a sum of its own for each output, added last.
inline void add_outliers(const bd_weight &side, int64_t p, int panels, const Rounded &x, int64_t row, int rows, Vec *acc) {
  const Layout l(side);
  Vec sum[FLOAT_ROWS];
  for (int i = 0; i < panels; i++) {
    for (int m = 0; m < rows; m++) sum[m] = vec_zero();
    const Bfloat values = source<Bfloat>(side.panels + (p + i) * l.panel_bytes + l.codes_at);
    multiply_rows(values, bd::round_up(side.inputs, 2), x.outliers + row * x.outlier_stride, x.outlier_stride, rows, sum);
    for (int m = 0; m < rows; m++) acc[i * rows + m] = vec_add(acc[i * rows + m], sum[m]);
  }
}

/// Products of panels [p, p + panels) with rows [row, row + rows), times the scales of rows and outputs: [panels][rows].
inline void products(const Form &form, const bd_weight &w, const Layout &l, int64_t p, int panels, const Rounded &x,
                     int64_t row, int rows, Vec *acc) {
  for (int i = 0; i < panels * rows; i++) acc[i] = vec_zero();
  const Panel panel = w.activation == BD_ACT_INT8       ? form.integer
                      : w.activation == BD_ACT_INT8_G32 ? form.stepped
                      : rows <= FEW                     ? form.few
                                                        : nullptr;
  for (int i = 0; panel && i < panels; i++) panel(w, l, w.panels + (p + i) * l.panel_bytes, x, row, rows, acc + i * rows);
  if (!panel) many_rows(form.decode, w, l, p, panels, x, row, rows, acc);
  for (int i = 0; i < panels; i++) {
    Vec channel = w.channel ? vec_load(w.channel + (p + i) * 16) : vec_set(1.0f);
    if (w.codec == BD_E4M3) channel = vec_mul(channel, vec_set(256.0f));
    for (int m = 0; m < rows; m++)
      acc[i * rows + m] = vec_mul(vec_mul(acc[i * rows + m], vec_set(x.scale[row + m])), channel);
  }
  if (w.side) add_outliers(*w.side, p, panels, x, row, rows, acc);
}

/// How rows and panels are taken: 8-bit inputs in the blocks that they lie in, panel by panel.
struct Blocks {
  int rows, panels;
  explicit Blocks(const bd_weight &w) : rows(bd::integer_inputs(w.activation) ? bd::ROW_BLOCK : FLOAT_ROWS),
                                        panels(bd::integer_inputs(w.activation) ? 1 : FLOAT_PANELS) {}
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline void store_some(float *out, Vec v, int64_t count) {
  if (count >= 16) return vec_store(out, v);
  float all[16];
  vec_store(all, v);
  for (int64_t i = 0; i < count; i++) out[i] = all[i];
}

void linear(const bd_weight &w, const Layout &l, const Rounded &x, const float *bias, const float *residual, float *out,
            int64_t width, int64_t from, int64_t to) {
  const Form form = form_of(w);
  const Blocks block(w);
  Vec acc[FLOAT_PANELS * FLOAT_ROWS];
  for (int64_t p = from; p < to; p += block.panels) {
    const int panels = (int)least(block.panels, to - p);
    for (int64_t row = 0; row < x.rows; row += block.rows) {
      const int rows = (int)least(block.rows, x.rows - row);
      products(form, w, l, p, panels, x, row, rows, acc);
      for (int i = 0; i < panels * rows; i++) {
        const int64_t n = (p + i / rows) * 16, at = (row + i % rows) * width;
        if (bias) acc[i] = vec_add(acc[i], load_padded(bias, n, w.outputs));
        if (residual) acc[i] = vec_add(acc[i], load_padded(residual + at, n, w.outputs));
        store_some(out + at + n, acc[i], w.outputs - n);
      }
    }
  }
}

/// a sigmoid(t): SiLU for t = a, and GELU's tanh form for t = 2 sqrt(2 / pi) (a + 0.044715 a^3).
inline Vec activate(int gate, Vec a) {
  Vec t = a;
  if (gate == BD_GATE_GELU_TANH) {
    const Vec cubic = vec_fma(vec_mul(a, a), vec_set(0.044715f), vec_set(1.0f));
    t = vec_mul(vec_mul(a, cubic), vec_set(1.5957691216f));
  }
  return vec_div(a, vec_add(vec_set(1.0f), vec_exp(vec_sub(vec_zero(), t))));
}

void gated(const bd_weight &w, const Layout &l, const Rounded &x, int gate_kind, float *out, int64_t from, int64_t to) {
  const Form form = form_of(w);
  const Blocks block(w);
  const int64_t M = w.outputs / 2;
  Vec gate[FLOAT_PANELS * FLOAT_ROWS], up[FLOAT_PANELS * FLOAT_ROWS];
  for (int64_t p = from; p < to; p += block.panels) {
    const int panels = (int)least(block.panels, to - p);
    for (int64_t row = 0; row < x.rows; row += block.rows) {
      const int rows = (int)least(block.rows, x.rows - row);
      products(form, w, l, p, panels, x, row, rows, gate);
      products(form, w, l, M / 16 + p, panels, x, row, rows, up);
      for (int i = 0; i < panels * rows; i++)
        vec_store(out + (row + i % rows) * M + (p + i / rows) * 16, vec_mul(activate(gate_kind, gate[i]), up[i]));
    }
  }
}

void gate_rows(const float *gate_up, int64_t M, int gate_kind, float *out, int64_t from, int64_t to) {
  for (int64_t row = from; row < to; row++) {
    const float *gate = gate_up + row * 2 * M, *up = gate + M;
    for (int64_t i = 0; i < M; i += 16)
      store_some(out + row * M + i, vec_mul(activate(gate_kind, load_padded(gate, i, M)), load_padded(up, i, M)), M - i);
  }
}

void add_normed(const float *x, int64_t N, const float *norm, float eps, const float *residual, float *out, int64_t from,
                int64_t to) {
  for (int64_t row = from; row < to; row++) {
    const float *y = x + row * N, *before = residual + row * N;
    const Vec r = vec_set(inverse_rms(y, N, eps));
    for (int64_t i = 0; i < N; i += 16) {
      const Vec v = vec_mul(vec_mul(load_padded(y, i, N), r), load_padded(norm, i, N));
      store_some(out + row * N + i, vec_add(load_padded(before, i, N), v), N - i);
    }
  }
}

/// One output's weights, for embeddings: a panel is decoded and a lane taken.
void unpack_row(const bd_weight &w, const Layout &l, int64_t row, float *out) {
  const uint8_t *panel = w.panels + row / 16 * l.panel_bytes;
  alignas(64) float decoded[DECODED * 16];
  const float channel = (w.channel ? w.channel[row] : 1.0f) * (w.codec == BD_E4M3 ? 256.0f : 1.0f);
  for (int64_t k = 0; k < l.inputs; k += DECODED) {
    const int64_t inputs = l.inputs - k < DECODED ? l.inputs - k : DECODED;
    form_of(w).decode(w, l, panel, k, inputs, decoded);
    for (int64_t i = 0; i < inputs && k + i < w.inputs; i++) out[k + i] = decoded[i * 16 + row % 16] * channel;
  }
}

}  // namespace
