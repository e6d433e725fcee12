// The deadline of a wait for what another thread or process is about to do. It passes only where a test fails.
#pragma once

#include "base/clock.hpp"
#include "patience.hpp"

namespace tsr::testing {

inline Deadline soon() { return Deadline::in(patience(milliseconds{20000})); }

}  // namespace tsr::testing
