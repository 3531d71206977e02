// A small pool of threads that work through a job: stages, one after the other, of units that any thread takes.
//
// No thread waits for another one to arrive: a stage ends with its last unit, and whoever is late joins the
// stage that is current by then. A thread that the system has put aside delays the others only if it holds a
// unit. Which thread does a unit must not matter to the result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

class Job {
 public:
  virtual ~Job() = default;
  // The number of units of a stage, below 2^22; asked for once the stages before it have ended, by one thread. 0
  // skips it.
  virtual int units(int stage) = 0;
  // Asked when a stage that had units has ended, by one thread: the stage that follows. It may be an earlier one; the
  // run ends with one that is not before its end.
  virtual int after(int stage) { return stage + 1; }
  virtual void run(int stage, int unit, int thread) = 0;
};

// num_threads - 1 workers and the caller. Idle workers spin for a moment, then sleep.
class Pool {
 public:
  // The job outlives the pool.
  Pool(int num_threads, Job& job);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return num_threads_; }

  // Runs the stages [begin, end); the caller is thread 0 and returns when all are done.
  void run(int begin, int end);

 private:
  void work(int thread);
  void sleep();
  bool help(int thread);
  void open(int stage);

  const int num_threads_;
  Job& job_;
  int end_ = 0;
  uint64_t opened_ = 0;                     // how many stages, modulo the numbers that the word has
  alignas(64) std::atomic<uint64_t> next_;  // the stage that is open, by number, and its next unit
  int stage_ = 0;                           // that stage; written before next_ and only while none of its units runs
  alignas(64) std::atomic<int> done_{0};    // units of the stage that have ended
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace headrace
