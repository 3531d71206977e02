// Drives the lanes with many threads: submits, waits, promotes and cancels at once, and checks what arrived.
//
//   lanes_check LANES ROUNDS FILE      exit code 1 when a slot does not hold its record; FILE is made and removed
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "../../src/native/lanes.h"

using namespace headrace;

namespace {

constexpr int64_t kRecord = 3 * kSector;
constexpr int kRecords = 64, kSlots = 16;

uint8_t painted(int record, int64_t at) { return uint8_t((at + 101 * record) % 251); }

bool holds(const uint8_t* slot, int record) {
  for (int64_t i = 0; i < kRecord; ++i)
    if (slot[i] != painted(record, i)) return false;
  return true;
}

void write_file(const char* path) {
  std::vector<uint8_t> record(kRecord);
  FILE* file = std::fopen(path, "wb");
  for (int r = 0; r < kRecords; ++r) {
    for (int64_t i = 0; i < kRecord; ++i) record[i] = painted(r, i);
    if (file == nullptr || std::fwrite(record.data(), 1, kRecord, file) != size_t(kRecord)) std::abort();
  }
  std::fclose(file);
}

// One round: slots are filled by single and by merged reads; three threads wait for them in different orders while
// this one cancels and promotes.
int round_of(Lanes& lanes, uint8_t* memory, uint8_t* state, int fd, std::mt19937& rng) {
  int expected[kSlots], wrong = 0;
  for (int slot = 0; slot < kSlots;) {
    const int count = 1 + int(rng() % 3), first = int(rng() % (kRecords - 3));
    std::vector<int> slots;
    for (int i = 0; i < count && slot < kSlots; ++i, ++slot) {
      state[slot] = kReading;
      expected[slot] = first + i;
      slots.push_back(slot);
    }
    lanes.submit(fd, kRecord, {{first * kRecord, slots}}, true, rng() % 2 == 0);
  }
  const int cancelled = int(rng() % kSlots);
  const bool gone = lanes.cancel(cancelled);
  std::vector<std::thread> waiting;
  int bad[3] = {};
  for (int t = 0; t < 3; ++t)
    waiting.emplace_back([&, t] {
      for (int i = 0; i < kSlots; ++i) {
        const int slot = (i * (2 * t + 1) + t) % kSlots;
        if (gone && slot == cancelled) continue;
        bad[t] += lanes.wait(slot) != kReady || !holds(memory + slot * kRecord, expected[slot]);
      }
    });
  lanes.promote(int(rng() % kSlots));
  for (auto& thread : waiting) thread.join();
  lanes.drain();
  for (int count : bad) wrong += count;
  return wrong + (gone && state[cancelled] != kEmpty);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int num_lanes = std::atoi(argv[1]), rounds = std::atoi(argv[2]);
  write_file(argv[3]);
  int fd = open(argv[3], O_RDONLY | O_DIRECT);
  if (fd < 0) fd = open(argv[3], O_RDONLY);
  uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(kSector, kSlots * kRecord));
  std::vector<uint8_t> state(kSlots, kEmpty);
  std::mt19937 rng(7);
  int wrong = 0;
  for (int64_t piece : {kSector, 2 * kSector, 16 * kSector}) {
    Lanes lanes(memory, state.data(), kSlots, kRecord, num_lanes, piece, 1);
    for (int i = 0; i < rounds; ++i) wrong += round_of(lanes, memory, state.data(), fd, rng);
    std::vector<int> all;
    for (int slot = 0; slot < kSlots; ++slot) state[slot] = kReading, all.push_back(slot);
    lanes.submit(fd, kRecord, {{0, all}}, false, true);  // closed while it is read
  }
  for (uint8_t s : state) wrong += s != kReady && s != kFailed;
  close(fd);
  unlink(argv[3]);
  std::free(memory);
  std::printf("%d lanes, %d rounds: %d wrong\n", num_lanes, rounds, wrong);
  return wrong == 0 ? 0 : 1;
}
