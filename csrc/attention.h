// How attention is cut into work, and why a row's result does not depend on the cut.
//
// A row's softmax is taken over chunks of 256 tokens that begin at absolute positions 0, 256, 512, ...; the chunks that
// the row sees are folded together in order. That is all there is to a value: whether one thread goes through the
// chunks of a row or several do, and which rows stand beside it, changes nothing. So the cut may follow the machine.
//
// Queries: the heads of a KV head's group, row after row; query i is head i % (H / J) of row i / (H / J) of the call.
#pragma once
#include <vector>

#include "bitdraft.h"

namespace bd {

constexpr int64_t KV_BLOCK = 16;
constexpr int64_t KV_CHUNK = 256;
constexpr int64_t QUERY_BLOCK = 48;     // queries that a work item has at most
constexpr int64_t QUERY_FLOATS = 6144;  // and their floats, each padded to a multiple of 16
constexpr int64_t MAX_HEAD_DIM = 512;
constexpr int64_t MAX_PARTIAL = 8 << 20;  // floats of intermediate values that a call takes, whatever its shape

// Queries [from, to) of one sequence and KV head, and the chunks [first, last) that any of them sees. Their results go
// straight to the output where `partial` is negative. Else there is one chunk, and the result of row r and query head h
// goes to partial + (r - from / (H / J)) * stride + h * partial_width(C).
struct AttentionItem {
  int64_t sequence, head;
  int64_t from, to;
  int64_t first, last;
  int64_t partial, stride;
};

// A row whose chunks, [chunks][H][partial_width(C)] from `partial` on, are to be folded.
struct SplitRow {
  int64_t row, partial, chunks;
};

// The work of an attention call, the same for all layers: items to be taken one at a time, the longest about first;
// then, when all are done, merges [0, splits.size() * H).
struct AttentionPlan {
  std::vector<AttentionItem> items;
  std::vector<SplitRow> splits;
  int64_t partial = 0;  // floats, at most MAX_PARTIAL

  AttentionPlan(const bd_batch &, const bd_attention &, int threads);
};

// The tokens [from, to) that a row at `position` sees.
struct Visible {
  int64_t from, to;
};

// Everything below is static: kernels are compiled for several instruction sets and must not share a copy.
static inline Visible visible(const bd_attention &shape, int64_t position) {
  const int64_t to = position + 1;
  return {shape.window > 0 && to > shape.window ? to - shape.window : 0, to};
}

// The tokens [0, n) that a row at `position` reads in codes, where there are some: it depends on the position alone.
static inline int64_t coded_tokens(int64_t window, int64_t position) {
  return position < window ? 0 : (position - window) / KV_BLOCK * KV_BLOCK;
}

static inline int64_t padded_head(int64_t C) { return (C + 15) / 16 * 16; }

// Floats of a query's result for a chunk: C sums, padded, then the sum of the weights and the largest score.
static inline int64_t partial_width(int64_t C) { return padded_head(C) + 16; }

}  // namespace bd
