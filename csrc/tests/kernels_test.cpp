// Products of every format through the C interface, for one instruction set: against a reference in double precision,
// and to the bit against themselves, whatever rows and threads are beside a row.
#include <algorithm>
#include <functional>

#include "reference.h"

namespace {

using test::check;
using test::Estimates;
using test::Form;
using test::Weight;

const Form FORMS[] = {
    {"f32", BD_F32, BD_GRID_NONE, 0},
    {"bf16", BD_BF16, BD_GRID_NONE, 0},
    {"e4m3", BD_E4M3, BD_GRID_NONE, 0},
    {"e5m2", BD_E5M2, BD_GRID_NONE, 0},
    {"int8", BD_INT8, BD_GRID_NONE, 0},
    {"int8 sym", BD_INT8, BD_GRID_SYM, 32},
    {"int2 sym", BD_INT2, BD_GRID_SYM, 32},
    {"int2 asym 64", BD_INT2, BD_GRID_ASYM, 64},
    {"int3 sym 128", BD_INT3, BD_GRID_SYM, 128},
    {"int3 asym", BD_INT3, BD_GRID_ASYM, 32},
    {"int4 sym", BD_INT4, BD_GRID_SYM, 32},
    {"int4 sym 64", BD_INT4, BD_GRID_SYM, 64},
    {"int4 asym", BD_INT4, BD_GRID_ASYM, 32},
    {"int4 asym 128", BD_INT4, BD_GRID_ASYM, 128},
    {"int4 min", BD_INT4, BD_GRID_MIN, 32},
    {"int4 k", BD_INT4, BD_GRID_K, 0},
    {"int5 sym", BD_INT5, BD_GRID_SYM, 32},
    {"int5 min", BD_INT5, BD_GRID_MIN, 32},
    {"int5 k", BD_INT5, BD_GRID_K, 0},
    {"int6 sym", BD_INT6, BD_GRID_SYM, 32},
    {"int6 asym 64", BD_INT6, BD_GRID_ASYM, 64},
    {"int6 k16", BD_INT6, BD_GRID_K16, 0},
    {"fp4 sym", BD_FP4, BD_GRID_SYM, 32},
    {"fp4 sym16", BD_FP4, BD_GRID_SYM16, 16},
};

const char *const ACTIVATIONS[BD_ACTIVATIONS] = {"f32", "bf16", "int8", "e4m3", "e5m2", "int8_g32"};

// Rows that differ: row m of a batch is row m % 13 of them, in step with no block of rows that a kernel may take.
constexpr int64_t DISTINCT = 13;

struct Pools {
  explicit Pools(const char *isa) {
    for (int threads = 1; threads <= 3; threads++) of[threads] = bd_pool_new(isa, threads);
  }
  ~Pools() {
    for (int threads = 1; threads <= 3; threads++) bd_pool_free(of[threads]);
  }
  Pools(const Pools &) = delete;
  bd_pool *of[4] = {};
};

std::vector<float> normals(int64_t count, test::Random &random) {
  std::vector<float> x;
  for (int64_t i = 0; i < count; i++) x.push_back(random.normal());
  return x;
}

/// Row m of `rows` rows: row m % 13 of x [13, K].
std::vector<float> repeated(const std::vector<float> &x, int64_t rows) {
  const int64_t K = (int64_t)x.size() / DISTINCT;
  std::vector<float> y;
  for (int64_t m = 0; m < rows; m++)
    y.insert(y.end(), x.begin() + m % DISTINCT * K, x.begin() + (m % DISTINCT + 1) * K);
  return y;
}

/// An operation on rows of a batch, of which row 0 is row `first` of those that differ.
struct Operation {
  std::string name;
  int64_t inputs, outputs;
  double tightness;  // what bounds may be of values
  std::function<int(bd_pool *, const float *x, int64_t first, int64_t rows, float *out)> run;
  std::function<Estimates(const float *x, int64_t row)> expected;
};

struct Batch {
  int threads;
  std::vector<int64_t> rows;
};

void verify(const Pools &pools, const Operation &op, const std::vector<Batch> &batches, test::Random &random) {
  std::vector<float> x = normals(DISTINCT * op.inputs, random), alone((size_t)(DISTINCT * op.outputs));
  std::fill(x.begin() + 5 * op.inputs, x.begin() + 6 * op.inputs, 0.0f);  // a row without a scale
  test::Comparison comparison(op.name);
  for (int64_t m = 0; m < DISTINCT; m++) {
    const float *row = x.data() + m * op.inputs;
    float *out = alone.data() + m * op.outputs;
    const int code = op.run(pools.of[1], row, m, 1, out);
    if (!check(code == BD_OK, "%s: %s", op.name.c_str(), bd_error())) return;
    if (m < 6) comparison.row(m, out, op.expected(row, m));
  }
  comparison.finish(op.tightness);
  for (const Batch &batch : batches)
    for (int64_t rows : batch.rows) {
      const std::vector<float> many = repeated(x, rows), expected = repeated(alone, rows);
      std::vector<float> out((size_t)(rows * op.outputs), NAN);
      op.run(pools.of[batch.threads], many.data(), 0, rows, out.data());
      const auto wrong = std::mismatch(out.begin(), out.end(), expected.begin(), test::same).first - out.begin();
      check(wrong == (int64_t)out.size(), "%s: row %ld of %ld, output %ld, on %d threads differs from the row alone",
            op.name.c_str(), (long)(wrong / op.outputs), (long)rows, (long)(wrong % op.outputs), batch.threads);
    }
}

const std::vector<Batch> FEW = {{1, {2, 3, 4, 5, 6, 7, 8, 9}}};
const std::vector<Batch> MANY = {{1, {31, 33, 64}}, {2, {1, 9, 32, 300}}, {3, {1, 2, 7, 33}}};

/// bd_unpack_rows: every entry, rounded a few times on its way.
void unpacking(const Pools &pools, const std::string &name, const Weight &w) {
  std::vector<int64_t> rows;
  for (int64_t n = w.N; n-- > 0;) rows.push_back(n);
  std::vector<float> out((size_t)(w.N * w.K), NAN);
  check(bd_unpack_rows(pools.of[2], &w.packed, rows.data(), w.N, out.data()) == BD_OK, "%s: %s", name.c_str(),
        bd_error());
  for (int64_t i = 0; i < w.N; i++)
    for (int64_t k = 0; k < w.K; k++) {
      const int64_t n = rows[(size_t)i];
      const double value = w.value(n, k) * w.channel(n), got = out[(size_t)(i * w.K + k)];
      const double bound = 4 * test::UNIT * w.magnitude(n, k) * w.channel(n);
      if (!check(std::fabs(got - value) <= bound, "%s: entry %ld, %ld is %.9g. Expected %.9g.", name.c_str(), (long)n,
                 (long)k, got, value))
        return;
    }
}

/// bd_norm_linear with and without a bias, and bd_linear_add.
void products(const Pools &pools, Form form, int activation, int64_t N, int64_t K, bool many) {
  test::Random random((uint64_t)(form.codec * 1000003 + form.grid * 10007 + activation * 101 + N * 13 + K));
  const bool channel = form.grid == BD_GRID_NONE || N == 17;
  const Weight w(pools.of[1], form, activation, N, K, channel, random);
  const std::string name = std::string(form.name) + " " + ACTIVATIONS[activation] + " [" + std::to_string(N) + ", " +
                           std::to_string(K) + "]";
  if (activation == BD_ACT_F32 || (activation == BD_ACT_INT8 && form.codec == BD_INT8)) unpacking(pools, name, w);
  const std::vector<float> norm = normals(K, random), bias = normals(N, random);
  const std::vector<float> residual = normals(DISTINCT * N, random);
  const float eps = 1e-5f, *added = N == 16 ? nullptr : bias.data();

  const auto linear = [&](bd_pool *pool, const float *x, int64_t, int64_t rows, float *out) {
    return bd_norm_linear(pool, x, rows, norm.data(), eps, &w.packed, added, out);
  };
  const auto linear_expected = [&](const float *x, int64_t) {
    Estimates y = test::product(w, test::rounded(test::normalised(x, norm.data(), eps, K), activation));
    if (added) test::add(y, added);
    return y;
  };
  verify(pools, {"norm_linear " + name, K, N, 0.05, linear, linear_expected}, many ? MANY : FEW, random);

  const auto sum = [&](bd_pool *pool, const float *x, int64_t first, int64_t rows, float *out) {
    if (rows == 1) return bd_linear_add(pool, x, 1, &w.packed, residual.data() + first * N, out);
    const std::vector<float> all = repeated(residual, rows);
    std::copy(all.begin(), all.end(), out);  // in place, as the decoder does it
    return bd_linear_add(pool, x, rows, &w.packed, out, out);
  };
  const auto sum_expected = [&](const float *x, int64_t row) {
    Estimates y = test::product(w, test::rounded(test::exactly(x, K), activation));
    test::add(y, residual.data() + row * N);
    return y;
  };
  verify(pools, {"linear_add " + name, K, N, 0.05, sum, sum_expected}, many ? MANY : FEW, random);

  const std::vector<float> after = normals(N, random);  // a norm of the product, before the sum
  const auto normed = [&](bd_pool *pool, const float *x, int64_t first, int64_t rows, float *out) {
    const std::vector<float> all = rows == 1 ? std::vector<float>() : repeated(residual, rows);
    if (rows > 1) std::copy(all.begin(), all.end(), out);
    const float *before = rows == 1 ? residual.data() + first * N : out;
    return bd_linear_norm_add(pool, x, rows, &w.packed, after.data(), 1e-3f, before, out);
  };
  const auto normed_expected = [&](const float *x, int64_t row) {
    Estimates y = test::normalised(test::product(w, test::rounded(test::exactly(x, K), activation)), after.data(), 1e-3f);
    test::add(y, residual.data() + row * N);
    return y;
  };
  verify(pools, {"linear_norm_add " + name, K, N, 0.2, normed, normed_expected}, many ? MANY : FEW, random);
}

/// A weight of three parts, each of its own format, as q, k and v of a GGUF file may be.
void parts(const Pools &pools, int activation) {
  test::Random random((uint64_t)activation + 20);
  constexpr int64_t K = 64, N = 17 + 32 + 5;
  Weight q(pools.of[1], {"int4 asym", BD_INT4, BD_GRID_ASYM, 32}, activation, 17, K, false, random);
  Weight k(pools.of[1], {"int5 min", BD_INT5, BD_GRID_MIN, 32}, activation, 32, K, true, random);
  const Weight v(pools.of[1], {"int8 sym", BD_INT8, BD_GRID_SYM, 32}, activation, 5, K, false, random);
  q.packed.next = &k.packed;
  k.packed.next = &v.packed;
  const std::vector<float> norm = normals(K, random), bias = normals(N, random);
  const auto linear = [&](bd_pool *pool, const float *x, int64_t, int64_t rows, float *out) {
    return bd_norm_linear(pool, x, rows, norm.data(), 0.1f, &q.packed, bias.data(), out);
  };
  const auto expected = [&](const float *x, int64_t) {
    Estimates y;
    const Estimates in = test::rounded(test::normalised(x, norm.data(), 0.1f, K), activation);
    for (const Weight *part : std::initializer_list<const Weight *>{&q, &k, &v})
      for (const test::Estimate &e : test::product(*part, in)) y.push_back(e);
    test::add(y, bias.data());
    return y;
  };
  const std::string name = std::string("norm_linear of three parts, ") + ACTIVATIONS[activation];
  verify(pools, {name, K, N, 0.05, linear, expected}, FEW, random);
  verify(pools, {name, K, N, 0.05, linear, expected}, MANY, random);
}

/// bd_gated_mlp and bd_gated_inputs, M inner units; `down` of another format where M does not fit.
void mlp(const Pools &pools, Form form, Form down_form, int activation, int gate, int64_t D, int64_t M) {
  test::Random random((uint64_t)(form.codec * 1009 + form.grid * 101 + activation * 11 + M));
  const int inner_activation = down_form.floats() ? BD_ACT_BF16 : activation;
  const Weight gate_up(pools.of[1], form, activation, 2 * M, D, form.grid == BD_GRID_NONE, random);
  const Weight down(pools.of[1], down_form, inner_activation, D, M, false, random);
  const std::string name = std::string(form.name) + " and " + down_form.name + " " + ACTIVATIONS[activation] + " [" +
                           std::to_string(D) + ", " + std::to_string(M) + "]";
  std::vector<float> norm = normals(D, random);
  for (float &x : norm) x *= 0.2f;
  const float eps = 1e-6f;
  const std::vector<Batch> batches = {{1, {2, 5, 9}}, {2, {33}}, {3, {3}}};

  const auto inputs = [&](bd_pool *pool, const float *x, int64_t, int64_t rows, float *out) {
    return bd_gated_inputs(pool, x, rows, norm.data(), eps, &gate_up.packed, gate, out);
  };
  const auto inputs_expected = [&](const float *x, int64_t) {
    const Estimates in = test::rounded(test::normalised(x, norm.data(), eps, D), activation);
    return test::gated(test::product(gate_up, in), gate);
  };
  verify(pools, {"gated_inputs " + name, D, M, 0.05, inputs, inputs_expected}, batches, random);

  const auto whole = [&](bd_pool *pool, const float *x, int64_t, int64_t rows, float *out) {
    return bd_gated_mlp(pool, x, rows, norm.data(), eps, &gate_up.packed, gate, &down.packed, out);
  };
  const auto whole_expected = [&](const float *x, int64_t row) {
    Estimates y = test::product(down, test::rounded(inputs_expected(x, row), inner_activation));
    test::add(y, x);
    return y;
  };
  verify(pools, {"gated_mlp " + name, D, D, 0.2, whole, whole_expected}, batches, random);
}

void format(const Pools &pools, Form form, int activation) {
  const bool all = form.floats() || activation == BD_ACT_BF16 || bd::integer_inputs(activation);  // others: the same loops
  for (int64_t K : {1, 20, 32, 33, 64, 96, 256}) {
    if (K % form.unit()) continue;
    for (int64_t N : {1, 15, 16, 17, 40})
      if (all || N == 17) products(pools, form, activation, N, K, false);
  }
  const int64_t wide = form.unit() > 96 ? 256 : 96, M = form.unit() > 64 ? form.unit() : 64;
  products(pools, form, activation, 40, form.unit() == 64 ? 128 : wide, true);
  for (const int gate : {BD_GATE_SILU, BD_GATE_GELU_TANH}) {
    mlp(pools, form, form, activation, gate, M, M);
    mlp(pools, form, FORMS[1], activation, gate, M, 20);
  }
}

}  // namespace

/// kernels_test ISA
int main(int count, char **arguments) {
  const char *isa = count > 1 ? arguments[1] : "scalar";
  const Pools pools(isa);
  if (!pools.of[1]) return std::printf("%s\n", bd_error()), test::SKIPPED;
  for (const Form &form : FORMS)
    for (int activation = 0; activation < BD_ACTIVATIONS; activation++)
      if (!(form.floats() && bd::integer_inputs(activation))) format(pools, form, activation);
  for (int activation = 0; activation < BD_ACTIVATIONS; activation++) parts(pools, activation);
  return test::result(isa);
}
