// Drives the thread pool through many small jobs: every unit runs once, and only after the stages before its own.
//
//   pool_check THREADS RUNS      exit code 1 when a unit ran twice, not at all, or early
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "../../src/native/pool.h"

using namespace headrace;

namespace {

constexpr int kStages = 40;

// Stage s has s % 7 units (none at times). Plain integers on purpose: a race is a fault of the pool, and the
// thread sanitizer would name it.
class Counting : public Job {
 public:
  int units(int stage) override { return stage % 7; }

  void run(int stage, int unit, int) override {
    for (int before = first_; before < stage; ++before)
      for (int i = 0; i < units(before); ++i) wrong_[unit] += count_[before][i] != run_;
    ++count_[stage][unit];
  }

  void expect(int run, int first) { run_ = run, first_ = first; }

  int wrong(int end) {
    int sum = 0;
    for (int w : wrong_) sum += w;
    for (int stage = first_; stage < end; ++stage)
      for (int i = 0; i < units(stage); ++i) sum += count_[stage][i] != run_;
    return sum;
  }

 private:
  int count_[kStages][7] = {};
  int wrong_[7] = {};
  int run_ = 0, first_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 3, runs = argc > 2 ? std::atoi(argv[2]) : 2000;
  Counting job;
  Pool pool(threads, job);
  int wrong = 0;
  for (int run = 1; run <= runs; ++run) {
    job.expect(run, 0);
    pool.run(0, kStages / 2);  // in two slices
    job.expect(run, kStages / 2);
    pool.run(kStages / 2, kStages);
    job.expect(run, 0);
    wrong += job.wrong(kStages);
    if (run % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));  // let the workers fall asleep
  }
  std::printf("%d threads, %d runs: %d wrong\n", threads, runs, wrong);
  return wrong != 0;
}
