// Errors as values, for callers that vote on them or continue with the next task.
#pragma once

#include <optional>

#include "base/error.hpp"

namespace tsr {

// Runs `body`; returns the error that it throws, if any.
template <class Body>
std::optional<Error> attempt(Body&& body) {
    try {
        body();
        return std::nullopt;
    } catch (...) {
        return current_error();
    }
}

}  // namespace tsr
