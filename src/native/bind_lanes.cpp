// Lanes in the Python module: the GIL is released while they wait.
#include <new>

#include "bind_common.h"
#include "lanes.h"

namespace headrace {
namespace {

using Memory = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using States = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require_slot(const Lanes& lanes, int slot) { require(0 <= slot && slot < lanes.num_slots(), "no such slot"); }

void make(Lanes* self, Memory memory, States state, int num_lanes, int64_t piece_bytes, int retries) {
  require(state.shape(0) == memory.shape(0), "state and memory have different numbers of slots");
  require(1 <= num_lanes && num_lanes <= 1024, "the number of lanes is not between 1 and 1024");
  require(piece_bytes >= kSector && piece_bytes % kSector == 0, "a piece is not a positive multiple of 4096 bytes");
  require(retries >= 0, "a negative number of retries");
  new (self) Lanes(memory.data(), state.data(), int(memory.shape(0)), int64_t(memory.shape(1)), num_lanes, piece_bytes,
                   retries);
}

void submit(Lanes& lanes, int fd, int64_t nbytes, const std::vector<std::tuple<int64_t, std::vector<int>>>& runs, bool drop,
            bool prefetch) {
  std::vector<Lanes::Run> checked;
  for (const auto& [offset, slots] : runs) {
    require(offset >= 0 && nbytes > 0 && nbytes <= lanes.slot_bytes(), "a record does not fit a slot");
    for (int slot : slots) {
      require_slot(lanes, slot);
      require(lanes.state(slot) == kReading, "a slot to read into is not marked as such");
    }
    checked.push_back({offset, slots});
  }
  lanes.submit(fd, nbytes, checked, drop, prefetch);
}

std::tuple<int, int64_t> failure(const Lanes& lanes, int slot) {
  require_slot(lanes, slot);
  const ReadFailure failure = lanes.failure(slot);
  return {failure.error, failure.offset};
}

int wait(Lanes& lanes, int slot) {
  require_slot(lanes, slot);
  nb::gil_scoped_release release;
  return lanes.wait(slot);
}

}  // namespace

void bind_lanes(nb::module_& m) {
  nb::class_<Lanes>(m, "Lanes")
      .def("__init__", &make, nb::arg("memory"), nb::arg("state"), nb::arg("num_lanes"), nb::arg("piece_bytes"),
           nb::arg("retries"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("submit", &submit)
      .def("promote", [](Lanes& l, int slot) { require_slot(l, slot), l.promote(slot); })
      .def("cancel", [](Lanes& l, int slot) { return require_slot(l, slot), l.cancel(slot); })
      .def("wait", &wait)
      .def("drain", &Lanes::drain, nb::call_guard<nb::gil_scoped_release>())
      .def("failure", &failure)
      .def("bytes_read", &Lanes::bytes_read)
      .def("nanoseconds_waited", &Lanes::nanoseconds_waited)
      .def("pending", &Lanes::pending)
      .def("close", &Lanes::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace headrace
