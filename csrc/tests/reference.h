// Weights and operations in double precision, straight from their definitions in bitdraft.h, slow and plain.
//
// A result is an estimate: the exact value, and a bound on how far a kernel that computes in float32 may be from it.
// The bound follows the arithmetic: a chain of n sums is off by n half units of the last place of its terms'
// magnitudes, and an input so close to the middle of two codes that such an error decides between them may come out as
// either.
//
// Shape suffixes as in bitdraft.h: R rows, N outputs, K inputs, M inner size of the MLP.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../ops.h"
#include "check.h"

namespace test {

constexpr double UNIT = 0x1p-24;  // half a unit in the last place of a float32, relative

struct Estimate {
  double value, error;
};
using Estimates = std::vector<Estimate>;

struct Form {
  const char *name;
  int codec, grid, group;
  bool floats() const { return codec <= BD_E5M2; }
  int bits() const { return bd::codec_bits(codec); }
  bool packs() const { return grid <= BD_GRID_ASYM || grid == BD_GRID_SYM16; }  // through bd_pack
  int64_t unit() const {  // what the number of inputs is a multiple of
    return grid == BD_GRID_NONE ? 1 : grid == BD_GRID_K || grid == BD_GRID_K16 ? 256 : group;
  }
};

inline double half_value(uint16_t code) { return small_float(code, 5, 10, true); }

struct Free {
  void operator()(void *p) const { std::free(p); }
};

/// A weight [N, K]: its codes and scales as drawn, what they stand for, and its panels.
class Weight {
 public:
  Weight(bd_pool *pool, Form form, int activation, int64_t outputs, int64_t inputs, bool channel, Random &random)
      : form(form), N(outputs), K(inputs) {
    packed = {.codec = form.codec,
              .grid = form.grid,
              .activation = activation,
              .group = form.group,
              .rotation = 0,
              .outliers = 0,
              .outputs = N,
              .inputs = K,
              .panels = nullptr,
              .channel = nullptr,
              .columns = nullptr,
              .side = nullptr,
              .next = nullptr};
    for (int64_t i = 0; i < N * K; i++) codes_.push_back(draw(random));
    const int64_t groups = form.grid == BD_GRID_NONE ? 0 : form.grid == BD_GRID_K16 ? K / 16 : K / group();
    for (int64_t i = 0; i < N * groups; i++) {
      scales_.push_back(draw_half(random, -7));
      offsets_.push_back((uint16_t)(draw_half(random, -5) | (random.bits() & 0x8000)));
      zeros_.push_back((uint8_t)random.below(1 << form.bits()));
      small_.push_back((uint8_t)random.below(form.grid == BD_GRID_K ? 64 : 256));
      small_offset_.push_back((uint8_t)random.below(64));
    }
    if (channel) {
      for (int64_t n = 0; n < bd::round_up(N, 16); n++)
        channel_.push_back(n < N ? 0.25f + (float)random.uniform() : 0.0f);
      packed.channel = channel_.data();
    }
    const int64_t bytes = bd_weight_bytes(form.codec, form.grid, form.group, N, K);
    panels_.reset(static_cast<uint8_t *>(std::aligned_alloc(64, (size_t)bytes)));
    form.packs() ? pack(pool) : place();
    for (int64_t i = 0; i < N * K; i++) evaluate(i / K, i % K);
  }

  /// An entry without the output's own scale, and the magnitude of what a kernel adds up to get it.
  double value(int64_t n, int64_t k) const { return values_[(size_t)(n * K + k)]; }
  double magnitude(int64_t n, int64_t k) const { return magnitudes_[(size_t)(n * K + k)]; }
  double channel(int64_t n) const { return channel_.empty() ? 1.0 : channel_[(size_t)n]; }

  const Form form;
  const int64_t N, K;
  bd_weight packed;

 private:
  uint32_t draw(Random &random) const {
    if (form.codec == BD_F32) return bits_of_float(random.normal());
    if (form.codec == BD_BF16) return bits_of_float(random.normal()) >> 16;
    if (form.codec == BD_E4M3) return (uint32_t)(random.below(127) | random.below(2) << 7);
    if (form.codec == BD_E5M2) return (uint32_t)(random.below(76) | random.below(2) << 7);  // up to 8
    if (form.codec == BD_INT8 && bd::integer_inputs(packed.activation)) return (uint8_t)(random.below(255) - 127);
    return (uint32_t)random.below(1 << form.bits());
  }
  /// A positive float16 from 2^exponent to 2^(exponent + 2), or once in a while a subnormal one.
  static uint16_t draw_half(Random &random, int exponent) {
    if (random.below(50) == 0) return (uint16_t)random.below(1024);
    return (uint16_t)((exponent + 15) * 1024 + random.below(2048));
  }
  int64_t group() const { return form.grid == BD_GRID_K ? 32 : form.group; }

