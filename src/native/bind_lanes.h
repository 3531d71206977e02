#pragma once

#include <nanobind/nanobind.h>

namespace headrace {

void bind_lanes(nanobind::module_& m);

}  // namespace headrace
