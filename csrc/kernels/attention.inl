// Causal attention over the paged cache: see attention.h for the work items and for what a row's result depends on.
//
// An item goes through the tokens of a KV head in panels, each decoded to floats once and used for all its queries, up
// to six at once so that their sums stay in registers; with few queries, codes go straight to where they are used, and
// decoding hides behind the multiply-adds. Every sum goes through its terms in one order, whatever the number of
// queries beside it: scores over channels, weighted values over tokens. Tokens that a row does not see are left out,
// not multiplied by zero.
#include "rope.inl"

namespace {

using bd::AttentionItem;
using bd::KV_CHUNK;

constexpr int PANEL_TOKENS = 32;
constexpr int SCORES = KV_CHUNK + 16;  // floats from a query's scores to the next's: not a power of two, for the caches
constexpr int MOST = 6;                // queries of a tile
constexpr int FEW_FOR_KEYS = 2 * MOST, FEW_FOR_VALUES = MOST;  // for so many, decoding once does not pay

/// Up to so many queries want two vectors of sums each, to keep the multipliers busy, and have the registers for them.
template <class Code> constexpr int WIDE = VEC_REGISTERS >= 32 ? MOST : sizeof(Code) == 4 ? 3 : 2;

template <int N> struct Count {};

/// body(Count<n>, first) for tiles of at most MOST that cover [from, to) as evenly as possible.
template <class Body> inline void for_tiles(int from, int to, Body body) {
  while (from < to) {
    const int tiles = (to - from + MOST - 1) / MOST, n = (to - from + tiles - 1) / tiles;
    switch (n) {
      case 1: body(Count<1>(), from); break;
      case 2: body(Count<2>(), from); break;
      case 3: body(Count<3>(), from); break;
      case 4: body(Count<4>(), from); break;
      case 5: body(Count<5>(), from); break;
      default: body(Count<6>(), from);
    }
    from += n;
  }
}

/// Scores of N queries [N][width] with W blocks of 16 keys [C][16]; scales are left for later. Meanwhile as many bytes
/// at `next` are asked for, a few at a time: in one go they would hold up every other load.
template <int N, int W, class Code>
void dots(const float *q, int64_t width, const Code *const *keys, const Code *const *next, int64_t C, float *scores) {
  const Code *const block[2] = {keys[0], keys[W - 1]}, *const later[2] = {next[0], next[W - 1]};
  Vec sum[N][W];
#pragma GCC unroll 6
  for (int n = 0; n < N; n++)
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) sum[n][w] = vec_zero();
  for (int64_t c = 0; c < C; c++) {
    Vec k[W];
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) {
      k[w] = widen(block[w] + c * 16);
      prefetch(later[w] + c * 16);
    }
#pragma GCC unroll 6
    for (int n = 0; n < N; n++) {
      const Vec x = vec_set(q[n * width + c]);
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) sum[n][w] = vec_fma(x, k[w], sum[n][w]);
    }
  }
#pragma GCC unroll 6
  for (int n = 0; n < N; n++)
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) vec_store(scores + n * SCORES + w * 16, sum[n][w]);
}

/// N rows of W vectors of sums += weights [N] of tokens [from, to) times their values, `width` apart.
template <int N, int W, class Code>
void weigh(const float *weights, const Code *values, const Code *next, int64_t width, int from, int to, float *sums,
           int64_t stride) {
  Vec sum[N][W];
#pragma GCC unroll 6
  for (int n = 0; n < N; n++)
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) sum[n][w] = vec_load(sums + n * stride + w * 16);
  for (int t = from; t < to; t++) {
    Vec v[W];
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) {
      v[w] = widen(values + t * width + w * 16);
      prefetch(next + t * width + w * 16);
    }
#pragma GCC unroll 6
    for (int n = 0; n < N; n++) {
      const Vec x = vec_set(weights[n * SCORES + t]);
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) sum[n][w] = vec_fma(x, v[w], sum[n][w]);
    }
  }
#pragma GCC unroll 6
  for (int n = 0; n < N; n++)
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) vec_store(sums + n * stride + w * 16, sum[n][w]);
}

