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

#include "arena.h"
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

// The memory of a mixture: all that depends on the rows of a pass or on the model.
struct MixtureSpace {
  struct Part {
    int expert, slot, first, count;  // grouped rows
    int at = 0;                      // where the first of them is in the buffers, once its group is open
  };
  // What one unit of a projection computes: rows [first_row, +rows) of the buffers, tiles [first_tile, +tiles).
  struct Unit {
    int slot, first_row, rows, first_tile, tiles;
    int first_pair;  // grouped row that first_row holds
  };
  struct Chunk {
    int first, count;
  };
  struct Held {  // which grouped rows of an expert the open group computes
    int first = 0, end = 0, at = 0;
  };
  // Vectors of grouped rows.
  struct Vectors {
    Vectors(Arena& arena, int k, int rows);
    Activations view() { return {codes.data(), scales.data(), sums.data(), rounded.data(), exponents.data(), k}; }
    size_t nbytes() const {
      return codes.size() + 2 * (scales.size() + sums.size() + rounded.size()) + 4 * exponents.size();
    }
    int k;
    Array<int8_t> codes;
    Array<int16_t> scales, sums, rounded;
    Array<int32_t> exponents;
  };

  MixtureSpace(Arena& arena, const MixtureShape& shape, int num_threads, int capacity, int max_pairs);

  const size_t max_pairs;  // that the buffers hold
  Array<int32_t> chosen, shares, gates;  // [rows][top_k], [rows][top_k], [rows]
  Array<int32_t> guessed;                // [kForecastRows][top_k]
  Array<int32_t> start, place, row_of;   // [experts + 1], [rows][top_k], [grouped rows]
  Array<Held> held;                      // [experts]; unused where the pass is mixed at once
  Vectors gathered, inner;
  Array<int32_t> wide, outputs;  // [max_pairs][2 expert_rows], [max_pairs][hidden]
  Array<int64_t> sums;           // [capacity][hidden] where a pass may have more pairs than fit
  List<Part> parts;
  Array<Part> late;  // as many
  List<Unit> units;
  List<Chunk> chunks;
};

class Mixture {
 public:
  // The space outlives it.
  Mixture(const Tier& tier, const MixtureShape& shape, const Exp2& exp2, const int32_t* sigmoid, int num_threads,
          MixtureSpace& space);

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
  const int32_t* guessed() const { return space_.guessed.data(); }
  int guessed_rows() const { return guessed_rows_; }
  const int32_t* chosen() const { return space_.chosen.data(); }
  int rows() const { return rows_; }
  int32_t gate(int row) const { return space_.gates[size_t(row)]; }

  // Chooses what the next stages compute: the experts of `layer` from the table, or `count` given ones, the `last` of
  // the layer or not.
  void take_all(int layer);
  void take(int layer, const int32_t* experts, const int32_t* slots, int count, bool last);
  // What was taken is computed group by group: opens the next one, which may be empty. One group is all of it where the
  // pass is mixed at once.
  void open_group();
  bool more_groups() const { return group_end_ < space_.parts.size(); }
  // Whether the stage of mixing has something to do for the open group.
  bool mixes() const { return !whole_ || last_; }

  int gather_units() const { return rows_ == 1 ? 0 : int(group_end_ - group_begin_); }
  int open_projection(const WeightSpans& w);  // makes the units; returns how many
  int silu_units() const { return int(space_.chunks.size()); }
  void gather(int unit, const Activations& x);
  // Projections count the clips of each row of their unit: clipped i64[unit_rows(unit)], zeros before.
  void gate_up(int unit, const ExpertLayout& layout, const Activations& x, int64_t* clipped);
  void silu(int unit, int64_t* scratch, int32_t* padded);
  void down(int unit, const ExpertLayout& layout, int64_t* clipped);
  void mix(int32_t* x, int row, int64_t* clipped);
  int unit_rows(int unit) const { return space_.units[size_t(unit)].rows; }
  // The row of the pass that row `index` of a unit belongs to.
  int row_of(int unit, int index) const { return space_.row_of[size_t(space_.units[size_t(unit)].first_pair + index)]; }

  // Bytes of what depends on the rows of a pass.
  size_t nbytes() const;
  // The expert whose read failed since the last call, as layer * 2^16 + expert, or -1.
  int take_failure() { return failed_.exchange(-1); }
  int64_t uses() const { return uses_; }
  int64_t foretold() const { return foretold_; }  // choices that had been guessed for
  int64_t foretold_right() const { return foretold_right_; }
  int64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

 private:
  using Part = MixtureSpace::Part;
  using Unit = MixtureSpace::Unit;
  using Chunk = MixtureSpace::Chunk;
  using Held = MixtureSpace::Held;

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
  MixtureSpace& space_;
  ExpertSlots slots_{};

  int rows_ = 0, layer_ = 0, guessed_rows_ = 0, guessed_layer_ = -1;
  bool whole_ = true;  // all pairs of the pass fit: mixed at once
  bool last_ = true;   // what was taken is the last of the layer
  size_t group_begin_ = 0, group_end_ = 0;  // the open group among them
  int groups_ = 0;                          // of this layer, the open one included
  int64_t uses_ = 0, foretold_ = 0, foretold_right_ = 0;
  int right_[kForecastRows] = {};  // of a row's choices those that had been guessed
  std::atomic<int> failed_{-1};
  std::atomic<int64_t> waited_ns_{0};
};

}  // namespace headrace
