#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

namespace {

constexpr int kBarrierSpins = 20000;  // about 0.2 ms, then let others run
constexpr auto kIdleSpin = std::chrono::microseconds(200);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

}  // namespace

void Barrier::wait() {
  if (num_threads_ == 1) return;
  const int phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
    if (spins < kBarrierSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

Pool::Pool(int num_threads) : num_threads_(num_threads), barrier_(num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& task) {
  if (num_threads_ == 1) return task(0);
  task_ = &task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  task(0);
  barrier_.wait();
}

// The generation after `seen`: spin for a moment, then sleep.
int Pool::await(int seen) {
  const auto end = std::chrono::steady_clock::now() + kIdleSpin;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 64; ++i) {
      const int now = generation_.load(std::memory_order_acquire);
      if (now != seen) return now;
      relax();
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait(lock, [&] { return generation_.load() != seen; });
  return generation_.load();
}

void Pool::work(int thread) {
  int seen = 0;
  while (true) {
    seen = await(seen);
    if (stop_) return;
    (*task_)(thread);
    barrier_.wait();
  }
}

}  // namespace headrace
