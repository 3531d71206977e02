#include "parallel_for.h"

#include <algorithm>
#include <thread>

namespace headrace {
namespace {

constexpr int kRowsOfTask = 64;               // whole tiles
constexpr size_t kBytesOfTask = 256 * 1024;

int divide_up(int a, int b) { return (a + b - 1) / b; }

size_t weight_bytes(const PackedWeight& w) {
  const size_t rows = size_t(divide_up(w.n, kTile)) * kTile, groups = size_t(divide_up(w.k, w.group));
  const size_t supergroups = (groups + kSupergroup - 1) / kSupergroup;
  const size_t mins = w.mins == nullptr ? 0 : supergroups * kSupergroup * sizeof(int16_t);
  return rows * (size_t(w.k) * w.bits / 8 + groups * sizeof(int16_t) + mins + 3 * sizeof(int32_t));
}

}  // namespace

RowSplit split_rows(const PackedWeight& w, int max_tasks) {
  const size_t most = std::min(size_t(divide_up(w.n, kRowsOfTask)), weight_bytes(w) / kBytesOfTask);
  const int count = std::max(1, int(std::min(most, size_t(std::max(max_tasks, 0)))));
  const int rows = divide_up(divide_up(w.n, count), kRowsOfTask) * kRowsOfTask;
  return {divide_up(w.n, rows), rows};
}

bool Round::call(int64_t index) {
  // Counted before it looks whether the call is over: `close` either sees the count or is seen.
  running_.fetch_add(1);
  const bool open = open_.load();
  if (open && (index < 0 || index >= count_)) {
    blame("there is no task " + std::to_string(index) + " of " + std::to_string(count_));
  } else if (open && claimed_[index].exchange(true)) {
    blame("task " + std::to_string(index) + " was called twice");
  } else if (open) {
    task_.run(int(index));
  }
  running_.fetch_sub(1);
  return open;
}

void Round::invent(const std::string& index) {
  if (open_.load()) blame("there is no task " + index + " of " + std::to_string(count_));
}

std::string Round::close() {
  open_.store(false);
  while (running_.load() > 0) std::this_thread::yield();
  for (int i = 0; i < count_; ++i)
    if (!claimed_[i].load()) blame("task " + std::to_string(i) + " of " + std::to_string(count_) + " was not called");
  return cause_;
}

void Round::blame(const std::string& cause) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cause_.empty()) cause_ = cause;
}

}  // namespace headrace
