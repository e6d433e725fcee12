// Errors about arguments: INVALID_ARGUMENT with a formatted text.
#pragma once

#include <fmt/core.h>

#include <utility>

#include "base/error.hpp"

namespace tsr {

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
    throw Error(Code::invalid_argument, fmt::format(text, std::forward<Args>(args)...));
}

template <class T>
void refuse_unless(bool right, const char* name, T value, const char* wanted) {
    if (!right) refuse("{} is {}; it must be {}", name, value, wanted);
}

}  // namespace tsr
