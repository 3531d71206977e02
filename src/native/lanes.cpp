#include "lanes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace headrace {

constexpr int kStalls = 100;  // short reads that brought nothing new, until the file counts as unreadable

Lanes::Lanes(uint8_t* memory, uint8_t* state, int num_slots, int64_t slot_bytes, int num_lanes, int64_t piece_bytes,
             int retries)
    : memory_(memory),
      state_(state),
      num_slots_(num_slots),
      slot_bytes_(slot_bytes),
      piece_bytes_(piece_bytes),
      retries_(retries),
      slots_(num_slots) {
  for (int i = 0; i < num_lanes; ++i) lanes_.emplace_back([this] { work(); });
}

Lanes::~Lanes() { close(); }

void Lanes::submit(int fd, int64_t nbytes, const std::vector<Run>& runs, bool drop, bool prefetch) {
  int wake;
  {
    std::vector<Piece> pieces;
    for (const Run& run : runs)
      for (int64_t at = 0; at < nbytes * int64_t(run.slots.size()); at += piece_bytes_)
        pieces.push_back(make_piece(fd, nbytes, run, at, drop));
    std::lock_guard<std::mutex> lock(mutex_);
    Queue& queue = prefetch ? prefetch_ : demand_;
    const size_t before = queue.size();
    queue.insert(queue.end(), pieces.begin(), pieces.end());
    try {
      expect(nbytes, runs);
    } catch (...) {
      queue.erase(queue.begin() + ptrdiff_t(before), queue.end());
      throw;
    }
    if (stop_) {
      for (const Piece& piece : queue) finish(piece, {ECANCELED, piece.offset});
      queue.clear();
    }
    wake = std::min(idle_, int(queue.size() - std::min(before, queue.size())));
  }
  for (int i = 0; i < wake; ++i) work_.notify_one();
}

// Marks the slots as being read into. Throws for one that is already, or that comes twice.
void Lanes::expect(int64_t nbytes, const std::vector<Run>& runs) {
  std::vector<int> marked;
  for (const Run& run : runs)
    for (int slot : run.slots) {
      if (slots_[slot].missing != 0) {
        for (int one : marked) slots_[one].missing = 0;
        throw std::invalid_argument("a slot is being read into already");
      }
      slots_[slot] = {nbytes, false, {}};
      marked.push_back(slot);
    }
}

// The piece that begins `begin` bytes after the run does.
Lanes::Piece Lanes::make_piece(int fd, int64_t nbytes, const Run& run, int64_t begin, bool drop) const {
  const int64_t end = std::min(begin + piece_bytes_, nbytes * int64_t(run.slots.size()));
  Piece piece{fd, run.offset + begin, end - begin, {}, {}, drop};
  for (int64_t at = begin; at < end;) {
    const int slot = run.slots[at / nbytes];
    const int64_t inside = at % nbytes, count = std::min(nbytes - inside, end - at);
    piece.buffers.push_back({memory_ + slot * slot_bytes_ + inside, size_t(count)});
    piece.parts.push_back({slot, count});
    at += count;
  }
  return piece;
}

bool Lanes::covers(const Piece& piece, int slot) {
  return std::any_of(piece.parts.begin(), piece.parts.end(), [slot](const Part& p) { return p.slot == slot; });
}

void Lanes::promote(int slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  promote_locked(slot);
}

void Lanes::promote_locked(int slot) {
  for (auto piece = prefetch_.begin(); piece != prefetch_.end();) {
    if (covers(*piece, slot)) {
      demand_.push_back(std::move(*piece));
      piece = prefetch_.erase(piece);
    } else {
      ++piece;
    }
  }
}

bool Lanes::cancel(int slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t queued = 0;
  for (const Queue* queue : {&demand_, &prefetch_})
    for (const Piece& piece : *queue)
      if (piece.parts.size() == 1 && piece.parts[0].slot == slot) queued += piece.nbytes;
  if (queued == 0 || queued != slots_[slot].missing) return false;  // a lane writes to the slot
  for (Queue* queue : {&demand_, &prefetch_})
    queue->erase(std::remove_if(queue->begin(), queue->end(), [slot](const Piece& p) { return covers(p, slot); }),
                 queue->end());
  slots_[slot] = {};
  __atomic_store_n(state_ + slot, uint8_t(kEmpty), __ATOMIC_RELEASE);
  return true;
}

