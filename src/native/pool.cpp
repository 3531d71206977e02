#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

namespace {

// The state of a run in one word, so that taking a unit says all about it: the number of the opening (20 bits), how
// many units its stage has (22 bits), how many of them are taken (22 bits). Openings are counted, not stages, because
// a stage may be opened again: whoever found the old one empty must not take the new one for it. kIdle: no stage,
// nothing to take.
constexpr int kOpeningShift = 44, kUnitsShift = 22;
constexpr uint64_t kMask = (uint64_t(1) << 22) - 1, kOpenings = 0xFFFFF, kIdle = kOpenings << kOpeningShift;

inline uint64_t opening_word(uint64_t opening, int units) {
  return opening << kOpeningShift | uint64_t(units) << kUnitsShift;
}
inline uint64_t opening_of(uint64_t word) { return word >> kOpeningShift; }

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
  stage_ = next;
  opened_ = (opened_ + 1) % kOpenings;
  next_.store(next < end_ ? opening_word(opened_, units) : kIdle);
}

// Takes one unit, or waits for the next stage when there is none left; false when nothing runs. The unit taken
// belongs to the stage that is current at that moment, whatever was current before.
bool Pool::help(int thread) {
  if (next_.load(std::memory_order_acquire) >= kIdle) return false;
  const uint64_t taken = next_.fetch_add(1, std::memory_order_acq_rel);
  if (taken >= kIdle) return false;
  const int unit = int(taken & kMask), units = int(taken >> kUnitsShift & kMask);
  if (unit < units) {
    const int stage = stage_;  // stays what it is until this unit has ended
    job_.run(stage, unit, thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == units) open(job_.after(stage));
    return true;
  }
  const uint64_t opening = opening_of(taken);
  for (int spins = 0; opening_of(next_.load(std::memory_order_acquire)) == opening; ++spins) {
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
