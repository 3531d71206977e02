// A host's parallel-for: how a projection is cut into blocks of rows, and how a call of the host is checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "ops.h"

namespace headrace {

constexpr int kMaxTasks = 256;

// Blocks of `rows` rows each, the last of what is left; `count` of them, none empty.
struct RowSplit {
  int count, rows;
};

// A function of the weight and max_tasks alone: at most max_tasks blocks, one for each 64 rows begun and one for each
// whole 256 KiB of the packed weight (codes, scales, minimums and row parameters), at least one; of rows / blocks rows,
// rounded up to whole 64s, so that a block may not be needed.
RowSplit split_rows(const PackedWeight& w, int max_tasks);

class Task {
 public:
  virtual ~Task() = default;
  virtual void run(int index) = 0;  // from any thread, once for each index
};

// One call of a host's `run`, which outlives it where the host keeps what it was given.
class Round {
 public:
  Round(int count, Task& task) : count_(count), task_(task) {}

  // Runs a task; false when the call is over, and nothing was done. An index that is not there, or was called before,
  // is remembered and not run.
  bool call(int64_t index);
  // What a host may pass that is no index at all.
  void invent(const std::string& index);
  // The host's `run` has returned: waits for tasks that still compute. Returns what was wrong, or "".
  std::string close();

 private:
  void blame(const std::string& cause);

  const int count_;
  Task& task_;
  std::atomic<bool> open_{true};
  std::atomic<int> running_{0};
  std::atomic<bool> claimed_[kMaxTasks] = {};
  std::mutex mutex_;
  std::string cause_;  // the first thing that was wrong
};

class ParallelFor {
 public:
  virtual ~ParallelFor() = default;
  // Runs tasks [0, count), each exactly once; false where it did not.
  virtual bool run(int count, Task& task) = 0;
};

}  // namespace headrace
