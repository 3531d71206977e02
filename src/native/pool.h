// A small pool of threads that run one function together and meet at barriers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

// All threads that share one barrier call wait(); none goes on before the last has come.
class Barrier {
 public:
  explicit Barrier(int num_threads) : num_threads_(num_threads) {}
  void wait();

 private:
  const int num_threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

// num_threads - 1 workers and the caller. Idle workers spin for a moment, then sleep.
class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return num_threads_; }
  Barrier& barrier() { return barrier_; }

  // Runs task(thread) for thread 0 (the caller) to size() - 1 and returns when all are done.
  void run(const std::function<void(int)>& task);

 private:
  void work(int thread);
  int await(int seen);

  const int num_threads_;
  Barrier barrier_;
  const std::function<void(int)>* task_ = nullptr;
  std::atomic<int> generation_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace headrace
