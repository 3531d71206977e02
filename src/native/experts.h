// The experts of a layer: routing of rows, rows grouped by expert, and the stages that compute a part of them.
//
// Experts lie in slots that the caller fills, possibly while this computes: experts that are there come first, and a
// unit waits for the read that it needs. A part is some of the chosen experts; every chosen expert belongs to one part,
// and the sum over all of them is added once, so neither parts nor arrival change a result.
//
// What the experts make of a (row, chosen expert) pair waits in memory for at most `max_pairs` of them. A pass of no
// more pairs is mixed once, when all are there. A pass of more goes through the stages group by group, each of as many
// pairs as there is room for, and adds each group's terms to a sum of int64 for every row: terms are rounded one by one
// (R14), so this has the same bits.
#pragma once

#include <atomic>
#include <vector>

#include "exp2.h"
#include "ops.h"
#include "slot_state.h"

namespace headrace {

struct ExpertSlots {
  const uint8_t* memory;  // [slots][slot_bytes]
  size_t slot_bytes;
  const int32_t* table;   // [layers][experts]: slot or -1
  uint8_t* state;         // [slots]
  uint8_t* used;          // [slots]: counts uses, up to 255
};

// A packed weight inside a record: byte offsets of its fields; mins -1 where there are none.
struct WeightSpans {
  int64_t codes, scales, mins, row;
  int32_t n, k, bits, group;

  PackedWeight at(const uint8_t* record) const {
    return {record + codes, reinterpret_cast<const int16_t*>(record + scales),
            mins < 0 ? nullptr : reinterpret_cast<const int16_t*>(record + mins),
            reinterpret_cast<const int32_t*>(record + row), n, k, bits, group};
  }
};

struct ExpertLayout {
  WeightSpans gate_up, down;
};

constexpr int kUnitRows = 96;     // of an expert that a unit takes, at most: a multiple of 12 and of 16
constexpr int kForecastRows = 4;  // passes of more rows use most experts anyway

struct MixtureShape {
  int hidden, num_experts, top_k, expert_rows, expert_width, fraction_bits;
};

class Mixture {
 public:
  // What one unit of a projection computes: rows [first_row, +rows) of the buffers, tiles [first_tile, +tiles).
  struct Unit {
    int slot, first_row, rows, first_tile, tiles;
    int first_pair;  // grouped row that first_row holds
  };

  Mixture(const Tier& tier, const MixtureShape& shape, const Exp2& exp2, const int32_t* sigmoid, int num_threads,
          int capacity, int max_pairs);

  void bind(const ExpertSlots& slots) { slots_ = slots; }
  bool bound() const { return slots_.memory != nullptr; }

  // Chooses the experts of a row from its logits; `gate` follows them when the layer has a shared expert.
  void choose(int layer, int row, const int32_t* logits, bool normalise, bool gate);
  // Chooses the likeliest experts of a later layer as a guess.
  void guess(int row, const int32_t* logits);
  // A pass begins: what was guessed in the one before is void.
  void begin() { guessed_rows_ = 0; }
  // Groups the rows by expert, once all have chosen; false when an expert that was chosen, or guessed for layer
  // `ahead`, has no slot. ahead -1: there are no guesses.
  bool group(int layer, int rows, int ahead);
  const int32_t* guessed() const { return guessed_.data(); }
  int guessed_rows() const { return guessed_rows_; }
  const int32_t* chosen() const { return chosen_.data(); }
  int rows() const { return rows_; }
  int32_t gate(int row) const { return gates_[size_t(row)]; }

  // Chooses what the next stages compute: the experts of `layer` from the table, or `count` given ones, the `last` of
  // the layer or not.
  void take_all(int layer);
  void take(int layer, const int32_t* experts, const int32_t* slots, int count, bool last);
  // What was taken is computed group by group: opens the next one, which may be empty. One group is all of it where the
  // pass is mixed at once.
  void open_group();
  bool more_groups() const { return group_end_ < parts_.size(); }
  // Whether the stage of mixing has something to do for the open group.
  bool mixes() const { return !whole_ || last_; }

