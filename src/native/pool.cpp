#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

namespace {

// The state of a run in one word, so that taking a unit says all about it: which stage (20 bits), how many
// units that has (22 bits), how many of them are taken (22 bits). kIdle: no stage, nothing to take.
constexpr int kStageShift = 44, kUnitsShift = 22;
constexpr uint64_t kMask = (uint64_t(1) << 22) - 1, kIdle = uint64_t(0xFFFFF) << kStageShift;

inline uint64_t stage_word(int stage, int units) {
  return uint64_t(stage) << kStageShift | uint64_t(units) << kUnitsShift;
}
inline int stage_of(uint64_t word) { return int(word >> kStageShift); }

constexpr int kStageSpins = 2000;                       // some 50 us, then let others run
constexpr auto kIdleSpin = std::chrono::milliseconds(1);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

}  // namespace

Pool::Pool(int num_threads, Job& job) : num_threads_(num_threads), job_(job), next_(kIdle) {
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(int begin, int end) {
  end_ = end;
  open(begin);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);  // a worker between its last look and its sleep holds this
    wake_.notify_all();
  }
  while (help(0)) {
  }
}

// Opens the first stage from `next` on that has units, or ends the run. Only the thread that ended the stage before
// comes here.
void Pool::open(int next) {
  int units = 0;
  while (next < end_ && (units = job_.units(next)) == 0) ++next;
  done_.store(0, std::memory_order_relaxed);
  next_.store(next < end_ ? stage_word(next, units) : kIdle);
}

// Takes one unit, or waits for the next stage when there is none left; false when nothing runs. The unit taken
// belongs to the stage that is current at that moment, whatever was current before.
bool Pool::help(int thread) {
  if (next_.load(std::memory_order_acquire) >= kIdle) return false;
  const uint64_t taken = next_.fetch_add(1, std::memory_order_acq_rel);
  if (taken >= kIdle) return false;
  const int stage = stage_of(taken), unit = int(taken & kMask), units = int(taken >> kUnitsShift & kMask);
  if (unit < units) {
    job_.run(stage, unit, thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == units) open(job_.ends_after(stage) ? end_ : stage + 1);
    return true;
  }
  for (int spins = 0; stage_of(next_.load(std::memory_order_acquire)) == stage; ++spins) {
    if (spins < kStageSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
  return true;
}

void Pool::work(int thread) {
  auto end = std::chrono::steady_clock::now() + kIdleSpin;
  while (!stop_) {
    if (help(thread)) {
      while (help(thread)) {
      }
      end = std::chrono::steady_clock::now() + kIdleSpin;
    }
    for (int i = 0; i < 16; ++i) relax();
    if (std::chrono::steady_clock::now() > end) sleep();
  }
}

void Pool::sleep() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++sleepers_;
  wake_.wait(lock, [this] { return next_.load() < kIdle || stop_; });
  --sleepers_;
}

}  // namespace headrace
