// The states of a slot of memory for an expert, as in src/headrace/kernels/program.py.
#pragma once

#include <cstdint>

namespace headrace {

enum SlotState : uint8_t { kEmpty, kReading, kReady, kFailed };

}  // namespace headrace