/// Scores of tokens [from, to) of a chunk to weights e^(score - largest); result[0] is their sum, result[1] the
/// largest. With 8-bit codes, scores want the scales of the keys first, and weights those of the values last.
void soften(float *scores, int from, int to, const float *key_scales, const float *value_scales, float *result) {
  static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int first = from / 16, last = (to - 1) / 16;
  const Vec lane = vec_load(lanes), unseen = vec_set(-INFINITY);
  Vec largest = unseen;
  for (int b = first; b <= last; b++) {
    Vec s = vec_load(scores + b * 16);
    if (key_scales) s = vec_mul(s, vec_load(key_scales + b * 16));
    if (b == first && from % 16) s = vec_below(lane, vec_set((float)(from % 16)), unseen, s);
    if (b == last && to % 16) s = vec_below(lane, vec_set((float)(to % 16)), s, unseen);
    largest = vec_max(largest, s);
    vec_store(scores + b * 16, s);
  }
  const float top = vec_largest(largest);
  const Vec shift = vec_set(top), limit = vec_set(1.0f);
  Vec sum = vec_zero();
  for (int b = first; b <= last; b++) {
    const Vec below = vec_sub(vec_load(scores + b * 16), shift);
    const Vec p = vec_below(below, limit, vec_exp(below), below);  // what is not a number stays none
    sum = vec_add(sum, p);
    vec_store(scores + b * 16, value_scales ? vec_mul(p, vec_load(value_scales + b * 16)) : p);
  }
  vec_store(result, vec_zero());
  result[0] = vec_sum(sum);
  result[1] = top;
}

/// A chunk's result into that of the chunks before it; C channels, padded.
void fold(float *total, const float *chunk, int64_t padded) {
  const float before = total[padded + 1], own = chunk[padded + 1], top = before > own ? before : own;
  const Vec keep = vec_exp(vec_set(before - top)), gain = vec_exp(vec_set(own - top));
  for (int64_t c = 0; c <= padded; c += 16)
    vec_store(total + c, vec_fma(vec_load(chunk + c), gain, vec_mul(vec_load(total + c), keep)));
  total[padded + 1] = top;
}

void finish(const float *total, int64_t C, int64_t padded, float *out) {
  const Vec sum = vec_set(total[padded]);
  for (int64_t c = 0; c < C; c += 16) store_padded(out + c, vec_div(vec_load(total + c), sum), C - c);
}

/// The cache of one sequence and KV head.
template <class Code> struct Reader {
  const bd_kv &kv;
  const int64_t *table;
  int64_t J, head, C;

  int64_t block(int64_t token) const { return table[token / KV_BLOCK] * J + head; }
  static constexpr bool SCALED = sizeof(Code) == 1;
  const Code *keys(int64_t token) const { return (const Code *)kv.keys + block(token) * KV_BLOCK * C; }
  const Code *values(int64_t token) const { return (const Code *)kv.values + block(token) * KV_BLOCK * C; }

  /// The scales of sixteen tokens.
  void scales(int64_t token, float *keys, float *values) const {
    if constexpr (IS_E4M3<Code>) {
      vec_store(keys, vec_set(kv.key_scales[head] * 256));  // see widen
      vec_store(values, vec_set(kv.value_scales[head] * 256));
    } else {
      vec_store(keys, vec_load(kv.key_scales + block(token) * KV_BLOCK));
      vec_store(values, vec_load(kv.value_scales + block(token) * KV_BLOCK));
    }
  }
};

/// `count` vectors of 16 codes, as they lie; as many at `next` are asked for.
template <class Code> void decode(const Code *codes, const Code *next, int64_t count, float *out) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; i++) {
    vec_store(out + i * 16, widen(codes + i * 16));
    if (i % (4 / (int64_t)sizeof(Code)) == 0) prefetch(next + i * 16);
  }
}