  void evaluate(int64_t n, int64_t k) {
    const uint32_t code = codes_[(size_t)(n * K + k)];
    double scale = 1, offset = 0, u = form.codec == BD_INT8 ? (double)(int8_t)code : (double)code;
    if (form.codec == BD_F32) u = float_of_bits(code);
    if (form.codec == BD_BF16) u = float_of_bits(code << 16);
    if (form.codec == BD_E4M3) u = small_float(code, 4, 3, false);
    if (form.codec == BD_E5M2) u = small_float(code, 5, 2, true);
    if (form.codec == BD_FP4) u = 12 + 2 * small_float(code, 2, 1, false);
    if (form.grid != BD_GRID_NONE) grid(n, k, scale, offset);
    values_.push_back(scale * u + offset);
    magnitudes_.push_back(std::fabs(scale * u) + std::fabs(offset));
  }

  void grid(int64_t n, int64_t k, double &scale, double &offset) const {
    const bool fine = form.grid == BD_GRID_K16;
    const int64_t groups = fine ? K / 16 : K / group();
    const size_t at = (size_t)(n * groups + (fine ? k / 16 : k / group())), first = (size_t)(n * groups + k / 256 * 8);
    scale = half_value(scales_[at]);
    switch (form.grid) {
      case BD_GRID_SYM16: offset = -12 * scale; break;
      case BD_GRID_SYM:
        offset = form.codec == BD_INT8 ? 0 : -scale * (form.codec == BD_FP4 ? 12 : 1 << (form.bits() - 1));
        break;
      case BD_GRID_ASYM: offset = -scale * zeros_[at]; break;
      case BD_GRID_MIN: offset = half_value(offsets_[at]); break;
      case BD_GRID_K:
        scale = half_value(scales_[first]) * small_[at];
        offset = -half_value(offsets_[first]) * small_offset_[at];
        break;
      default:
        scale = half_value(scales_[(size_t)(n * groups + k / 256 * 16)]) * (int8_t)small_[at];
        offset = -32 * scale;
    }
  }

  /// As ops.packed.Packed holds codes and scales, through bd_pack.
  void pack(bd_pool *pool) {
    std::vector<uint8_t> stream((size_t)(N * K * form.bits() / 8));
    for (int64_t i = 0; i < N * K; i++)
      for (int b = 0; b < form.bits(); b++) {
        const int64_t bit = i * form.bits() + b;
        stream[(size_t)(bit / 8)] |= (uint8_t)((codes_[(size_t)i] >> b & 1) << bit % 8);
      }
    std::vector<float> scales;
    for (uint16_t half : scales_) scales.push_back((float)half_value(half));
    const int code = bd_pack(pool, &packed, panels_.get(), stream.data(), scales.empty() ? nullptr : scales.data(),
                             form.grid == BD_GRID_ASYM ? zeros_.data() : nullptr);
    check(code == BD_OK, "bd_pack of %s [%ld, %ld]: %s", form.name, (long)N, (long)K, bd_error());
  }

