#include "pool.h"

#include <cstdlib>
#include <new>
#include <system_error>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define BD_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define BD_PAUSE() asm volatile("yield")
#else
#define BD_PAUSE() ((void)0)
#endif

namespace bd {

namespace {

constexpr int SPINS = 4000;  // about 100 microseconds on a current x86 core: longer than Python is away between two calls

constexpr int LOOP_AT = 40;  // bits of place_ below the number of the loop: a loop has fewer than 2^40 items

// Until done() holds: spinning first, then giving way to whoever else wants the core.
template <class Done> void spin(Done done) {
  for (int i = 0; !done(); i++) {
    if (i < SPINS) BD_PAUSE();
    else std::this_thread::yield();
  }
}

}  // namespace

std::thread Pool::start(Pool &pool) {
  return std::thread([&pool] { pool.work(); });
}

Pool::Pool(const Kernels &kernels, int threads, Start start) : kernels_(kernels) {
  try {
    for (int i = 1; i < threads; i++) workers_.push_back(start(*this));
  } catch (const std::system_error &) {  // a limit of the system: the threads that there are do all the work
  }
}

Pool::~Pool() {
  stop_ = true;
  posted_++;
  posted_.notify_all();
  for (auto &worker : workers_) worker.join();
  std::free(scratch_);
}

void Pool::job(Job job, void *context) {
  Team team{*this};
  job_ = job;
  context_ = context;
  place_.store(0, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  left_.store(0, std::memory_order_relaxed);
  if (!workers_.empty()) {
    posted_.fetch_add(1);
    if (sleeping_.load()) posted_.notify_all();
  }
  job(context, team);
  // The job's variables are gone when this returns, so every thread has to be through with them.
  spin([&] { return left_.load(std::memory_order_acquire) == workers_.size(); });
}

void Pool::work() {
  uint32_t seen = 0;
  for (;;) {
    for (int i = 0; i < SPINS && posted_.load(std::memory_order_acquire) == seen; i++) BD_PAUSE();
    if (posted_.load() == seen) {
      sleeping_++;
      while (posted_.load() == seen) posted_.wait(seen);
      sleeping_--;
    }
    seen++;
    if (stop_) return;
    Team team{*this};
    job_(context_, team);
    left_.fetch_add(1, std::memory_order_release);
  }
}

// Where a chunk of the loop begins; -1 if none is left, which is so too when the others are past that loop.
int64_t Pool::claim(int64_t loop, int64_t count, int64_t chunk) {
  int64_t place = place_.load(std::memory_order_acquire);
  for (;;) {
    const int64_t from = place - (loop << LOOP_AT);
    if (from >= count) return -1;
    if (place_.compare_exchange_weak(place, place + chunk, std::memory_order_acquire)) return from;
  }
}

// `part` items of the loop are done; whoever does the last of them opens the next loop.
void Pool::finish(int64_t loop, int64_t count, int64_t part) {
  if (done_.fetch_add(part, std::memory_order_acq_rel) + part < count) return;
  done_.store(0, std::memory_order_relaxed);
  place_.store((loop + 1) << LOOP_AT, std::memory_order_release);
}

void Pool::await(int64_t loop) {
  spin([&] { return place_.load(std::memory_order_acquire) >> LOOP_AT > loop; });
}

void *Pool::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    std::free(scratch_);
    scratch_bytes_ = 0;
    const size_t rounded = (bytes + 63) / 64 * 64;
    scratch_ = std::aligned_alloc(64, rounded);
    if (!scratch_) throw std::bad_alloc();
    scratch_bytes_ = rounded;
  }
  return scratch_;
}

}  // namespace bd
