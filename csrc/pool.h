// The library's own threads. A job runs on all of them at once; inside it, loops are shared out in chunks and phases are
// separated by barriers. Threads spin for some microseconds after a job, in case the next one follows, and then sleep.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace bd {

class Pool;
struct Kernels;

// A thread's view of the job that it takes part in.
struct Team {
  Pool &pool;

  const Kernels &kernels() const;

  // Share [0, count) out in chunks; every thread of the job must come here. Ends with a barrier.
  template <class Body> void share(int64_t count, int64_t chunk, Body body);
  void barrier();
};

class Pool {
 public:
  Pool(const Kernels &, int threads);
  ~Pool();
  Pool(const Pool &) = delete;

  const Kernels &kernels() const { return kernels_; }
  int threads() const { return (int)workers_.size() + 1; }

  // Run body(team) on every thread of the pool, the caller's among them.
  template <class Body> void run(Body body) {
    job(
        [](void *context, Team &team) { (*static_cast<Body *>(context))(team); }, &body);
  }

  // Memory for one call's intermediate values, 64-byte aligned, kept for the next call. Throws std::bad_alloc.
  void *scratch(size_t bytes);

 private:
  friend struct Team;
  using Job = void (*)(void *, Team &);
  void job(Job, void *context);
  void work();
  void barrier();

  const Kernels &kernels_;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint32_t> posted_{0};   // jobs given out so far
  alignas(64) std::atomic<uint32_t> waiting_{0};  // threads at the barrier
  alignas(64) std::atomic<uint32_t> passed_{0};   // barriers passed
  alignas(64) std::atomic<int64_t> next_{0};      // of the loop that is being shared
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  Job job_ = nullptr;
  void *context_ = nullptr;
  void *scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

template <class Body> void Team::share(int64_t count, int64_t chunk, Body body) {
  for (;;) {
    const int64_t from = pool.next_.fetch_add(chunk, std::memory_order_relaxed);
    if (from >= count) break;
    body(from, from + chunk < count ? from + chunk : count);
  }
  barrier();
}

inline void Team::barrier() { pool.barrier(); }
inline const Kernels &Team::kernels() const { return pool.kernels(); }

}  // namespace bd