  /// The grids of GGUF, laid out as layout.h says.
  void place() {
    const bd::Layout l(packed);
    packed.panels = panels_.get();
    std::memset(panels_.get(), 0, (size_t)(l.panels * l.panel_bytes));
    std::vector<uint8_t> row((size_t)K);
    for (int64_t n = 0; n < N; n++) {
      uint8_t *panel = panels_.get() + n / 16 * l.panel_bytes;
      const int64_t lane = n % 16;
      for (int64_t k = 0; k < K; k++) row[(size_t)k] = (uint8_t)codes_[(size_t)(n * K + k)];
      bd::place_codes(panel, l, form.codec, (int)lane, K, row.data());
      const auto put = [&](int64_t at, uint16_t half) { std::memcpy(panel + at + lane * 2, &half, 2); };
      if (form.grid == BD_GRID_MIN)
        for (int64_t g = 0; g < K / form.group; g++) {
          put(g * 64, scales_[(size_t)(n * (K / form.group) + g)]);
          put(g * 64 + 32, offsets_[(size_t)(n * (K / form.group) + g)]);
        }
      for (int64_t b = 0; form.grid == BD_GRID_K && b < K / 256; b++) {
        put(b * 320, scales_[(size_t)(n * (K / 32) + b * 8)]);
        put(b * 320 + 32, offsets_[(size_t)(n * (K / 32) + b * 8)]);
        for (int64_t g = 0; g < 8; g++) {
          panel[b * 320 + 64 + g * 32 + lane] = small_[(size_t)(n * (K / 32) + b * 8 + g)];
          panel[b * 320 + 64 + g * 32 + 16 + lane] = small_offset_[(size_t)(n * (K / 32) + b * 8 + g)];
        }
      }
      for (int64_t b = 0; form.grid == BD_GRID_K16 && b < K / 256; b++) {
        put(b * 288, scales_[(size_t)(n * (K / 16) + b * 16)]);
        for (int64_t g = 0; g < 16; g++)
          panel[b * 288 + 32 + g * 16 + lane] = small_[(size_t)(n * (K / 16) + b * 16 + g)];
      }
    }
  }

