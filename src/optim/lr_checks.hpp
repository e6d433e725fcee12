// Refuses options of learning-rate curves that are out of range.
#pragma once

#include <cstdint>

#include "base/refuse.hpp"
#include "optim/optimizer.hpp"  // check_not_negative

namespace tsr {

inline void check_steps(const char* name, int64_t steps) { refuse_unless(steps >= 1, name, steps, "at least 1"); }

}  // namespace tsr
