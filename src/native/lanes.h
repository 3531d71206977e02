// Reads records of files into slots of memory by parallel lanes, each a thread with one read at a time.
//
// Memory is `num_slots` slots of `slot_bytes`; every slot has a state byte, which the owner sets to kReading before
// it submits a read and a lane sets to kReady or kFailed (release order) once nothing writes to the slot any more.
// Files are opened by the caller, with O_DIRECT where that works. A part that cannot be read is tried `retries` times more.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "slot_state.h"

namespace headrace {

constexpr int64_t kSector = 4096;  // reads with O_DIRECT begin at multiples of it

struct ReadFailure {
  int error;       // errno; 0: the file ended
  int64_t offset;  // in the file, of the first byte that is missing
};

class Lanes {
 public:
  // Reads are cut into pieces of at most piece_bytes, a multiple of kSector, which lanes share.
  Lanes(uint8_t* memory, uint8_t* state, int num_slots, int64_t slot_bytes, int num_lanes, int64_t piece_bytes,
        int retries);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Consecutive records of a file from `offset` on, one for each of the slots.
  struct Run {
    int64_t offset;
    std::vector<int> slots;
  };

  // Reads records of nbytes into slots, which are kReading. drop: let go of the page cache behind the read.
  // prefetch: lanes take it when nothing else is queued.
  void submit(int fd, int64_t nbytes, const std::vector<Run>& runs, bool drop, bool prefetch);

  // What is queued for this slot is needed: it goes before every prefetch.
  void promote(int slot);

  // Forgets a read of this slot alone and sets it to kEmpty, unless a lane is at it or was the last one: then false.
  bool cancel(int slot);

  // What becomes of a slot that is kReading: kReady or kFailed; any other state at once, and kReading where nothing
  // reads into it. What waits in the queue as a prefetch is promoted. Any number of threads may wait.
  int wait(int slot);

  // Waits until nothing is queued or being read.
  void drain();

  ReadFailure failure(int slot) const;
  int64_t bytes_read() const { return bytes_read_; }
  int64_t nanoseconds_waited() const;  // for as long as at least one thread waited
  int pending() const;                 // pieces queued or being read

  // Ends the lanes; what is queued fails with ECANCELED. A read in flight is waited for.
  void close();

  int num_slots() const { return num_slots_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int state(int slot) const { return __atomic_load_n(state_ + slot, __ATOMIC_ACQUIRE); }

 private:
  struct Part {  // of a piece: bytes of one slot
    int slot;
    int64_t nbytes;
  };
  struct Piece {
    int fd;
    int64_t offset, nbytes;
    std::vector<iovec> buffers;
    std::vector<Part> parts;
    bool drop;
  };
  struct Slot {
    int64_t missing = 0;  // bytes that no lane is done with
    bool failed = false;
    ReadFailure failure{};
  };
  using Queue = std::deque<Piece>;
  using Clock = std::chrono::steady_clock;

  void expect(int64_t nbytes, const std::vector<Run>& runs);
  Piece make_piece(int fd, int64_t nbytes, const Run& run, int64_t begin, bool drop) const;
  void work();
  ReadFailure read(const Piece& piece);
  ReadFailure read_once(const Piece& piece);
  void finish(const Piece& piece, ReadFailure failure);
  void promote_locked(int slot);
  static bool covers(const Piece& piece, int slot);

  uint8_t* const memory_;
  uint8_t* const state_;
  const int num_slots_;
  const int64_t slot_bytes_, piece_bytes_;
  const int retries_;

  mutable std::mutex mutex_;  // of all below
  std::condition_variable work_, done_;
  Queue demand_, prefetch_;
  std::vector<Slot> slots_;
  int reading_ = 0;  // pieces
  int idle_ = 0;     // lanes
  int waiting_ = 0;  // threads
  Clock::time_point waiting_since_{};
  int64_t nanoseconds_waited_ = 0;
  std::atomic<int64_t> bytes_read_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> lanes_;
};

}  // namespace headrace
