// The thread pool: every index of a shared loop is done once, no loop begins before the one before it is done, and
// threads wake up again.
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "../ops.h"
#include "check.h"

namespace {

using test::check;

const bd::Kernels &scalar() { return *bd::find_kernels("scalar"); }

/// Loops of many sizes and chunks, several in one job: each index once, and all of a loop before any of the next.
void loops(bd::Pool &pool) {
  std::vector<int> done(1000), seen(1000);
  for (int64_t count : {0, 1, 2, 3, 7, 64, 65, 1000})
    for (int64_t chunk : {1, 2, 5, 64, 2000}) {
      std::fill(done.begin(), done.end(), 0);
      pool.run([&](bd::Team &team) {
        for (int phase = 1; phase <= 5; phase++) {
          team.share(count, chunk, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; i++) done[(size_t)i]++;
          });
          team.share(count, chunk, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; i++) seen[(size_t)i] = done[(size_t)(count - 1 - i)] - phase;  // another's
          });
          team.share(count, chunk, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; i++)
              if (seen[(size_t)i]) done[(size_t)i] = -1000;
          });
        }
      });
      int64_t right = 0;
      for (int64_t i = 0; i < count; i++) right += done[(size_t)i] == 5;
      check(right == count, "%d threads, %ld indices by %ld: %ld done as often as asked", pool.threads(), (long)count,
            (long)chunk, (long)right);
    }
}

/// Jobs that follow one another at once, as a model's operations do.
void short_jobs(bd::Pool &pool, int64_t jobs) {
  int64_t total = 0;
  std::vector<int64_t> parts(16);
  for (int64_t job = 0; job < jobs; job++) {
    pool.run([&](bd::Team &team) {
      team.share(16, 1, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) parts[(size_t)i] = job + i;
      });
    });
    total += std::accumulate(parts.begin(), parts.end(), (int64_t)0);
  }
  const int64_t expected = jobs * (jobs - 1) / 2 * 16 + jobs * 120;
  check(total == expected, "%d threads: a sum over jobs is %ld. Expected %ld.", pool.threads(), (long)total,
        (long)expected);
}

/// Jobs after pauses short and long: threads that spin, fall asleep at that very moment, or have slept for long.
void after_sleeps(bd::Pool &pool) {
  test::Random random(7);
  int64_t sum = 0, expected = 0;
  for (int job = 0; job < 120; job++) {
    const int64_t pause = job % 20 ? random.below(400) : 20000;
    std::this_thread::sleep_for(std::chrono::microseconds(pause));
    std::atomic<int64_t> part{0};
    pool.run([&](bd::Team &team) { team.share(9, 2, [&](int64_t from, int64_t to) { part += to - from; }); });
    sum += part;
    expected += 9;
  }
  check(sum == expected, "%d threads: %ld indices after sleeps. Expected %ld.", pool.threads(), (long)sum,
        (long)expected);
}

void scratch(bd::Pool &pool) {
  for (size_t bytes : {1u, 64u, 1000u, 100000u, 10u}) {
    auto *memory = static_cast<uint8_t *>(pool.scratch(bytes));
    check(memory && (uintptr_t)memory % 64 == 0, "scratch of %zu bytes is not 64-byte aligned", bytes);
    std::memset(memory, 1, bytes);
  }
  try {
    pool.scratch(SIZE_MAX / 4);
    check(false, "scratch of more than there is. Expected std::bad_alloc.");
  } catch (const std::bad_alloc &) { check(pool.scratch(100) != nullptr, "no scratch after a refusal"); }
}

/// A system that grants two threads and no third.
int granted;
std::thread two_at_most(bd::Pool &pool) {
  if (granted == 2) throw std::system_error(EAGAIN, std::generic_category());
  granted++;
  return bd::Pool::start(pool);
}

void too_few_threads() {
  granted = 0;
  bd::Pool pool(scalar(), 8, two_at_most);
  check(pool.threads() == 3, "%d threads of 8, where 2 could be begun. Expected 3.", pool.threads());
  loops(pool);
  short_jobs(pool, 100);
}

}  // namespace

int main() {
  too_few_threads();
  for (int threads = 1; threads <= 4; threads++) {
    bd::Pool pool(scalar(), threads);
    check(pool.threads() == threads, "%d threads. Expected %d.", pool.threads(), threads);
    loops(pool);
    short_jobs(pool, 2000);
    after_sleeps(pool);
    scratch(pool);
  }
  for (int round = 0; round < 50; round++) {  // pools that end right after they began, or before their threads did
    bd::Pool pool(scalar(), 1 + round % 4);
    if (round % 3) short_jobs(pool, 10);
  }
  return test::result("pool");
}