  std::vector<double> values_, magnitudes_;  // [N, K]
  std::vector<uint32_t> codes_;              // [N, K]
  std::vector<uint16_t> scales_, offsets_;   // [N, G] float16
  std::vector<uint8_t> zeros_, small_, small_offset_;
  std::vector<float> channel_;
  std::unique_ptr<uint8_t, Free> panels_;
};

inline Estimates exactly(const float *x, int64_t count) {
  Estimates y;
  for (int64_t i = 0; i < count; i++) y.push_back({x[i], 0});
  return y;
}

inline Estimates normalised(const float *x, const float *norm, float eps, int64_t K) {
  double squares = 0;
  for (int64_t k = 0; k < K; k++) squares += (double)x[k] * x[k];
  const double r = 1 / std::sqrt(squares / (double)K + eps);
  Estimates y;
  for (int64_t k = 0; k < K; k++) {
    const double v = x[k] * r * norm[k];
    y.push_back({v, std::fabs(v) * UNIT * ((double)K / 8 + 12)});  // sixteen chains of K / 16 squares, rounded twice
  }
  return y;
}

/// The same of numbers with bounds: r is off by the share that the errors have in the mean square.
inline Estimates normalised(const Estimates &x, const float *norm, float eps) {
  double squares = 0, moved = 0;
  for (const Estimate &e : x) squares += e.value * e.value, moved += (std::fabs(e.value) + e.error) * e.error;
  const double K = (double)x.size(), mean = squares / K + eps, r = 1 / std::sqrt(mean);
  Estimates y;
  for (const Estimate &e : x) {
    const double by = r * *norm++, v = e.value * by, share = moved / K / mean;
    y.push_back({v, e.error * std::fabs(by) * (1 + share) + std::fabs(v) * (share + UNIT * (K / 8 + 12))});
  }
  return y;
}

/// The nearest multiple of the step that a float with so many bits of fraction has at x. least: exponent of the least
/// normal number.
inline double to_fraction(double x, int fraction_bits, int least) {
  if (x == 0) return 0;
  const int exponent = std::max(std::ilogb(x), least);
  const double step = std::ldexp(1.0, exponent - fraction_bits);
  return std::nearbyint(x / step) * step;
}

inline double to_activation(double x, int activation) {
  switch (activation) {
    case BD_ACT_INT8: case BD_ACT_INT8_G32: return std::nearbyint(x);
    case BD_ACT_E4M3: return to_fraction(x, 3, -6);
    case BD_ACT_E5M2: return to_fraction(x, 2, -14);
    default: return to_fraction(x, 7, -126);
  }
}

/// A row as an operation rounds it. INT8 and the float8 kinds are scaled by the row's largest magnitude, INT8_G32 by the
/// largest of each 32 inputs.
inline Estimates rounded(const Estimates &x, int activation) {
  if (activation == BD_ACT_F32) return x;
  if (activation == BD_ACT_INT8_G32) {
    Estimates all;
    for (size_t k = 0; k < x.size(); k += 32) {
      const Estimates group(x.begin() + (long)k, x.begin() + (long)std::min(k + 32, x.size()));
      for (const Estimate &e : rounded(group, BD_ACT_INT8)) all.push_back(e);
    }
    return all;
  }
  Estimate largest = {0, 0};
  for (const Estimate &e : x)
    if (std::fabs(e.value) > largest.value) largest = {std::fabs(e.value), e.error};
  double scale = 1, relative = 0;
  if (activation != BD_ACT_BF16 && largest.value > 0) {
    scale = largest.value / (activation == BD_ACT_INT8 ? 127 : activation == BD_ACT_E4M3 ? 448 : 57344);
    relative = largest.error / largest.value + 3 * UNIT;
  }
  Estimates y;
  for (const Estimate &e : x) {
    const double q = e.value / scale, error = e.error / scale + std::fabs(q) * relative;
    const double code = to_activation(q, activation);
    const double spread =
        std::max(to_activation(q + error, activation) - code, code - to_activation(q - error, activation));
    y.push_back({code * scale, spread * scale + std::fabs(code) * scale * relative});
  }
  return y;
}

/// x W^T for one row, rounded already; [N].
inline Estimates product(const Weight &w, const Estimates &x) {
  Estimates y;
  for (int64_t n = 0; n < w.N; n++) {
    double sum = 0, error = 0;
    for (int64_t k = 0; k < w.K; k++) {
      const Estimate &e = x[(size_t)k];
      const double v = w.value(n, k), magnitude = w.magnitude(n, k);
      sum += v * e.value;
      error += std::fabs(v) * e.error + magnitude * (std::fabs(e.value) + e.error) * UNIT * ((double)w.K + 8);
    }
    y.push_back({sum * w.channel(n), error * w.channel(n)});
  }
  return y;
}

inline void add(Estimates &y, const float *x) {
  for (Estimate &e : y) {
    e.value += *x++;
    e.error += UNIT * (std::fabs(e.value) + e.error);
  }
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// act(gate) * up for a row of gates and ups beside each other. act(g) = g sigmoid(t), with t = g for SiLU and
/// 2 sqrt(2 / pi) (g + 0.044715 g^3) for GELU's tanh form. |silu'(g)| <= sigmoid(g) (1 + |g|), and neither slope is above
/// 1.13 anywhere; t comes with a few roundings of its own, that move act(g) by at most |g t| sigmoid(t) (1 - sigmoid(t))
/// times those. Where e^-t would leave float32, act may be anything below |g| e^-87.
inline Estimates gated(const Estimates &both, int gate = BD_GATE_SILU) {
  const size_t M = both.size() / 2;
  Estimates y;
  for (size_t i = 0; i < M; i++) {
    const Estimate g = both[i], u = both[M + i];
    const bool tanh = gate == BD_GATE_GELU_TANH;
    const double cubic = g.value * (1 + 0.044715 * g.value * g.value);
    const double t = tanh ? 2 * std::sqrt(2 / 3.14159265358979323846) * cubic : g.value;
    const double act = g.value * sigmoid(t), turn = tanh ? 8 * UNIT * std::fabs(g.value * t) * sigmoid(t) * sigmoid(-t) : 0;
    const double silu_slope = std::min(1.1, sigmoid(g.value + g.error) * (1 + std::fabs(g.value) + g.error));
    const double slope = tanh ? 1.13 : silu_slope;
    const double error = slope * g.error + turn + 10 * UNIT * std::fabs(act) + std::fabs(g.value) * std::exp(-87.0);
    y.push_back({act * u.value, error * (std::fabs(u.value) + u.error) + std::fabs(act) * u.error});
  }
  return y;
}

/// Results of several rows: each within its bound, and the bounds small enough, on average, to show a wrong code or
/// scale.
class Comparison {
 public:
  explicit Comparison(std::string what) : what_(std::move(what)) {}
  void row(int64_t row, const float *got, const Estimates &expected) {
    for (size_t i = 0; i < expected.size(); i++) {
      const Estimate &e = expected[i];
      check(std::fabs(got[i] - e.value) <= e.error, "%s, row %ld, output %zu: %.9g. Expected %.9g, give or take %.2g.",
            what_.c_str(), (long)row, i, got[i], e.value, e.error);
      size_ += std::fabs(e.value), error_ += e.error;
    }
  }
  void finish(double tightness) const {
    check(error_ <= tightness * size_, "%s: bounds of %.2g for values of %.2g tell nothing", what_.c_str(), error_,
          size_);
  }

 private:
  std::string what_;
  double size_ = 0, error_ = 0;
};

}  // namespace test
