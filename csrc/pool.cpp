#include "pool.h"

#include <cstdlib>
#include <new>

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

// Until done() holds: spinning first, then giving way to whoever else wants the core.
template <class Done> void spin(Done done) {
  for (int i = 0; !done(); i++) {
    if (i < SPINS) BD_PAUSE();
    else std::this_thread::yield();
  }
}

}  // namespace

Pool::Pool(const Kernels &kernels, int threads) : kernels_(kernels) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
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
  next_.store(0, std::memory_order_relaxed);
  if (!workers_.empty()) {
    posted_.fetch_add(1);
    if (sleeping_.load()) posted_.notify_all();
  }
  job(context, team);
  barrier();  // nobody touches the job's variables after this
}

void Pool::work() {
  uint32_t seen = 0;
  Team team{*this};
  for (;;) {
    for (int i = 0; i < SPINS && posted_.load(std::memory_order_acquire) == seen; i++) BD_PAUSE();
    if (posted_.load() == seen) {
      sleeping_++;
      while (posted_.load() == seen) posted_.wait(seen);
      sleeping_--;
    }
    seen++;
    if (stop_) return;
    job_(context_, team);
    barrier();
  }
}

void Pool::barrier() {
  const uint32_t all = (uint32_t)threads();
  if (all == 1) {
    next_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t turn = passed_.load(std::memory_order_acquire);
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
    waiting_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    passed_.store(turn + 1, std::memory_order_release);
  } else {
    spin([&] { return passed_.load(std::memory_order_acquire) != turn; });
  }
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
