// Refuses options of learning-rate curves that are out of range.
#pragma once

#include <fmt/core.h>

#include <cstdint>

#include "base/error.hpp"
#include "optim/optimizer.hpp"  // check_not_negative

namespace tsr {

template <class T>
void refuse_unless(bool right, const char* name, T value, const char* wanted) {
    if (!right) throw Error(Code::invalid_argument, fmt::format("{} is {}; it must be {}", name, value, wanted));
}

inline void check_steps(const char* name, int64_t steps) { refuse_unless(steps >= 1, name, steps, "at least 1"); }

}  // namespace tsr
