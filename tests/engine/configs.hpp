// What the tests of configurations share.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "base/error.hpp"
#include "engine/config.hpp"

namespace tsr::testing {

inline EngineConfig parsed(std::string_view text) { return EngineConfig::of(ConfigText(text)); }

// With which it is refused.
inline Error refusal_of(std::string_view text) {
    try {
        (void)parsed(text);
    } catch (const Error& error) {
        return error;
    }
    ADD_FAILURE() << "nothing was thrown for " << text;
    return Error(Code::ok, "");
}

inline bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace tsr::testing