/// Values [16][C] to [16][C padded].
template <class Code> void decode_padded(const Code *codes, int64_t C, float *out) {
  for (int64_t t = 0; t < KV_BLOCK; t++, codes += C)
    for (int64_t c = 0; c < C; c += 16, out += 16) {
      Code some[16] = {};
      for (int64_t i = 0; i < 16 && c + i < C; i++) some[i] = codes[c + i];
      vec_store(out, widen(some));
    }
}

struct Queries {  // of an item, for the chunk at hand
  int count;
  int64_t width;                                   // of a padded query
  int from[bd::QUERY_BLOCK], to[bd::QUERY_BLOCK];  // tokens of the chunk that each sees
  int coded[bd::QUERY_BLOCK];                      // and so many of the chunk's in codes, where there are some
  int all_from, all_to;                            // tokens that all see
  alignas(64) float q[bd::QUERY_FLOATS];
  alignas(64) float scores[bd::QUERY_BLOCK * SCORES];
  alignas(64) float sums[bd::QUERY_FLOATS + 16 * bd::QUERY_BLOCK];    // [count][width + 16], see partial_width
  alignas(64) float totals[bd::QUERY_FLOATS + 16 * bd::QUERY_BLOCK];  // likewise, of the chunks so far
  alignas(64) float panel[PANEL_TOKENS * bd::MAX_HEAD_DIM];
};

