#include "draw.h"

#include <algorithm>
#include <vector>

namespace headrace {
namespace {

constexpr int kIdBits = 20, kUnitBits = 16;
constexpr int64_t kLog2e = 1512775;        // log2(e) * 2^20
constexpr int64_t kSpan = int64_t(31) << 16;
constexpr int kBucketBits = 12;            // sixteen buckets for a factor of two
constexpr int kBuckets = int(kSpan >> kBucketBits);

using Key = int64_t;  // distance below the largest, id
using Wide = unsigned __int128;

template <typename T>
class Drawer {
 public:
  Drawer(const T* logits, int count, const Draw& how) : logits_(logits), count_(count), how_(how) {
    peak_ = *std::max_element(logits, logits + count);
  }

  int pick(uint64_t word) const {
    const bool all = how_.top_k == 0 && how_.top_p >= int64_t(1) << kUnitBits;
    return all ? pick_of_all(word) : pick_of(likeliest(), word);
  }

 private:
  // How far below the largest, for any logits: the difference of two int64 may be wider than int64.
  uint64_t below(int id) const { return uint64_t(peak_) - uint64_t(int64_t(logits_[id])); }

  // Distance below the largest, log2, Q16; kSpan or more has no weight.
  int64_t distance(int id) const {
    const uint64_t b = below(id);
    return b > uint64_t(how_.reach) ? kSpan : distance_of(int64_t(b));
  }

  // Within reach, and with parameters within the bounds of draw.h, products stay below 2^49.
  int64_t distance_of(int64_t below) const {
    return ((below * how_.inverse_temperature) >> how_.fraction_bits) * kLog2e >> 20;
  }

  // How far below the largest a logit may be for a distance below `limit`, which is at most kSpan.
  int64_t reach_of(int64_t limit) const {
    int64_t inside = 0, outside = how_.reach + 1;
    while (outside - inside > 1) {
      const int64_t middle = inside + (outside - inside) / 2;
      (distance_of(middle) < limit ? inside : outside) = middle;
    }
    return inside;
  }

  int64_t weight(int64_t distance) const { return how_.exp2(distance); }

  bool likely_enough(int64_t weight) const { return weight << kUnitBits >= how_.min_p << 30; }

  // Without a choice by rank nothing needs to be stored: one walk for the total, one to the point.
  int pick_of_all(uint64_t word) const {
    int64_t total = 0;
    for (int id = 0; id < count_; ++id) total += kept_weight(id);
    const int64_t point = int64_t(Wide(word) * Wide(total) >> 64);
    int64_t sum = 0;
    int id = 0;
    while ((sum += kept_weight(id)) <= point) ++id;
    return id;
  }

  int64_t kept_weight(int id) const {
    const int64_t d = distance(id);
    if (d >= kSpan) return 0;
    const int64_t w = weight(d);
    return likely_enough(w) ? w : 0;
  }

  // The likeliest tokens that top-k and top-p leave, in order of rank. Buckets of distances say how far down the
  // ranks reach, so that only these are sorted.
  std::vector<Key> likeliest() const {
    int64_t sizes[kBuckets] = {0}, weights[kBuckets] = {0};
    for (int id = 0; id < count_; ++id) {
      const int64_t d = distance(id);
      if (d >= kSpan) continue;
      ++sizes[d >> kBucketBits];
      if (how_.top_k == 0) weights[d >> kBucketBits] += weight(d);
    }
    if (how_.top_k == 0) {
      int64_t total = 0;
      for (int64_t w : weights) total += w;
      std::vector<Key> keys = first_buckets(weights, least_sum(total));
      keep_share(&keys, total);
      return keys;
    }
    std::vector<Key> keys = first_buckets(sizes, how_.top_k);
    if (keys.size() > size_t(how_.top_k)) keys.resize(size_t(how_.top_k));
    int64_t total = 0;
    for (Key key : keys) total += weight(key >> kIdBits);
    keep_share(&keys, total);
    return keys;
  }

  // The weight that the share top_p of `total` needs, rounded up.
  int64_t least_sum(int64_t total) const {
    const Wide need = Wide(total) * Wide(how_.top_p), below = (Wide(1) << kUnitBits) - 1;
    return int64_t((need + below) >> kUnitBits);
  }

  // Sorted keys of the first buckets whose amounts reach `wanted`, or of all.
  std::vector<Key> first_buckets(const int64_t* amounts, int64_t wanted) const {
    int last = 0;
    for (int64_t sum = amounts[0]; sum < wanted && last + 1 < kBuckets; sum += amounts[last]) ++last;
    const uint64_t most = uint64_t(reach_of(int64_t(last + 1) << kBucketBits));
    std::vector<Key> keys;
    for (int id = 0; id < count_; ++id)
      if (below(id) <= most) keys.push_back(distance_of(int64_t(below(id))) << kIdBits | id);
    std::sort(keys.begin(), keys.end());
    return keys;
  }

  // The shortest prefix whose weight reaches the share; at least one token.
  void keep_share(std::vector<Key>* keys, int64_t total) const {
    if (how_.top_p >= int64_t(1) << kUnitBits) return;
    const int64_t wanted = least_sum(total);
    size_t size = 0;
    for (int64_t sum = 0; size < keys->size() && (size == 0 || sum < wanted); ++size) sum += weight((*keys)[size] >> kIdBits);
    keys->resize(size);
  }

  int pick_of(std::vector<Key> keys, uint64_t word) const {
    constexpr Key mask = (Key(1) << kIdBits) - 1;
    const auto unlikely = [this](Key key) { return !likely_enough(weight(key >> kIdBits)); };
    keys.erase(std::remove_if(keys.begin(), keys.end(), unlikely), keys.end());
    std::sort(keys.begin(), keys.end(), [](Key a, Key b) { return (a & mask) < (b & mask); });
    int64_t total = 0;
    for (Key key : keys) total += weight(key >> kIdBits);
    const int64_t point = int64_t(Wide(word) * Wide(total) >> 64);
    size_t at = 0;
    for (int64_t sum = weight(keys[0] >> kIdBits); sum <= point; sum += weight(keys[at] >> kIdBits)) ++at;
    return int(keys[at] & mask);
  }

  const T* logits_;
  int count_;
  const Draw& how_;
  int64_t peak_;
};

}  // namespace

template <typename T>
int draw(const T* logits, int count, const Draw& how, uint64_t word) {
  return Drawer<T>(logits, count, how).pick(word);
}

template int draw<int32_t>(const int32_t*, int, const Draw&, uint64_t);
template int draw<int64_t>(const int64_t*, int, const Draw&, uint64_t);

}  // namespace headrace
