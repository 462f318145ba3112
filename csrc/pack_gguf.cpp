// The blocks of GGUF files into panels, code by code and scale by scale: nothing is rounded anew. The layouts of the blocks
// are ggml's (ggml-common.h); those of the panels are in layout.h.
#include <cstring>
#include <vector>

#include "ops.h"

namespace bd {

namespace {

struct BlockForm {
  int type;  // ggml's number
  int codec, grid;
  int inputs, bytes;  // of a block
};

constexpr BlockForm FORMS[] = {
    {2, BD_INT4, BD_GRID_SYM, 32, 18},     // Q4_0
    {3, BD_INT4, BD_GRID_MIN, 32, 20},     // Q4_1
    {6, BD_INT5, BD_GRID_SYM, 32, 22},     // Q5_0
    {7, BD_INT5, BD_GRID_MIN, 32, 24},     // Q5_1
    {8, BD_INT8, BD_GRID_SYM, 32, 34},     // Q8_0
    {12, BD_INT4, BD_GRID_K, 256, 144},    // Q4_K
    {13, BD_INT5, BD_GRID_K, 256, 176},    // Q5_K
    {14, BD_INT6, BD_GRID_K16, 256, 210},  // Q6_K
};

// Codes of a block of 32: `bytes` of nibbles, the low ones first; a fifth bit from the word at `high`, if any.
void small_codes(const uint8_t *nibbles, const uint8_t *high, uint8_t *codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = nibbles[i] & 15;
    codes[i + 16] = nibbles[i] >> 4;
  }
  for (int i = 0; high && i < 32; i++) codes[i] |= (high[i / 8] >> i % 8 & 1) << 4;
}

void k_codes(const uint8_t *block, bool fifth, uint8_t *codes) {
  const uint8_t *high = block + 16, *low = block + (fifth ? 48 : 16);
  for (int i = 0; i < 256; i++) {
    const int sub = i / 32, at = i % 32;
    codes[i] = low[sub / 2 * 32 + at] >> sub % 2 * 4 & 15;
    if (fifth) codes[i] |= (high[at] >> sub & 1) << 4;
  }
}

void q6_codes(const uint8_t *block, uint8_t *codes) {
  for (int i = 0; i < 256; i++) {
    const int half = i / 128, part = i % 128 / 32, at = i % 32;
    const uint8_t low = block[half * 64 + part % 2 * 32 + at] >> part / 2 * 4 & 15;
    const uint8_t high = block[128 + half * 32 + at] >> part * 2 & 3;
    codes[i] = (uint8_t)(low | high << 4);
  }
}

void block_codes(const BlockForm &form, const uint8_t *block, uint8_t *codes) {
  switch (form.type) {
    case 2: return small_codes(block + 2, nullptr, codes);
    case 3: return small_codes(block + 4, nullptr, codes);
    case 6: return small_codes(block + 6, block + 2, codes);
    case 7: return small_codes(block + 8, block + 4, codes);
    case 8: std::memcpy(codes, block + 2, 32); return;
    case 12: return k_codes(block, false, codes);
    case 13: return k_codes(block, true, codes);
    default: return q6_codes(block, codes);
  }
}

// The 6-bit scale and minimum of a sub-block, from the twelve bytes that hold eight of each.
void k_scale(const uint8_t *twelve, int sub, uint8_t &scale, uint8_t &min) {
  if (sub < 4) {
    scale = twelve[sub] & 63;
    min = twelve[sub + 4] & 63;
  } else {
    scale = (uint8_t)((twelve[sub + 4] & 15) | twelve[sub - 4] >> 6 << 4);
    min = (uint8_t)(twelve[sub + 4] >> 4 | twelve[sub] >> 6 << 4);
  }
}

// The scales of a row's block number `b` into its lane.
void block_grid(const BlockForm &form, const uint8_t *block, uint8_t *panel, int64_t b, int lane) {
  if (form.grid == BD_GRID_SYM) {
    std::memcpy(panel + (b * 16 + lane) * 2, block, 2);
  } else if (form.grid == BD_GRID_MIN) {
    std::memcpy(panel + b * 64 + lane * 2, block, 2);
    std::memcpy(panel + b * 64 + 32 + lane * 2, block + 2, 2);
  } else if (form.grid == BD_GRID_K) {
    uint8_t *at = panel + b * 320;
    std::memcpy(at + lane * 2, block, 2);
    std::memcpy(at + 32 + lane * 2, block + 2, 2);
    for (int sub = 0; sub < 8; sub++) k_scale(block + 4, sub, at[64 + sub * 32 + lane], at[64 + sub * 32 + 16 + lane]);
  } else {
    uint8_t *at = panel + b * 288;
    std::memcpy(at + lane * 2, block + 208, 2);
    for (int sub = 0; sub < 16; sub++) at[32 + sub * 16 + lane] = block[192 + sub];
  }
}

}  // namespace

bool gguf_form(int type, int64_t inputs, int &codec, int &grid, int &group) {
  for (const BlockForm &form : FORMS) {
    if (form.type != type || inputs % form.inputs) continue;
    codec = form.codec;
    grid = form.grid;
    group = form.inputs == 32 ? 32 : 0;
    return true;
  }
  return false;
}

void pack_gguf(Pool &pool, const bd_weight &w, uint8_t *panels, int type, const uint8_t *blocks) {
  const BlockForm *form = FORMS;
  while (form->type != type) form++;
  const Layout l(w);
  const int64_t count = w.inputs / form->inputs, row_bytes = count * form->bytes;
  pool.run([&](Team &team) {
    std::vector<uint8_t> codes(w.inputs);
    team.share(l.panels, 4, [&](int64_t from, int64_t to) {
      for (int64_t p = from; p < to; p++) {
        uint8_t *panel = panels + p * l.panel_bytes;
        std::memset(panel, 0, l.panel_bytes);
        for (int lane = 0; lane < PANEL && p * PANEL + lane < w.outputs; lane++) {
          const uint8_t *row = blocks + (p * PANEL + lane) * row_bytes;
          for (int64_t b = 0; b < count; b++) {
            block_codes(*form, row + b * form->bytes, codes.data() + b * form->inputs);
            block_grid(*form, row + b * form->bytes, panel, b, lane);
          }
          place_codes(panel, l, w.codec, lane, w.inputs, codes.data());
        }
      }
    });
  });
}

}  // namespace bd