inline int clip(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

/// body(first, last, from, to) for each run of queries [first, last) of [i, count) that see the same tokens [from, to) of
/// [begin, end).
template <class Body> inline void for_runs(const Queries &s, int i, int count, int begin, int end, Body body) {
  if (s.all_from <= begin && s.all_to >= end) return body(i, count, begin, end);
  while (i < count) {
    const int from = clip(s.from[i], begin, end), to = clip(s.to[i], begin, end);
    int j = i + 1;
    while (j < count && clip(s.from[j], begin, end) == from && clip(s.to[j], begin, end) == to) j++;
    if (from < to) body(i, j, from, to);
    i = j;
  }
}

/// Scores of queries [first, last) with `blocks` blocks of 16 keys, the first of which is token t of the chunk.
template <class Code>
void score_panel(Queries &s, int first, int last, const Code *const *keys, const Code *const *next, int blocks,
                 int64_t C, int t) {
  for_tiles(first, last, [&]<int N>(Count<N>, int i) {
    const float *q = s.q + i * s.width;
    float *scores = s.scores + i * SCORES + t;
    if constexpr (N <= WIDE<Code>) {
      if (blocks == 2) return dots<N, 2>(q, s.width, keys, next, C, scores);
    }
    for (int b = 0; b < blocks; b++) dots<N, 1>(q, s.width, keys + b, next + b, C, scores + b * KV_BLOCK);
  });
}

/// Scores of the chunk's tokens from `begin` to the panel of `end` with all queries that see any of a panel.
template <class Code> void score(const Reader<Code> &cache, Queries &s, int64_t base, int begin, int end) {
  const int64_t C = cache.C;
  for (int t = begin; t < end; t += PANEL_TOKENS) {
    const int blocks = end - t > KV_BLOCK ? 2 : 1;
    const Code *keys[2], *next[2];
    for (int b = 0; b < blocks; b++) {
      const int at = t + b * (int)KV_BLOCK, later = at + PANEL_TOKENS;
      keys[b] = cache.keys(base + at);
      next[b] = later < end ? cache.keys(base + later) : cache.values(base + begin + b * KV_BLOCK);
    }
    int first = 0, last = s.count;  // leaves out queries before and after those that see any of it
    while (first < last && (s.from[first] >= t + PANEL_TOKENS || s.to[first] <= t)) first++;
    while (first < last && (s.from[last - 1] >= t + PANEL_TOKENS || s.to[last - 1] <= t)) last--;
    if (last - first <= FEW_FOR_KEYS) {
      score_panel(s, first, last, keys, next, blocks, C, t);
    } else {
      const float *decoded[2] = {s.panel, s.panel + KV_BLOCK * C};
      for (int b = 0; b < blocks; b++) decode(keys[b], next[b], C, s.panel + b * KV_BLOCK * C);
      score_panel(s, first, last, decoded, decoded, blocks, C, t);
    }
  }
}

/// Adds tokens [begin, end) of the chunk to the sums of the queries [lo, hi) that see any of them.
template <class Code>
void mix_panel(Queries &s, int lo, int hi, const Code *values, const Code *next, int64_t width, int begin, int end) {
  const int64_t stride = s.width + 16;
  for_runs(s, lo, hi, begin, end, [&](int first, int last, int from, int to) {
    for_tiles(first, last, [&]<int N>(Count<N>, int i) {
      const float *weights = s.scores + i * SCORES + begin;
      float *sums = s.sums + i * stride;
      int64_t c = 0;
      if constexpr (N <= WIDE<Code>) {
        for (; c + 32 <= s.width; c += 32)
          weigh<N, 2>(weights, values + c, next + c, width, from - begin, to - begin, sums + c, stride);
      }
      for (; c < s.width; c += 16)
        weigh<N, 1>(weights, values + c, next + c, width, from - begin, to - begin, sums + c, stride);
    });
  });
}

template <class Code> void mix(const Reader<Code> &cache, Queries &s, int64_t base, int begin, int end) {
  const int64_t C = cache.C;
  const bool few = C % 16 == 0 && s.count <= FEW_FOR_VALUES;
  for (int t = begin; t < end; t += PANEL_TOKENS) {
    const int stop = t + PANEL_TOKENS < end ? t + PANEL_TOKENS : end;
    for (int at = t; at < stop; at += KV_BLOCK) {
      const Code *values = cache.values(base + at);
      const Code *next = at + PANEL_TOKENS < end ? cache.values(base + at + PANEL_TOKENS) : values;
      if (few) mix_panel(s, 0, s.count, values, next, C, at, at + (int)KV_BLOCK);
      else if (C % 16 == 0) decode(values, next, C, s.panel + (at - t) * C);
      else decode_padded(values, C, s.panel + (at - t) * s.width);
    }
    if (!few) mix_panel<float>(s, 0, s.count, s.panel, s.panel, s.width, t, stop);
  }
}

#include "coded.inl"

/// Everything that an item's queries see of a chunk, to `sums`.
template <class Cache> void attend_chunk(const Cache &cache, Queries &s, int64_t base) {
  int begin = KV_CHUNK, end = 0;
  s.all_from = 0;
  s.all_to = KV_CHUNK;
  for (int i = 0; i < s.count; i++) {
    s.all_from = s.from[i] > s.all_from ? s.from[i] : s.all_from;
    s.all_to = s.to[i] < s.all_to ? s.to[i] : s.all_to;
    if (s.from[i] >= s.to[i]) continue;
    begin = s.from[i] < begin ? s.from[i] : begin;
    end = s.to[i] > end ? s.to[i] : end;
  }
  begin = begin / PANEL_TOKENS * PANEL_TOKENS;
  score(cache, s, base, begin, end);
  float key_scales[KV_CHUNK], value_scales[KV_CHUNK];
  constexpr bool scaled = Cache::SCALED;
  if constexpr (scaled)
    for (int t = begin; t < end; t += KV_BLOCK) cache.scales(base + t, key_scales + t, value_scales + t);
  for (int i = 0; i < s.count; i++) {
    if (s.from[i] >= s.to[i]) continue;
    float *sums = s.sums + i * (s.width + 16);
    for (int64_t c = 0; c < s.width; c += 16) vec_store(sums + c, vec_zero());
    soften(s.scores + i * SCORES, s.from[i], s.to[i], scaled ? key_scales : nullptr, scaled ? value_scales : nullptr,
           sums + s.width);
  }
  mix(cache, s, base, begin, end);
}

inline void copy(const float *from, float *to, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) vec_store(to + i, vec_load(from + i));
}

