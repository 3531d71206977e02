#include "bind_parallel_for.h"

namespace headrace {
namespace {

// What a host calls with an index.
struct PyTask {
  std::shared_ptr<Round> round;

  bool call(nb::object index) const {
    const std::shared_ptr<Round> held = round;  // the host may drop the task meanwhile
    int64_t number = 0;
    // A whole float could be cast, but is no index.
    if (!PyIndex_Check(index.ptr()) || !nb::try_cast(index, number))
      return held->invent(nb::repr(index).c_str()), true;
    nb::gil_scoped_release release;
    return held->call(number);
  }
};

}  // namespace

bool PyParallelFor::run(int count, Task& task) {
  const auto round = std::make_shared<Round>(count, task);
  {
    nb::gil_scoped_acquire acquire;
    try {
      call_(count, PyTask{round});
    } catch (...) {
      raised_ = std::current_exception();
    }
  }
  cause_ = round->close();
  return raised_ == nullptr && cause_.empty();
}

std::string PyParallelFor::failure() {
  if (raised_ != nullptr) std::rethrow_exception(raised_);
  return cause_;
}

void bind_parallel_for(nb::module_& m) {
  nb::class_<PyTask>(m, "Task").def("__call__", &PyTask::call, nb::arg("index").none());
}

}  // namespace headrace