int Lanes::wait(int slot) {
  int now = state(slot);
  if (now != kReading) return now;
  std::unique_lock<std::mutex> lock(mutex_);
  promote_locked(slot);
  if (waiting_++ == 0) waiting_since_ = Clock::now();
  done_.wait(lock, [&] { return (now = state(slot)) != kReading || slots_[slot].missing == 0; });
  if (--waiting_ == 0)
    nanoseconds_waited_ += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - waiting_since_).count();
  return now;
}

void Lanes::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return demand_.empty() && prefetch_.empty() && reading_ == 0; });
}

ReadFailure Lanes::failure(int slot) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slots_[slot].failure;
}

int64_t Lanes::nanoseconds_waited() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return nanoseconds_waited_;
}

int Lanes::pending() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return int(demand_.size() + prefetch_.size()) + reading_;
}

void Lanes::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    for (Queue* queue : {&demand_, &prefetch_}) {
      for (const Piece& piece : *queue) finish(piece, {ECANCELED, piece.offset});
      queue->clear();
    }
  }
  work_.notify_all();
  for (auto& lane : lanes_) lane.join();
  lanes_.clear();
  done_.notify_all();
}

void Lanes::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;
    work_.wait(lock, [this] { return stop_ || !demand_.empty() || !prefetch_.empty(); });
    --idle_;
    if (stop_) return;
    Queue& queue = demand_.empty() ? prefetch_ : demand_;
    const Piece piece = std::move(queue.front());
    queue.pop_front();
    ++reading_;
    lock.unlock();
    const ReadFailure failure = read(piece);
    lock.lock();
    --reading_;
    finish(piece, failure);
  }
}

// With the mutex held: the piece is done with; what lies before a failure has arrived. A slot is published when its
// last byte is done with.
void Lanes::finish(const Piece& piece, ReadFailure failure) {
  int64_t end = piece.offset;
  for (const Part& part : piece.parts) {
    Slot& slot = slots_[part.slot];
    end += part.nbytes;
    const bool ok = failure.offset < 0 || end <= failure.offset;
    if (!ok && (!slot.failed || failure.offset < slot.failure.offset)) slot.failure = failure;
    slot.failed |= !ok;
    slot.missing -= part.nbytes;
    if (slot.missing == 0) __atomic_store_n(state_ + part.slot, slot.failed ? kFailed : kReady, __ATOMIC_RELEASE);
  }
  done_.notify_all();
}

// A failure with offset -1 is none.
ReadFailure Lanes::read(const Piece& piece) {
  ReadFailure failure = read_once(piece);
  for (int i = 0; i < retries_ && failure.offset >= 0 && !stop_; ++i) failure = read_once(piece);
  if (piece.drop) posix_fadvise(piece.fd, piece.offset, piece.nbytes, POSIX_FADV_DONTNEED);
  return failure;
}

ReadFailure Lanes::read_once(const Piece& piece) {
  int64_t done = 0, reached = 0;  // a file that ends inside a block is seen by going back and reaching no further
  int stalls = 0;                 // as is a read that stops short
  std::vector<iovec> left;
  while (done < piece.nbytes) {
    if (stop_) return {ECANCELED, piece.offset + done};
    left.clear();
    int64_t skip = done;
    for (const iovec& buffer : piece.buffers) {
      const int64_t here = std::min(skip, int64_t(buffer.iov_len));
      skip -= here;
      if (here < int64_t(buffer.iov_len))
        left.push_back({static_cast<uint8_t*>(buffer.iov_base) + here, buffer.iov_len - size_t(here)});
    }
    const int count = int(std::min<size_t>(left.size(), 1024));  // IOV_MAX
    const ssize_t n = preadv(piece.fd, left.data(), count, piece.offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && done % kSector != 0) {  // O_DIRECT goes on at whole blocks only
      done = done / kSector * kSector;
      continue;
    }
    if (n < 0) return {errno, piece.offset + done};
    done += n;
    if (done <= reached) {
      struct stat file;
      if (fstat(piece.fd, &file) != 0 || file.st_size <= piece.offset + reached) return {0, piece.offset + reached};
      if (++stalls > kStalls) return {EIO, piece.offset + reached};
      done = done / kSector * kSector;
      continue;
    }
    bytes_read_ += done - reached;
    reached = done;
  }
  return {0, -1};
}

}  // namespace headrace
