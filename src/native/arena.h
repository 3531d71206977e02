// Memory that a runner computes in: one block, handed out piece by piece when the runner is made.
//
// An arena without memory only measures, so whoever takes arrays from one says in the same lines how large they are and
// how much memory they need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace headrace {

constexpr size_t kAlignment = 64;  // of the block and of every array in it

// Elements of an arena. Their values are whatever the memory held.
template <typename T>
class Array {
 public:
  Array() = default;
  Array(T* data, size_t size) : data_(data), size_(size) {}
  T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

class Arena {
 public:
  explicit Arena(uint8_t* memory) : memory_(memory) {}

  template <typename T>
  Array<T> take(size_t count) {
    T* at = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return {at, count};
  }

  size_t used() const { return used_; }

 private:
  uint8_t* memory_;
  size_t used_ = 0;
};

// A list in an array; who makes it proves that it is never longer.
template <typename T>
class List {
 public:
  explicit List(const Array<T>& room) : room_(room) {}
  void clear() { size_ = 0; }
  void push_back(const T& value) {
    if (size_ == room_.size()) std::abort();
    room_[size_++] = value;
  }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() const { return room_.data(); }
  T& operator[](size_t i) const { return room_[i]; }
  T& back() const { return room_[size_ - 1]; }
  T* begin() const { return room_.data(); }
  T* end() const { return room_.data() + size_; }

 private:
  Array<T> room_;
  size_t size_ = 0;
};

}  // namespace headrace
