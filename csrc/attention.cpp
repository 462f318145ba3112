#include "attention.h"

#include <algorithm>

namespace bd {

namespace {

constexpr int64_t DECODING = 4;  // decoding a token of the cache costs about as much as attending to it this often
constexpr int64_t SHARES = 4;    // items a thread, so that one that ends late costs little

// The tokens that any row of [from, to) sees.
Visible seen(const bd_batch &batch, const bd_attention &shape, int64_t from, int64_t to) {
  Visible all = {INT64_MAX, 0};
  for (int64_t row = from; row < to; row++) {
    const Visible v = visible(shape, batch.positions[row]);
    all = {std::min(all.from, v.from), std::max(all.to, v.to)};
  }
  return all;
}

struct Chunks {
  int64_t first, last;
  explicit Chunks(Visible v) : first(v.from / KV_CHUNK), last((v.to + KV_CHUNK - 1) / KV_CHUNK) {}
  int64_t count() const { return last - first; }
};

// A sequence's queries in blocks: several rows, or a part of the heads of one row that has very many.
struct Blocks {
  int64_t rows, queries;

  explicit Blocks(const bd_attention &shape) {
    const int64_t group = shape.heads / shape.kv_heads;
    queries = std::max<int64_t>(1, std::min(QUERY_BLOCK, QUERY_FLOATS / padded_head(shape.head_dim)));
    rows = std::max<int64_t>(1, queries / group);
    queries = std::min(queries, rows * group);
  }
};

struct Planner {
  const bd_batch &batch;
  const bd_attention &shape;
  const Blocks blocks;
  const int64_t group, row_floats;  // floats of a row's result for a chunk

  Planner(const bd_batch &b, const bd_attention &a)
      : batch(b), shape(a), blocks(a), group(a.heads / a.kv_heads), row_floats(a.heads * partial_width(a.head_dim)) {}

  int64_t cost(int64_t queries, int64_t from, int64_t to) const {
    const Visible v = seen(batch, shape, from, to);
    return (queries + DECODING) * (v.to - v.from);
  }

  // The last block's rows see the most; so does that of the costliest item.
  int64_t largest(int64_t from, int64_t to) const {
    const int64_t last = from + (to - from - 1) / blocks.rows * blocks.rows, first = std::max(from, last - blocks.rows);
    return cost(std::min(blocks.queries, (to - from) * group), first, to);
  }

  int64_t total(int64_t from, int64_t to) const {
    int64_t sum = 0;
    for (int64_t row = from; row < to; row += blocks.rows) {
      const int64_t end = std::min(row + blocks.rows, to);
      sum += shape.kv_heads * cost((end - row) * group, row, end);
    }
    return sum;
  }

  // All items of a sequence's rows [from, to), the blocks that see most first. `partial` is where the results of its
  // first row and of chunk `all.first` go, or negative.
  void add_items(std::vector<AttentionItem> &items, int64_t sequence, int64_t from, int64_t to, Chunks all,
                 int64_t partial) const {
    const int64_t stride = all.count() * row_floats;
    for (int64_t row = from + (to - from - 1) / blocks.rows * blocks.rows; row >= from; row -= blocks.rows) {
      const int64_t end = std::min(row + blocks.rows, to);
      const Chunks mine(seen(batch, shape, row, end));
      const int64_t step = partial < 0 ? mine.count() : 1;
      for (int64_t chunk = mine.first; chunk < mine.last; chunk += step) {
        const int64_t at = partial < 0 ? -1 : partial + (row - from) * stride + (chunk - all.first) * row_floats;
        for (int64_t head = 0; head < shape.kv_heads; head++)
          for (int64_t query = row * group; query < end * group; query += blocks.queries) {
            const int64_t last = std::min(query + blocks.queries, end * group);
            items.push_back({sequence, head, query, last, chunk, chunk + step, at, stride});
          }
      }
    }
  }

  void add_splits(std::vector<SplitRow> &splits, int64_t from, int64_t to, Chunks all, int64_t partial) const {
    for (int64_t row = from; row < to; row++) {
      const Chunks mine(visible(shape, batch.positions[row]));
      const int64_t at = partial + ((row - from) * all.count() + mine.first - all.first) * row_floats;
      splits.push_back({row, at, mine.count()});
    }
  }
};

}  // namespace

AttentionPlan::AttentionPlan(const bd_batch &batch, const bd_attention &shape, int threads) {
  const Planner planner(batch, shape);
  int64_t total = 0;
  for (int64_t s = 0; s < batch.sequences; s++) total += planner.total(batch.row_starts[s], batch.row_starts[s + 1]);
  for (int64_t s = 0; s < batch.sequences; s++) {
    const int64_t from = batch.row_starts[s], to = batch.row_starts[s + 1];
    if (from == to) continue;
    const Chunks all(seen(batch, shape, from, to));
    const int64_t room = (to - from) * all.count() * planner.row_floats;
    const bool split = threads > 1 && all.count() > 1 && partial + room <= MAX_PARTIAL &&
                       planner.largest(from, to) * threads * SHARES > total;
    planner.add_items(items, s, from, to, all, split ? partial : -1);
    if (!split) continue;
    planner.add_splits(splits, from, to, all, partial);
    partial += room;
  }
  std::stable_sort(items.begin(), items.end(), [](const AttentionItem &a, const AttentionItem &b) {
    return (a.to - a.from) * (a.last - a.first) > (b.to - b.from) * (b.last - b.first);
  });
}

}  // namespace bd
