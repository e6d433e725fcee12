// The log: one line per message, to standard error or to the caller's function. Apart from each thread's last error it
// is the only global mutable state of the library. Thread-safe. Format strings are fmt's: log::warning("rank {} is
// late", r).
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <string>
#include <utility>

namespace tsr::log {

enum class Level : int32_t { debug = 1, info = 2, warning = 3, error = 4, off = 5 };

// Called without a lock, so possibly on several threads at once.
using Sink = void (*)(int32_t level, const char* line, void* user_data);

// Prints a warning if TESSERA_LOG has an unknown level; otherwise the first use of the log does.
void check_environment();

void set_level(Level level);
void set_sink(Sink sink, void* user_data, void (*destroy)(void*));  // sink nullptr: standard error
[[nodiscard]] bool has_sink();                                      // lines go to the caller's function

[[nodiscard]] bool enabled(Level level);
void write(Level level, const std::string& line);

template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
    if (enabled(Level::debug)) write(Level::debug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
    if (enabled(Level::info)) write(Level::info, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
    if (enabled(Level::warning)) write(Level::warning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
    if (enabled(Level::error)) write(Level::error, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tsr::log
