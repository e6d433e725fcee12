#include "base/log.hpp"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

namespace tsr::log {

namespace {

spdlog::level::level_enum to_spdlog(Level level) {
    switch (level) {
        case Level::debug: return spdlog::level::debug;
        case Level::info: return spdlog::level::info;
        case Level::warning: return spdlog::level::warn;
        case Level::error: return spdlog::level::err;
        case Level::off: return spdlog::level::off;
    }
    return spdlog::level::off;
}

// Returns nullopt for an unknown name.
std::optional<Level> level_named(std::string_view name) {
    if (name == "debug") return Level::debug;
    if (name == "info") return Level::info;
    if (name == "warning") return Level::warning;
    if (name == "error") return Level::error;
    if (name == "off") return Level::off;
    return std::nullopt;
}

std::shared_ptr<spdlog::logger> stderr_logger() {
    auto logger = std::make_shared<spdlog::logger>("tessera", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    logger->set_pattern("%H:%M:%S.%e tessera[%P] %l: %v");
    logger->set_level(spdlog::level::trace);  // the threshold is kept here, in Logger::level
    return logger;
}

// The caller's function and its data; destroyed once it is replaced and its last call has returned.
struct Target {
    Target(Sink function, void* data, void (*release)(void*)) : sink(function), user_data(data), destroy(release) {}
    ~Target() {
        if (destroy != nullptr) destroy(user_data);
    }
    Target(const Target&) = delete;
    Target& operator=(const Target&) = delete;

    Sink sink;
    void* user_data;
    void (*destroy)(void*);
};

struct Logger {
    Logger() {
        const char* text = std::getenv("TESSERA_LOG");
        if (text == nullptr || *text == '\0') return;
        if (const auto named = level_named(text)) {
            level = static_cast<int32_t>(*named);
        } else {
            standard_error->warn(
                "unknown TESSERA_LOG level '{}', using warning; use debug, info, warning, error or off", text);
        }
    }

    std::atomic<int32_t> level{static_cast<int32_t>(Level::warning)};
    std::shared_ptr<spdlog::logger> standard_error = stderr_logger();
    std::mutex mutex;                // guards what follows
    std::shared_ptr<Target> target;  // nullptr: standard error
};

// Never destroyed: threads may still log while the process exits.
Logger& logger() {
    static auto* instance = new Logger;
    return *instance;
}

}  // namespace

void check_environment() { (void)logger(); }

void set_level(Level level) { logger().level.store(static_cast<int32_t>(level), std::memory_order_relaxed); }

void set_sink(Sink sink, void* user_data, void (*destroy)(void*)) {
    auto target = std::make_shared<Target>(sink, user_data, destroy);
    Logger& l = logger();
    const std::lock_guard lock(l.mutex);
    l.target.swap(target);  // the former one ends after the lock
}

bool has_sink() {
    Logger& l = logger();
    const std::lock_guard lock(l.mutex);
    return l.target != nullptr && l.target->sink != nullptr;
}

bool enabled(Level level) { return static_cast<int32_t>(level) >= logger().level.load(std::memory_order_relaxed); }

void write(Level level, const std::string& line) {
    Logger& l = logger();
    std::shared_ptr<Target> target;
    {
        const std::lock_guard lock(l.mutex);
        target = l.target;
    }
    // Without the lock: the caller's function may wait for another lock (such as Python's) held by a thread that logs,
    // and the destruction of the target may log.
    if (target && target->sink != nullptr) {
        target->sink(static_cast<int32_t>(level), line.c_str(), target->user_data);
    } else {
        l.standard_error->log(to_spdlog(level), line);
    }
}

}  // namespace tsr::log