template <class Cache>
void attend_item(const float *q, const bd_batch &batch, const bd_attention &shape, const bd_kv &kv,
                 const AttentionItem &item, float *partial, float *out) {
  const int64_t H = shape.heads, J = shape.kv_heads, C = shape.head_dim, G = H / J;
  const Cache cache = {kv, batch.blocks + batch.table_starts[item.sequence], J, item.head, C};
  Queries s;
  s.count = (int)(item.to - item.from);
  s.width = bd::padded_head(C);
  const int64_t stride = s.width + 16;
  const Vec scale = vec_set(shape.scale > 0 ? shape.scale : 1.0f / sqrtf((float)C));
  auto head_of = [&](int i) { return item.head * G + (item.from + i) % G; };
  auto row_of = [&](int i) { return (item.from + i) / G; };
  for (int i = 0; i < s.count; i++)
    for (int64_t c = 0; c < C; c += 16)
      vec_store(s.q + i * s.width + c, vec_mul(load_padded(q + (row_of(i) * H + head_of(i)) * C, c, C), scale));
  for (int64_t chunk = item.first; chunk < item.last; chunk++) {
    const int64_t base = chunk * KV_CHUNK;
    for (int i = 0; i < s.count; i++) {
      const bd::Visible v = bd::visible(shape, batch.positions[row_of(i)]);
      s.from[i] = v.from <= base ? 0 : v.from - base < KV_CHUNK ? (int)(v.from - base) : (int)KV_CHUNK;
      s.to[i] = v.to <= base ? 0 : v.to - base < KV_CHUNK ? (int)(v.to - base) : (int)KV_CHUNK;
      if (kv.coded) {
        const int64_t coded = bd::coded_tokens(kv.coded->window, v.to - 1) - base;
        s.coded[i] = coded < 0 ? 0 : coded < KV_CHUNK ? (int)coded : (int)KV_CHUNK;
      }
    }
    attend_chunk(cache, s, base);
    for (int i = 0; i < s.count; i++) {
      if (s.from[i] >= s.to[i]) continue;
      const float *sums = s.sums + i * stride;
      if (item.partial >= 0) {
        const int64_t row = row_of(i) - item.from / G;
        copy(sums, partial + item.partial + row * item.stride + head_of(i) * stride, stride);
      } else if (chunk == bd::visible(shape, batch.positions[row_of(i)]).from / KV_CHUNK) {
        copy(sums, s.totals + i * stride, stride);
      } else {
        fold(s.totals + i * stride, sums, s.width);
      }
    }
  }
  if (item.partial >= 0) return;
  for (int i = 0; i < s.count; i++)
    finish(s.totals + i * stride, C, s.width, out + (row_of(i) * H + head_of(i)) * C);
}

void attend(const float *q, const bd_batch &batch, const bd_attention &shape, const bd_kv &kv,
            const AttentionItem *items, float *partial, float *out, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; i++) {
    if (kv.coded) attend_item<CodedReader>(q, batch, shape, kv, items[i], partial, out);
    else if (kv.dtype == BD_KV_F32) attend_item<Reader<float>>(q, batch, shape, kv, items[i], partial, out);
    else if (kv.dtype == BD_KV_BF16) attend_item<Reader<uint16_t>>(q, batch, shape, kv, items[i], partial, out);
    else if (kv.dtype == BD_KV_INT8) attend_item<Reader<int8_t>>(q, batch, shape, kv, items[i], partial, out);
    else attend_item<Reader<E4M3>>(q, batch, shape, kv, items[i], partial, out);
  }
}

void merge(const bd_attention &shape, const bd::SplitRow *rows, const float *partial, float *out, int64_t from,
           int64_t to) {
  const int64_t H = shape.heads, C = shape.head_dim, padded = bd::padded_head(C), stride = padded + 16;
  alignas(64) float total[bd::MAX_HEAD_DIM + 16];
  for (int64_t i = from; i < to; i++) {
    const bd::SplitRow &split = rows[i / H];
    const float *chunk = partial + split.partial + i % H * stride;
    copy(chunk, total, stride);
    for (int64_t c = 1; c < split.chunks; c++) fold(total, chunk + c * H * stride, padded);
    finish(total, C, padded, out + (split.row * H + i % H) * C);
  }
}

}  // namespace
