// What the host reads of an exchange's record: answers that it waits for, and faults.
#pragma once

#include <pybind11/pybind11.h>

#include "exchange/host.h"

namespace moe_ep {

void bind_record(pybind11::class_<Exchange>& bound);

}  // namespace moe_ep
