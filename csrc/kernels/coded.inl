// Attention to blocks in codes with shared scales, and to full copies of the newest: which of the two a query reads
// depends on its position alone (attention.h). Either is decoded to floats, block by block.

/// The cache of one sequence and KV head.
struct CodedReader {
  const bd_kv &kv;
  const int64_t *table;
  int64_t J, head, C;

  static constexpr bool SCALED = false;
  int64_t codes_at(int64_t token) const { return table[token / KV_BLOCK] * J + head; }
  int64_t copy_at(int64_t token) const { return kv.coded->copies[table[token / KV_BLOCK]] * J + head; }
};

inline float bf16_float(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}

inline Vec coded_value(Int code, Vec step, Vec least) { return vec_fma(int_to_vec(code), step, least); }

/// Keys of a block to [C][16].
void decode_keys(const bd_coded &coded, int64_t at, int64_t C, float *out) {
  const int64_t rows = C * coded.bits / 8, half = C / 2;
  const uint8_t *codes = coded.keys + at * rows * KV_BLOCK;
  const uint16_t *steps = coded.key_grid + at * 2 * C, *least = steps + C;
  for (int64_t c = 0; c < rows; c++) {
    const Int code = u8_load(codes + c * KV_BLOCK);
    const Vec step = vec_set(bf16_float(steps[c])), low = vec_set(bf16_float(least[c]));
    if (coded.bits == 8) {
      vec_store(out + c * KV_BLOCK, coded_value(code, step, low));
      continue;
    }
    const Vec high_step = vec_set(bf16_float(steps[half + c])), high_low = vec_set(bf16_float(least[half + c]));
    vec_store(out + c * KV_BLOCK, coded_value(int_and(code, int_set(15)), step, low));
    vec_store(out + (half + c) * KV_BLOCK, coded_value(int_right<4>(code), high_step, high_low));
  }
  const uint16_t *outliers = coded.key_outliers + at * coded.outliers * 2;
  for (int64_t i = 0; i < coded.outliers; i++) out[outliers[2 * i]] = bf16_float(outliers[2 * i + 1]);
}

/// Values of a block to [16][C padded].
void decode_values(const bd_coded &coded, int64_t at, int64_t C, float *out) {
  const int64_t count = C * coded.bits / 8, half = C / 2, width = bd::padded_head(C);
  const uint8_t *codes = coded.values + at * KV_BLOCK * count;
  const uint16_t *grid = coded.value_grid + at * 2 * KV_BLOCK;
  for (int64_t t = 0; t < KV_BLOCK; t++, codes += count) {
    float *to = out + t * width;
    if (C < width) vec_store(to + width - 16, vec_zero());
    const Vec step = vec_set(bf16_float(grid[t])), low = vec_set(bf16_float(grid[KV_BLOCK + t]));
    for (int64_t c = 0; c < count; c += 16) {
      uint8_t some[16] = {};
      const int64_t left = count - c < 16 ? count - c : 16;
      if (left < 16) __builtin_memcpy(some, codes + c, left);
      const Int code = u8_load(left < 16 ? some : codes + c);
      if (coded.bits == 8) {
        store_padded(to + c, coded_value(code, step, low), left);
      } else {
        store_padded(to + c, coded_value(int_and(code, int_set(15)), step, low), left);
        store_padded(to + half + c, coded_value(int_right<4>(code), step, low), left);
      }
    }
  }
  const uint16_t *outliers = coded.value_outliers + at * coded.outliers * 2;
  for (int64_t i = 0; i < coded.outliers; i++) {
    const int64_t place = outliers[2 * i];
    out[place / C * width + place % C] = bf16_float(outliers[2 * i + 1]);
  }
}

/// body(first, last, coded) for each run of queries that see some of the block at token t of the chunk, and see it alike.
template <class Body> inline void for_readers(const Queries &s, int t, Body body) {
  auto sees = [&](int i) { return s.from[i] < t + KV_BLOCK && s.to[i] > t; };
  for (int i = 0; i < s.count;) {
    int j = i + 1;
    if (sees(i)) {
      const bool coded = s.coded[i] > t;
      while (j < s.count && sees(j) && (s.coded[j] > t) == coded) j++;
      body(i, j, coded);
    }
    i = j;
  }
}

/// A block as floats in a panel of its own, made when first asked for.
template <class Make> struct BlockFloats {
  float *const panel;
  Make make;
  bool made = false;
  const float *floats() {
    if (!made) make(panel), made = true;
    return panel;
  }
};

/// body(first, last, floats) with what these queries see of a block, decoded.
template <class FromCodes, class FromCopy, class Body>
inline void for_decoded(Queries &s, int t, FromCodes from_codes, FromCopy from_copy, Body body) {
  BlockFloats<FromCodes> codes = {s.panel, from_codes};
  BlockFloats<FromCopy> copy = {s.panel + KV_BLOCK * bd::MAX_HEAD_DIM, from_copy};
  for_readers(s, t, [&](int i, int j, bool coded) { body(i, j, coded ? codes.floats() : copy.floats()); });
}

void score(const CodedReader &cache, Queries &s, int64_t base, int begin, int end) {
  const int64_t C = cache.C;
  for (int t = begin; t < end; t += KV_BLOCK) {
    auto codes = [&](float *out) { decode_keys(*cache.kv.coded, cache.codes_at(base + t), C, out); };
    auto copy = [&](float *out) {
      const uint16_t *keys = (const uint16_t *)cache.kv.keys + cache.copy_at(base + t) * KV_BLOCK * C;
      decode(keys, keys, C, out);
    };
    for_decoded(s, t, codes, copy, [&](int i, int j, const float *keys) { score_panel(s, i, j, &keys, &keys, 1, C, t); });
  }
}

void mix(const CodedReader &cache, Queries &s, int64_t base, int begin, int end) {
  const int64_t C = cache.C;
  for (int t = begin; t < end; t += KV_BLOCK) {
    auto codes = [&](float *out) { decode_values(*cache.kv.coded, cache.codes_at(base + t), C, out); };
    auto copy = [&](float *out) {
      const uint16_t *values = (const uint16_t *)cache.kv.values + cache.copy_at(base + t) * KV_BLOCK * C;
      if (C % 16 == 0) decode(values, values, C, out);
      else decode_padded(values, C, out);
    };
    for_decoded(s, t, codes, copy, [&](int i, int j, const float *values) {
      mix_panel(s, i, j, values, values, s.width, t, t + (int)KV_BLOCK);
    });
  }
}
