// The library's own threads. A job runs on all of them at once; inside it, loops are shared out in chunks, one loop after
// the other. A loop is over when all its chunks are done, not when all threads have come by: a thread that the system has
// set aside holds the others up for no more than the chunk that it is in, and catches up later. Threads spin for some
// microseconds after a job, in case the next one follows, and then sleep.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace bd {

class Pool;
struct Kernels;

// A thread's view of the job that it takes part in. All threads go through the same loops in the same order.
struct Team {
  Pool &pool;
  int64_t loop = 0;  // loops that this thread has gone through

  const Kernels &kernels() const;
  // Share [0, count) out in chunks. All of it is done when this returns, by whichever threads.
  template <class Body> void share(int64_t count, int64_t chunk, Body body);
};

class Pool {
 public:
  // Begins a thread that works for the pool until it ends. Throws std::system_error where the system grants none.
  using Start = std::thread (*)(Pool &);
  static std::thread start(Pool &);

  // With as many threads as could be begun, which is what threads() says; the caller's own is always there.
  Pool(const Kernels &, int threads, Start = start);
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
  int64_t claim(int64_t loop, int64_t count, int64_t chunk);
  void finish(int64_t loop, int64_t count, int64_t part);
  void await(int64_t loop);

  const Kernels &kernels_;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint32_t> posted_{0};   // jobs given out so far
  alignas(64) std::atomic<int64_t> place_{0};     // the loop that is being shared, and where its next chunk begins
  alignas(64) std::atomic<int64_t> done_{0};      // of that loop
  alignas(64) std::atomic<uint32_t> left_{0};     // threads that are through with the job
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  Job job_ = nullptr;
  void *context_ = nullptr;
  void *scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

template <class Body> void Team::share(int64_t count, int64_t chunk, Body body) {
  if (count <= 0) return;
  const int64_t mine = loop++;
  for (int64_t from; (from = pool.claim(mine, count, chunk)) >= 0;) {
    const int64_t to = from + chunk < count ? from + chunk : count;
    body(from, to);
    pool.finish(mine, count, to - from);
  }
  pool.await(mine);
}

inline const Kernels &Team::kernels() const { return pool.kernels(); }

}  // namespace bd
