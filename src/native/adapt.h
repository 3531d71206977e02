// LoRA adapters: what a pass adds to the projections of rows whose sequence has one (R16).
//
// An adapter is pairs of weights for operations of the program. Rows that follow each other with the same adapter are
// taken together. All memory is taken when an adapter is loaded.
#pragma once

#include <memory>
#include <vector>

#include "ops.h"

namespace headrace {

struct Batch;

// Rows [offset, offset + b.n) of what operation `op` writes get b @ (a @ vector).
struct LowRank {
  int op;
  int offset;
  PackedWeight a, b;
};

// Where the results of a projection go: rows of `stride` values.
struct Target {
  int32_t* rows;
  ptrdiff_t stride;
  int fraction_bits;
};

class Adapters {
 public:
  static constexpr int kRows = 96;  // most of a unit, a multiple of 12 and of 16
  struct Rows {
    int first, count;
  };

  Adapters(const Tier& tier, int num_threads, int capacity);
  ~Adapters();

  // Takes the pairs of one adapter, for a program of that many operations; the weights are borrowed.
  int load(const std::vector<LowRank>& pairs, int num_ops);
  void unload(int number);
  bool loaded(int number) const;

  void begin(const Batch& batch);
  bool active() const { return !blocks_.empty(); }  // whether any row of the batch has an adapter

  // Units of the two stages of an operation: the inner vectors, then what they add.
  int down_units(int op);
  int up_units(int op);
  Rows rows_of(int unit) const { return {units_[unit].first_row, units_[unit].rows}; }
  // x: the vectors of all rows. clipped i64[rows of the unit].
  void down(int unit, const Activations& x, int64_t* clipped);
  void up(int unit, int thread, const Target& target, int64_t* clipped);

 private:
  struct Adapter;
  struct Scratch;
  struct Pair {
    LowRank weights;
    int at;  // of its inner values in a row of inner_
  };
  struct Block {
    int adapter, first, count;
  };
  struct Unit {
    const Pair* pair;
    int first_row, rows, first_tile, last_tile;
    bool leads;  // the first unit of its rows
  };

  const std::vector<Pair>& pairs_of(const Block& block, int op) const;
  int make_units(int op, bool up);

  const Tier& tier_;
  const int num_threads_, capacity_;
  std::vector<std::unique_ptr<Adapter>> adapters_;
  int width_ = 0;  // inner values of a row: those of all pairs of an operation
  std::vector<int32_t> inner_, exponents_, zeros_;
  std::vector<std::unique_ptr<Scratch>> scratch_;  // of each thread

  // Of the current run.
  std::vector<Block> blocks_;
  std::vector<Unit> units_;  // of the current stage
};

}  // namespace headrace
