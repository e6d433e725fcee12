// What goes wrong as a value, for who votes on it or goes on with the next.
#pragma once

#include <optional>

#include "base/error.hpp"

namespace tsr {

// What `body` throws.
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
