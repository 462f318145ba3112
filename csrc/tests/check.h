// What the C++ tests share: a check that says what failed, and the same random numbers on every run.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>

namespace test {

constexpr int SKIPPED = 77;  // exit status that ctest takes for a test that this machine cannot run

inline int checks = 0, failures = 0;
inline std::map<const char *, int> kinds;  // failures by message

/// Count a check; on failure say what was expected, as printf would, a few times for each message.
[[gnu::format(printf, 2, 3)]] inline bool check(bool ok, const char *format, ...) {
  checks++;
  if (ok) return true;
  failures++;
  if (++kinds[format] > 8) return false;
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "FAILED ");
  std::vfprintf(stderr, format, arguments);
  std::fprintf(stderr, "\n");
  va_end(arguments);
  return false;
}

/// The exit status of a test program.
inline int result(const char *name) {
  std::printf("%s: %d checks, %d failures\n", name, checks, failures);
  return failures || !checks ? 1 : 0;
}

inline uint32_t bits_of_float(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float float_of_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
/// The same to the bit; whatever is not a number equals whatever is not a number.
inline bool same(float a, float b) { return bits_of_float(a) == bits_of_float(b) || (std::isnan(a) && std::isnan(b)); }

/// The value of a small float: a sign, then exponent and fraction. The highest exponent is that of infinity, or like
/// others.
inline double small_float(unsigned code, int exponent_bits, int fraction_bits, bool infinities) {
  const unsigned ones = (1u << exponent_bits) - 1, exponent = code >> fraction_bits & ones;
  const unsigned fraction = code & ((1u << fraction_bits) - 1), unit = 1u << fraction_bits;
  const double sign = code >> (exponent_bits + fraction_bits) & 1 ? -1 : 1;
  if (infinities && exponent == ones) return fraction ? NAN : sign * INFINITY;
  const int scale = (int)std::max(exponent, 1u) - (int)(ones / 2) - fraction_bits;
  return sign * std::ldexp(exponent ? unit + fraction : fraction, scale);
}

/// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return (int64_t)(bits() % (uint64_t)n); }
  double uniform() { return (double)(bits() >> 11) * 0x1p-53; }  // [0, 1)
  float normal() { return (float)(std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform())); }

 private:
  uint64_t state_;
};

}  // namespace test
