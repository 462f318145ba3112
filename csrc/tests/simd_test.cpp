// The vectors of one instruction set, BD_ISA, against what each operation means for a single lane.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "check.h"

#include BD_SIMD

#include "../ops.h"
#include "../kernels/math.inl"
#include "../kernels/rows.inl"

namespace {

using test::check;
using test::float_of_bits;
using test::same;
using test::small_float;

struct Floats {
  float v[16];
};
struct Ints {
  int32_t v[16];
};
Floats lanes(Vec a) {
  Floats r;
  vec_store(r.v, a);
  return r;
}
Ints lanes(Int a) {
  const Floats f = lanes(int_as_vec(a));
  Ints r;
  memcpy(&r, &f, 64);
  return r;
}
Int from(const Ints &a) { return int_load(a.v); }

/// Lane i is expected(i).
template <class Expected> void each(const char *name, Vec got, Expected expected) {
  const Floats g = lanes(got);
  for (int i = 0; i < 16; i++) {
    const float e = expected(i);
    if (!check(same(g.v[i], e), "%s lane %d: %a. Expected %a.", name, i, g.v[i], e)) return;
  }
}
template <class Expected> void each(const char *name, Int got, Expected expected) {
  const Ints g = lanes(got);
  for (int i = 0; i < 16; i++) {
    const int32_t e = (int32_t)expected(i);
    if (!check(g.v[i] == e, "%s lane %d: %d. Expected %d.", name, i, g.v[i], e)) return;
  }
}

/// Floats of every kind: any bits, numbers about 1, and those at the edges.
float any_float(test::Random &random) {
  static const float edges[] = {0.0f,       -0.0f,           1.0f,     -1.0f,     0.5f, 2.5f, -3.5f, 0x1p-149f,
                                -0x1p-126f, 0x1.fffffep127f, INFINITY, -INFINITY, NAN};
  switch (random.below(4)) {
    case 0: return edges[random.below(13)];
    case 1: return float_of_bits((uint32_t)random.bits());
    default: return random.normal() * 100;
  }
}

void arithmetic() {
  test::Random random(1);
  int fused = 0, twice = 0;
  for (int round = 0; round < 5000; round++) {
    Floats a, b, c;
    for (int i = 0; i < 16; i++) a.v[i] = any_float(random), b.v[i] = any_float(random), c.v[i] = any_float(random);
    const Vec x = vec_load(a.v), y = vec_load(b.v), z = vec_load(c.v);
    each("vec_load", x, [&](int i) { return a.v[i]; });
    each("vec_set", vec_set(a.v[3]), [&](int) { return a.v[3]; });
    each("vec_zero", vec_zero(), [&](int) { return 0.0f; });
    each("vec_add", vec_add(x, y), [&](int i) { return a.v[i] + b.v[i]; });
    each("vec_sub", vec_sub(x, y), [&](int i) { return a.v[i] - b.v[i]; });
    each("vec_mul", vec_mul(x, y), [&](int i) { return a.v[i] * b.v[i]; });
    each("vec_div", vec_div(x, y), [&](int i) { return a.v[i] / b.v[i]; });
    each("vec_max", vec_max(x, y), [&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
    each("vec_min", vec_min(x, y), [&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
    each("vec_swap 1", vec_swap<1>(x), [&](int i) { return a.v[i ^ 1]; });
    each("vec_swap 2", vec_swap<2>(x), [&](int i) { return a.v[i ^ 2]; });
    each("vec_swap 4", vec_swap<4>(x), [&](int i) { return a.v[i ^ 4]; });
    each("vec_swap 8", vec_swap<8>(x), [&](int i) { return a.v[i ^ 8]; });
    each("vec_abs", vec_abs(x), [&](int i) { return fabsf(a.v[i]); });
    each("vec_round", vec_round(x), [&](int i) { return nearbyintf(a.v[i]); });
    each("vec_below", vec_below(x, y, z, x), [&](int i) { return a.v[i] < b.v[i] ? c.v[i] : a.v[i]; });
    each("vec_bits", vec_bits(x), [&](int i) { return test::bits_of_float(a.v[i]); });
    const Floats f = lanes(vec_fma(x, y, z));
    for (int i = 0; i < 16; i++) {
      const float once = fmaf(a.v[i], b.v[i], c.v[i]), two = a.v[i] * b.v[i] + c.v[i];
      check(same(f.v[i], once) || same(f.v[i], two), "vec_fma: %a * %a + %a = %a", a.v[i], b.v[i], c.v[i], f.v[i]);
      if (!same(once, two)) same(f.v[i], once) ? fused++ : twice++;
    }
  }
  check(fused + twice > 1000 && (!fused || !twice), "vec_fma rounds once in %d lanes and twice in %d", fused, twice);
}

void integers() {
  test::Random random(2);
  for (int round = 0; round < 2000; round++) {
    Ints a, b;
    Floats f;
    int8_t s8[16];
    uint16_t u16[16];
    for (int i = 0; i < 16; i++) {
      a.v[i] = (int32_t)random.bits(), b.v[i] = (int32_t)random.bits();
      f.v[i] = (float)(random.uniform() * 2 - 1) * (round % 2 ? 200.0f : 0x1p31f);
      if (round % 3 == 0) f.v[i] = (float)random.below(1000) - 500.5f;  // ties
    }
    const Int x = from(a), y = from(b);
    each("int_load", x, [&](int i) { return a.v[i]; });
    each("int_as_vec", int_as_vec(x), [&](int i) { return float_of_bits((uint32_t)a.v[i]); });
    each("int_set", int_set(a.v[5]), [&](int) { return a.v[5]; });
    each("int_add", int_add(x, y), [&](int i) { return (uint32_t)a.v[i] + (uint32_t)b.v[i]; });
    each("int_and", int_and(x, y), [&](int i) { return a.v[i] & b.v[i]; });
    each("int_or", int_or(x, y), [&](int i) { return a.v[i] | b.v[i]; });
    each("int_left", int_left<16>(x), [&](int i) { return (uint32_t)a.v[i] << 16; });
    each("int_left", int_left<0>(x), [&](int i) { return a.v[i]; });
    each("int_right", int_right<20>(x), [&](int i) { return (uint32_t)a.v[i] >> 20; });
    each("int_right", int_right<0>(x), [&](int i) { return a.v[i]; });
    each("int_to_vec", int_to_vec(x), [&](int i) { return (float)a.v[i]; });
    each("vec_to_int", vec_to_int(vec_load(f.v)), [&](int i) { return (int32_t)nearbyintf(f.v[i]); });
    each("u8_load", u8_load((const uint8_t *)a.v + 1), [&](int i) { return ((const uint8_t *)a.v + 1)[i]; });
    each("s8_load", s8_load((const int8_t *)a.v + 1), [&](int i) { return ((const int8_t *)a.v + 1)[i]; });
    each("u16_load", u16_load((const uint16_t *)a.v + 1), [&](int i) { return ((const uint16_t *)a.v + 1)[i]; });
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += (uint32_t)a.v[i] >> 5;
    check((uint32_t)int_sum(int_right<5>(x)) == sum, "int_sum");
    Ints bytes, words;
    for (int i = 0; i < 16; i++) bytes.v[i] = (int8_t)a.v[i], words.v[i] = (uint16_t)a.v[i];
    int_store_s8(s8, from(bytes));
    int_store_u16(u16, from(words));
    for (int i = 0; i < 16; i++) check(s8[i] == bytes.v[i] && u16[i] == words.v[i], "int_store lane %d", i);
  }
}

void sums() {
  test::Random random(3);
  for (int round = 0; round < 5000; round++) {
    Floats a, s;
    for (int i = 0; i < 16; i++) a.v[i] = random.normal() * (float)exp2((double)random.below(30));
    s = a;
    for (int width = 8; width; width /= 2)
      for (int i = 0; i < width; i++) s.v[i] += s.v[i + width];
    const float sum = vec_sum(vec_load(a.v)), largest = vec_largest(vec_load(a.v));
    check(same(sum, s.v[0]), "vec_sum: %a. Expected %a.", sum, s.v[0]);
    check(same(largest, *std::max_element(a.v, a.v + 16)), "vec_largest: %a", largest);
  }
}

void small_floats() {
  for (unsigned first = 0; first < 65536; first += 16) {
    uint16_t halves[16];
    for (unsigned i = 0; i < 16; i++) halves[i] = (uint16_t)(first + i);
    each("half_load", half_load(halves), [&](int i) { return (float)small_float(first + (unsigned)i, 5, 10, true); });
  }
  for (unsigned first = 0; first < 256; first += 16) {
    uint8_t codes[16];
    for (unsigned i = 0; i < 16; i++) codes[i] = (uint8_t)(first + i);
    // 0x7f and 0xff, which stand for no number, would be 480 and -480: a weight holds neither.
    each("e4m3_load", e4m3_load(codes),
         [&](int i) { return (float)small_float(first + (unsigned)i, 4, 3, false) / 256; });
    each("e5m2_load", e5m2_load(codes), [&](int i) { return (float)small_float(first + (unsigned)i, 5, 2, true); });
    uint16_t pairs[32];
    for (unsigned i = 0; i < 32; i++) pairs[i] = (uint16_t)(first * 257 + i * 2049);
    each("bf16_low", bf16_low(int_load(pairs)), [&](int i) { return float_of_bits((uint32_t)pairs[2 * i] << 16); });
    each("bf16_high", bf16_high(int_load(pairs)),
         [&](int i) { return float_of_bits((uint32_t)pairs[2 * i + 1] << 16); });
    each("bf16_load", bf16_load(pairs), [&](int i) { return float_of_bits((uint32_t)pairs[i] << 16); });
  }
}

void exponentials() {
  const uint32_t stride = 769;  // prime: the low bits of the fraction take every value
  double worst = 0;
  for (uint32_t sign = 0; sign < 2; sign++)
    for (uint32_t at = test::bits_of_float(0x1p-30f); at < test::bits_of_float(87.0f) - 16 * stride;
         at += 16 * stride) {
      Floats x;
      for (uint32_t i = 0; i < 16; i++) x.v[i] = float_of_bits(sign << 31 | (at + i * stride));
      const Floats got = lanes(vec_exp(vec_load(x.v)));
      for (int i = 0; i < 16; i++) {
        const double exact = exp((double)x.v[i]);
        const double ulp = ldexp(1.0, ilogb(exact) - 23);
        const double error = fabs(got.v[i] - exact) / ulp;
        if (error > worst) worst = error;
        check(error <= 2, "vec_exp(%a): %a is off by %.2f units in the last place", x.v[i], got.v[i], error);
      }
    }
  printf("vec_exp is off by %.2f units in the last place at most\n", worst);
  Floats edge = {{0.0f, -0.0f, -INFINITY, -1e30f, -87.5f, 88.0f, -87.0f}};
  const Floats got = lanes(vec_exp(vec_load(edge.v)));
  check(got.v[0] == 1 && got.v[1] == 1, "vec_exp(0): %a, %a", got.v[0], got.v[1]);
  check(got.v[2] == 0 && got.v[3] == 0 && got.v[4] == 0, "vec_exp below -87: %a, %a, %a", got.v[2], got.v[3], got.v[4]);
  check(fabs(got.v[5] / exp(88.0) - 1) < 3e-7, "vec_exp(88): %a", got.v[5]);
  check(fabs(got.v[6] / exp(-87.0) - 1) < 3e-7, "vec_exp(-87): %a", got.v[6]);
}

/// To the nearest float without the lowest `dropped` bits, by distance, ties to the even one.
float shortened(float x, int dropped) {
  const uint32_t bits = test::bits_of_float(x), low = bits >> dropped << dropped;
  const uint32_t high = low + (1u << dropped);
  const double down = fabs((double)x - float_of_bits(low));
  const double step = fabs((double)float_of_bits(low) - (double)float_of_bits(low - (1u << dropped)));
  const double up = isinf(float_of_bits(high)) ? step - down : fabs((double)x - float_of_bits(high));
  if (down == up) return float_of_bits(low >> dropped & 1 ? high : low);
  return float_of_bits(down < up ? low : high);
}

template <int DROPPED> void shorten() {
  test::Random random(4);
  for (int round = 0; round < 20000; round++) {
    Floats x;
    for (int i = 0; i < 16; i++) {
      uint32_t bits = (uint32_t)random.bits();
      if (i % 4 == 0) bits = (bits >> DROPPED << DROPPED) + (1u << (DROPPED - 1)) + (uint32_t)(i % 3) - 1;  // at a tie
      if ((bits >> 23 & 255) == 255) bits ^= 1u << 30;                                                      // finite
      if ((bits & 0x7fffffff) < 2u << DROPPED) bits |= 4u << DROPPED;
      x.v[i] = float_of_bits(bits);
    }
    each("vec_shorten", vec_shorten<DROPPED>(vec_load(x.v)), [&](int i) { return shortened(x.v[i], DROPPED); });
  }
  const Floats edge = {{0.0f, -0.0f, 0x1p-149f, 0x1.fffffep127f}};
  const Floats got = lanes(vec_shorten<DROPPED>(vec_load(edge.v)));
  check(same(got.v[0], 0.0f) && same(got.v[1], -0.0f) && got.v[2] == 0, "vec_shorten of zeros");
  check(isinf(got.v[3]), "vec_shorten of the largest float: %a", got.v[3]);
}

template <int DROPPED> void float8(int exponent_bits, int fraction_bits, float largest) {
  std::vector<float> values;
  for (unsigned code = 0; code < 128; code++) {
    const double value = small_float(code, exponent_bits, fraction_bits, false);
    if (value <= largest) values.push_back((float)value);
  }
  test::Random random(5);
  const auto compare = [&](float x) {
    size_t best = 0;
    for (size_t k = 1; k < values.size(); k++) {
      const double before = fabs(fabs((double)x) - values[best]), now = fabs(fabs((double)x) - values[k]);
      if (now < before || (now == before && k % 2 == 0)) best = k;
    }
    const float got = lanes(round_float8<DROPPED>(vec_set(x))).v[7], expected = values[best];
    check(fabsf(got) == expected && (got == 0 || (got < 0) == (x < 0)), "round_float8<%d>(%a): %a. Expected %a.",
          DROPPED, x, got, copysignf(expected, x));
  };
  for (size_t k = 0; k + 1 < values.size(); k++) {
    const float low = values[k], high = values[k + 1], middle = (low + high) / 2;
    for (float x : {low, nextafterf(low, high), nextafterf(middle, low), middle, nextafterf(middle, high),
                    nextafterf(high, low), high, low + (high - low) * (float)random.uniform()}) {
      compare(x);
      compare(-x);
    }
  }
}

/// The code of an input of a group, read from the planes as layout.h describes them.
int code_of(int bits, const uint8_t *p, int input, int output) {
  const int quad = input / 4, byte = output * 4 + input % 4;
  if (bits == 8) return (int8_t)p[quad * 64 + byte];
  if (bits < 4) {
    const int low = p[quad % 2 * 64 + byte] >> quad / 2 * 2 & 3;
    return bits == 2 ? low : low | (p[128 + byte] >> quad & 1) << 2;
  }
  const int low = p[quad % 4 * 64 + byte] >> quad / 4 * 4 & 15;
  if (bits == 5) return low | (p[256 + byte] >> quad & 1) << 4;
  if (bits == FP4) return 12 + (int)(2 * small_float((unsigned)low, 2, 1, false));
  if (bits == 6) return low | (p[256 + quad % 2 * 64 + byte] >> quad / 2 * 2 & 3) << 4;
  return low;
}

template <int BITS, int WHICH> void inputs(const uint8_t *p) {
  const Codes<BITS> codes(p);
  for (int quad = 0; quad < 8; quad++)
    each("Codes::input", codes.template input<WHICH>(quad),
         [&](int i) { return code_of(BITS, p, quad * 4 + WHICH, i); });
}

/// Scales are powers of two and offsets multiples of them, so that nothing rounds and every dot shows.
template <int BITS, bool STEPS, int FROM, int TO> void dots(const uint8_t *p, const int8_t *q, int rows) {
  Floats scale, offset;
  float sums[32] = {}, steps[32], before[32][16];
  Vec acc[32];
  for (int i = 0; i < 16; i++) scale.v[i] = ldexpf(1, i % 4 - 2), offset.v[i] = BITS == 8 ? 0 : -3.0f * scale.v[i];
  for (int m = 0; m < rows; m++) {
    for (int k = FROM * 4; k < TO * 4; k++) sums[m] += q[m * 32 + k];
    for (int i = 0; i < 16; i++) before[m][i] = (float)(m * 16 + i);
    steps[m] = ldexpf(1, m % 3 - 1);
    acc[m] = vec_load(before[m]);
  }
  group_dot<BITS, STEPS, FROM, TO>(p, rows, q, sums, steps, vec_load(scale.v), vec_load(offset.v), acc);
  for (int m = 0; m < rows; m++)
    each("group_dot", acc[m], [&](int i) {
      int dot = 0;
      for (int k = FROM * 4; k < TO * 4; k++) dot += code_of(BITS, p, k, i) * q[m * 32 + k];
      return before[m][i] + ((float)dot * scale.v[i] + sums[m] * offset.v[i]) * (STEPS ? steps[m] : 1);
    });
}

template <int BITS> void groups() {
  test::Random random(6 + BITS);
  alignas(64) uint8_t p[width_of(BITS) * 64];
  int8_t q[32 * 32];
  for (int round = 0; round < 60; round++) {
    for (auto &byte : p) byte = (uint8_t)random.bits();
    inputs<BITS, 0>(p), inputs<BITS, 1>(p), inputs<BITS, 2>(p), inputs<BITS, 3>(p);
    for (auto &x : q) x = (int8_t)(random.below(255) - 127);
    if (round % 6 == 1) memset(p, 0xff, sizeof p);
    if (round % 6 == 2) memset(p, 0x81, sizeof p);
    if (round % 6 == 3) memset(p, 0x7f, sizeof p);
    if (round % 6 == 4) memset(p, round % 4 ? 0x80 : 0x77, sizeof p);
    if (round % 3 == 1) memset(q, 127, sizeof q);
    if (round % 3 == 2) memset(q, -127, sizeof q);
    const int rows = round % 10 ? round % 10 : 32;
    dots<BITS, false, 0, 8>(p, q, rows), dots<BITS, false, 0, 4>(p, q, rows), dots<BITS, false, 4, 8>(p, q, rows);
    dots<BITS, true, 0, 8>(p, q, rows), dots<BITS, true, 0, 4>(p, q, rows), dots<BITS, true, 4, 8>(p, q, rows);
  }
}

/// Whole numbers, whose sums are exact: entry j of block b is the sum of x[i] * (-1)^(bits that i and j share) / root.
void rotation(int block) {
  test::Random random(7);
  float x[256], y[256];
  for (int i = 0; i < 256; i++) x[i] = y[i] = (float)(random.below(2001) - 1000);
  rotate_row(y, 256, block);
  for (int j = 0; j < 256; j++) {
    int sum = 0;
    for (int i = 0; i < block; i++) {
      const int value = (int)x[j / block * block + i];
      sum += __builtin_parity((unsigned)(i & j % block)) ? -value : value;
    }
    const float expected = (float)sum * (float)(1.0 / sqrt((double)block));
    if (!check(same(y[j], expected), "rotate_row %d entry %d: %a. Expected %a.", block, j, y[j], expected)) return;
  }
}

[[gnu::noinline]] int run() {
  arithmetic();
  integers();
  sums();
  small_floats();
  exponentials();
  shorten<16>(), shorten<20>(), shorten<21>();
  float8<20>(4, 3, 448.0f), float8<21>(5, 2, 57344.0f);
  groups<2>(), groups<3>(), groups<4>(), groups<5>(), groups<6>(), groups<8>(), groups<FP4>();
  for (int block : {32, 64, 128}) rotation(block);
  return test::result(BD_ISA);
}

}  // namespace

int main() { return bd::find_kernels(BD_ISA) ? run() : test::SKIPPED; }
