// From a weight as a format stores it to panels (layout.h). Done once, at load.
#include <cmath>
#include <cstring>
#include <vector>

#include "ops.h"

namespace bd {

namespace {

uint16_t half_bits(float f) {  // of a value that a float16 holds exactly, or its neighbour toward zero
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  const int exponent = (int)(u >> 23 & 255) - 127;
  const uint32_t fraction = u & 0x7fffff;
  if (exponent < -24) return sign;
  if (exponent < -14) return (uint16_t)(sign | (fraction | 0x800000) >> (-1 - exponent));
  if (exponent > 15) return (uint16_t)(sign | 0x7bff);
  return (uint16_t)(sign | (exponent + 15) << 10 | fraction >> 13);
}

// The codes of one output, one in a byte, from the dense little-endian bit stream that Packed holds.
void unpack_stream(const uint8_t *stream, int bits, int64_t K, uint8_t *codes) {
  const int mask = (1 << bits) - 1;
  for (int64_t k = 0, bit = 0; k < K; k++, bit += bits) {
    unsigned word = stream[bit / 8];
    if (bit % 8 + bits > 8) word |= (unsigned)stream[bit / 8 + 1] << 8;
    codes[k] = (uint8_t)(word >> bit % 8 & mask);
  }
}

}  // namespace

void place_codes(uint8_t *panel, const Layout &l, int codec, int lane, int64_t K, const uint8_t *codes) {
  const int bits = codec_bits(codec);
  for (int64_t k = 0; k < K; k++) {
    uint8_t *group = panel + l.codes_at + k / GROUP * l.group_bytes;
    const int within = (int)(k % GROUP), quad = within / 4, byte = lane * 4 + within % 4;
    const unsigned code = codes[k];
    if (bits == 8) {
      group[quad * 64 + byte] = (uint8_t)code;
    } else if (bits >= 4) {
      group[quad % 4 * 64 + byte] |= (uint8_t)((code & 15) << quad / 4 * 4);
      if (bits == 5) group[256 + byte] |= (uint8_t)(code >> 4 << quad);
      if (bits == 6) group[256 + quad % 2 * 64 + byte] |= (uint8_t)(code >> 4 << quad / 2 * 2);
    } else {
      group[quad % 2 * 64 + byte] |= (uint8_t)((code & 3) << quad / 2 * 2);
      if (bits == 3) group[128 + byte] |= (uint8_t)(code >> 2 << quad);
    }
  }
}

namespace {

void place_floats(uint8_t *panel, const Layout &l, const bd_weight &w, int lane, const uint8_t *row) {
  uint8_t *codes = panel + l.codes_at;
  for (int64_t k = 0; k < w.inputs; k++) {
    if (w.codec == BD_F32) std::memcpy(codes + (k * 16 + lane) * 4, row + k * 4, 4);
    else if (w.codec == BD_BF16) std::memcpy(codes + ((k / 2 * 16 + lane) * 2 + k % 2) * 2, row + k * 2, 2);
    else codes[k * 16 + lane] = row[k];
  }
}

void place_grid(uint8_t *panel, const Layout &l, const bd_weight &w, int lane, const float *scales, const uint8_t *zeros) {
  const int64_t groups = w.group ? w.inputs / w.group : 0;
  for (int64_t g = 0; g < groups; g++) {
    const uint16_t half = half_bits(scales[g]);
    std::memcpy(panel + (g * 16 + lane) * 2, &half, 2);
    if (w.grid == BD_GRID_ASYM) panel[l.zeros_at + g * 16 + lane] = zeros[g];
  }
}

}  // namespace

void pack(Pool &pool, const bd_weight &w, uint8_t *panels, const uint8_t *codes, const float *scales, const uint8_t *zeros) {
  const Layout l(w);
  const int bits = codec_bits(w.codec);
  const bool floats = w.codec <= BD_E5M2;
  const int64_t K = w.inputs, row_bytes = K * bits / 8, groups = w.group ? K / w.group : 0;
  pool.run([&](Team &team) {
    std::vector<uint8_t> row(K);
    team.share(l.panels, 4, [&](int64_t from, int64_t to) {
      for (int64_t p = from; p < to; p++) {
        uint8_t *panel = panels + p * l.panel_bytes;
        std::memset(panel, 0, l.panel_bytes);
        for (int lane = 0; lane < PANEL && p * PANEL + lane < w.outputs; lane++) {
          const int64_t n = p * PANEL + lane;
          const uint8_t *stored = codes + n * row_bytes;
          if (floats) {
            place_floats(panel, l, w, lane, stored);
            continue;
          }
          if (bits < 8) unpack_stream(stored, bits, K, row.data());
          place_codes(panel, l, w.codec, lane, K, bits < 8 ? row.data() : stored);
          if (groups) place_grid(panel, l, w, lane, scales + n * groups, zeros ? zeros + n * groups : nullptr);
        }
      }
    });
  });
}

}  // namespace bd
