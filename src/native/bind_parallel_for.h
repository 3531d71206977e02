// A Python callable as a host's parallel-for.
#pragma once

#include <exception>
#include <string>

#include "bind_common.h"
#include "parallel_for.h"

namespace headrace {

// Made and destroyed with the GIL, run without it.
class PyParallelFor : public ParallelFor {
 public:
  explicit PyParallelFor(nb::callable call) : call_(std::move(call)) {}

  bool run(int count, Task& task) override;
  // What was wrong with a run that returned false: raises what the callable raised.
  std::string failure();

 private:
  nb::callable call_;
  std::exception_ptr raised_;
  std::string cause_;
};

}  // namespace headrace
