// How long tests wait for what has to happen, on a machine that may be slow: TESSERA_TEST_PATIENCE, a factor that the
// runner sets from the machine's measured speed (tools/machine_speed.py), stretches each such wait. A time that is itself under
// test stays as it is, such as a timeout that has to pass; the bound within which a test expects it to have passed stretches.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tsr::testing {

// Of this process: at least 1, and 1 where nobody measured.
inline double patience_factor() {
    static const double factor = [] {
        const char* given = std::getenv("TESSERA_TEST_PATIENCE");  // NOLINT(concurrency-mt-unsafe): nobody sets it
        if (given == nullptr) return 1.0;
        const double value = std::stod(given);
        if (!(value >= 1)) throw std::runtime_error("TESSERA_TEST_PATIENCE is " + std::string(given) + "; at least 1");
        return value;
    }();
    return factor;
}

inline std::chrono::milliseconds patience(std::chrono::milliseconds span) {
    return std::chrono::ceil<std::chrono::milliseconds>(span * patience_factor());
}

// As the C API takes it.
inline int32_t patience_ms(int32_t span_ms) {
    return static_cast<int32_t>(patience(std::chrono::milliseconds{span_ms}).count());
}

}  // namespace tsr::testing