  int gather_units() const { return rows_ == 1 ? 0 : int(group_end_ - group_begin_); }
  int open_projection(const WeightSpans& w);  // makes the units; returns how many
  int silu_units() const { return int(chunks_.size()); }
  void gather(int unit, const Activations& x);
  // Projections count the clips of each row of their unit: clipped i64[unit_rows(unit)], zeros before.
  void gate_up(int unit, const ExpertLayout& layout, const Activations& x, int64_t* clipped);
  void silu(int unit, int64_t* scratch, int32_t* padded);
  void down(int unit, const ExpertLayout& layout, int64_t* clipped);
  void mix(int32_t* x, int row, int64_t* clipped);
  int unit_rows(int unit) const { return units_[size_t(unit)].rows; }
  // The row of the pass that row `index` of a unit belongs to.
  int row_of(int unit, int index) const { return row_of_[size_t(units_[size_t(unit)].first_pair + index)]; }

  // Bytes of what depends on the rows of a pass.
  size_t nbytes() const;
  // The expert whose read failed since the last call, as layer * 2^16 + expert, or -1.
  int take_failure() { return failed_.exchange(-1); }
  int64_t uses() const { return uses_; }
  int64_t foretold() const { return foretold_; }  // choices that had been guessed for
  int64_t foretold_right() const { return foretold_right_; }
  int64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

 private:
  struct Part {
    int expert, slot, first, count;  // grouped rows
    int at = 0;                      // where the first of them is in the buffers, once its group is open
  };
  struct Chunk {
    int first, count;
  };
  struct Held {  // which grouped rows of an expert the open group computes
    int first = 0, end = 0, at = 0;
  };
  // Vectors of grouped rows.
  struct Vectors {
    Vectors(int k, int rows);
    Activations view() { return {codes.data(), scales.data(), sums.data(), rounded.data(), exponents.data(), k}; }
    int k;
    std::vector<int8_t> codes;
    std::vector<int16_t> scales, sums, rounded;
    std::vector<int32_t> exponents;
    size_t nbytes() const {
      return codes.size() + 2 * (scales.size() + sums.size() + rounded.size()) + 4 * exponents.size();
    }
  };

  void likeliest(const int32_t* logits, int32_t* out) const;
  bool all_have_slots(int layer, const int32_t* experts, int count) const;
  void add_part(int layer, int expert, int slot);
  bool wait(const Unit& unit);
  const uint8_t* record(int slot) const { return slots_.memory + size_t(slot) * slots_.slot_bytes; }

  const Tier& tier_;
  const MixtureShape shape_;
  const Exp2 exp2_;
  const int32_t* sigmoid_;
  const int num_threads_;
  const size_t max_pairs_;  // that the buffers hold
  ExpertSlots slots_{};

  int rows_ = 0, layer_ = 0, guessed_rows_ = 0, guessed_layer_ = -1;
  bool whole_ = true;  // all pairs of the pass fit: mixed at once
  bool last_ = true;   // what was taken is the last of the layer
  std::vector<int32_t> chosen_, shares_, gates_;  // [rows][top_k], [rows][top_k], [rows]
  std::vector<int32_t> guessed_;                  // [kForecastRows][top_k]
  std::vector<int32_t> start_, place_, row_of_;   // [experts + 1], [rows][top_k], [grouped rows]
  std::vector<Part> parts_;
  size_t group_begin_ = 0, group_end_ = 0;  // the open group among them
  int groups_ = 0;                          // of this layer, the open one included
  std::vector<Held> held_;                  // [experts]; unused where the pass is mixed at once
  std::vector<Unit> units_;
  std::vector<Chunk> chunks_;
  Vectors gathered_, inner_;
  std::vector<int32_t> wide_, outputs_;  // [max_pairs][2 expert_rows], [max_pairs][hidden]
  std::vector<int64_t> sums_;            // [capacity][hidden] where a pass may have more pairs than fit
  int64_t uses_ = 0, foretold_ = 0, foretold_right_ = 0;
  int right_[kForecastRows] = {};  // of a row's choices those that had been guessed
  std::atomic<int> failed_{-1};
  std::atomic<int64_t> waited_ns_{0};
};

}  // namespace headrace
