// Drives the thread pool through many small jobs: every unit runs once, and only after the stages before its own; also
// where stages are gone through again.
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

// Stages [kFirst, kLast] run `rounds` times before the next one: every opening counts one more.
class Looping : public Job {
 public:
  static constexpr int kFirst = 3, kLast = 5, kEnd = 8;

  int units(int stage) override { return stage == kFirst + 1 ? round_ % 3 : 4; }  // none in every third round

  int after(int stage) override {
    if (stage != kLast || ++round_ == rounds_) return stage + 1;
    return kFirst;
  }

  void run(int stage, int unit, int) override {
    const bool again = kFirst <= stage && stage <= kLast;
    if (stage != kFirst + 1) wrong_[unit] += count_[stage][unit] != (again ? round_ : 0);
    for (int i = 0; i < 4; ++i) {
      if (stage == kLast) wrong_[unit] += count_[kFirst][i] != round_ + 1;
      if (stage == kFirst) wrong_[unit] += count_[kLast][i] != round_;
      if (stage > kLast) wrong_[unit] += count_[kLast][i] != rounds_;
    }
    ++count_[stage][unit];
  }

  // Runs once, and returns how much was wrong.
  int check(Pool& pool, int rounds) {
    rounds_ = rounds, round_ = 0;
    for (auto& stage : count_)
      for (int& count : stage) count = 0;
    for (int& wrong : wrong_) wrong = 0;
    pool.run(0, kEnd);
    int sum = round_ != rounds;
    for (int i = 0; i < 4; ++i) {
      sum += wrong_[i];
      for (int stage = 0; stage < kEnd; ++stage)
        if (stage != kFirst + 1) sum += count_[stage][i] != (stage < kFirst || stage > kLast ? 1 : rounds);
    }
    sum += count_[kFirst + 1][0] != rounds - (rounds + 2) / 3;
    sum += count_[kFirst + 1][1] != rounds / 3;
    return sum;
  }

 private:
  int rounds_ = 0, round_ = 0;
  int count_[kEnd][4] = {}, wrong_[4] = {};
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
  Looping looping;
  Pool again(threads, looping);
  for (int run = 1; run <= runs; ++run) wrong += looping.check(again, 1 + run % 40);
  std::printf("%d threads, %d runs: %d wrong\n", threads, runs, wrong);
  return wrong != 0;
}
