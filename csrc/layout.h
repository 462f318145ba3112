// How a weight [N, K] lies in memory: panels of 16 outputs, each with its scales first and then its codes, input by input.
//
// K is padded with zero inputs to a multiple of 32, N with zero outputs to one of 16. All instruction sets share this
// layout: a panel is one AVX-512 register wide, two AVX2 registers, or a loop.
//
//   codes      F32   [K][16] float
//              BF16  [K / 2][16][2]          a 32-bit lane holds two inputs of one output
//              E4M3, E5M2  [K][16] bytes
//              INT8  [K / 4][16][4] int8     a 32-bit lane holds four inputs of one output
//              INT4  [K / 32][4][16][4]      low nibbles: quads 0-3 of the group's inputs, high nibbles: quads 4-7
//              INT2  [K / 32][2][16][4]      bit pair i of row j: quad 2 i + j
//              INT3, INT5  the planes of INT2 or INT4, then [16][4] bytes whose bit j belongs to quad j
//              INT6  the planes of INT4, then those of INT2 with the upper two bits
//              FP4   as INT4
//   grid       SYM   [G][16] float16
//              ASYM  [G][16] float16, then [G][16] zero points
//              MIN   [G][2][16] float16: scales, offsets
//              K     [K / 256]{float16 d[16], m[16]; uint8 [8]{s[16], t[16]}}
//              K16   [K / 256]{float16 d[16]; int8 [16][16]}
//              SYM16 [K / 16][16] float16
#pragma once
#include "bitdraft.h"

namespace bd {

// Static: this is compiled for several instruction sets, and the linker must not make one copy serve them all.

constexpr int PANEL = 16;
constexpr int GROUP = 32;  // inputs that a kernel takes at once
constexpr int64_t MAX_INPUTS = 1 << 21;  // so that the product of two numbers of groups is below 2^32

static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static inline int codec_bits(int codec) {
  constexpr int bits[] = {32, 16, 8, 8, 2, 3, 4, 5, 6, 8, 4};
  return bits[codec];
}

static inline bool integer_inputs(int activation) { return activation == BD_ACT_INT8 || activation == BD_ACT_INT8_G32; }

// Whether there are kernels for these codes with these scales.
static inline bool known_form(int codec, int grid) {
  switch (grid) {
    case BD_GRID_NONE: return codec <= BD_E5M2 || codec == BD_INT8;
    case BD_GRID_SYM: return codec >= BD_INT2;
    case BD_GRID_ASYM: return codec >= BD_INT2 && codec != BD_INT5 && codec != BD_INT8 && codec != BD_FP4;
    case BD_GRID_K16: return codec == BD_INT6;
    case BD_GRID_SYM16: return codec == BD_FP4;
    default: return codec == BD_INT4 || codec == BD_INT5;
  }
}

struct Layout {
  int64_t panels, inputs;       // inputs: K, padded
  int64_t zeros_at, codes_at;   // bytes from a panel's start
  int64_t group_bytes, panel_bytes;  // codes of 32 inputs; all of a panel

  Layout(int codec, int grid, int group, int64_t N, int64_t K) {
    panels = round_up(N, PANEL) / PANEL;
    inputs = round_up(K, GROUP);
    const int64_t groups = group ? inputs / group : 0;
    zeros_at = codes_at = 0;
    if (grid == BD_GRID_SYM || grid == BD_GRID_SYM16) codes_at = groups * 32;
    if (grid == BD_GRID_ASYM) zeros_at = round_up(groups * 32, 64), codes_at = zeros_at + groups * 16;
    if (grid == BD_GRID_MIN) codes_at = groups * 64;
    if (grid == BD_GRID_K) codes_at = inputs / 256 * 320;
    if (grid == BD_GRID_K16) codes_at = inputs / 256 * 288;
    codes_at = round_up(codes_at, 64);
    group_bytes = PANEL * GROUP / 8 * codec_bits(codec);
    panel_bytes = codes_at + inputs / GROUP * group_bytes;
  }
  explicit Layout(const bd_weight &w) : Layout(w.codec, w.grid, w.group, w.outputs, w.inputs) {}
};

// Outputs of all parts.
static inline int64_t outputs_of(const bd_weight &w) {
  int64_t count = 0;
  for (const bd_weight *part = &w; part; part = part->next) count += part->outputs;
  return count;
}

}  // namespace bd
