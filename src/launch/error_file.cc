#include "launch/error_file.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <mutex>
#include <utility>

#include "base/dir_at.hpp"
#include "base/env.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/write_whole.hpp"
#include "launch/events.hpp"

namespace tsr {

namespace {

constexpr size_t max_file_bytes = size_t{1} << 20;

std::string readable_text(std::string_view text) { return readable_utf8(text.substr(0, max_file_bytes / 4)); }

int rank_in(const Json& json) {
    const int64_t rank = json.as_int();
    return rank >= 0 && rank <= INT32_MAX ? static_cast<int>(rank) : -1;
}

// Both launchers' forms: {"message": {"message": m, "extraInfo": {...}}} and {"message": m}.
RecordedError parse(const std::string& text, const std::string& path) {
    RecordedError error;
    const Json document = Json::parse(text, path);
    const Json* body = &document.at("message");
    if (body->is(Json::Kind::object)) {
        const Json* extra = body->find("extraInfo");
        if (extra != nullptr) {
            if (const Json* stack = extra->find("py_callstack")) error.traceback = stack->as_string();
            if (const Json* facts = extra->find("tessera")) {
                error.code = facts->at("code").as_string();
                error.peer = rank_in(facts->at("peer"));
                error.rank = rank_in(facts->at("rank"));
                if (const Json* number = facts->find("job_rank")) error.job_rank = rank_in(*number);
            }
            const Json* stamp = extra->find("tessera_timestamp");
            if (stamp == nullptr) stamp = extra->find("timestamp");
            if (stamp != nullptr) {
                if (stamp->is(Json::Kind::string)) {
                    const std::string& digits = stamp->as_string();
                    std::from_chars(digits.data(), digits.data() + digits.size(), error.timestamp);
                } else {
                    error.timestamp = stamp->as_double();
                }
            }
        }
        body = &body->at("message");
    }
    error.message = body->as_string();
    return error;
}

Json facts_of(const ErrorRecord& error) {
    return Json::Object{{"code", code_name(error.code)},   {"rank", error.rank},
                        {"job_rank", error.launcher_rank}, {"peer", error.launcher_peer},
                        {"pid", int64_t{::getpid()}},      {"operation", error.operation},
                        {"sequence", error.sequence}};
}

void write(const std::string& path, std::string_view message, std::string_view traceback, const ErrorRecord* facts) {
    Json extra{Json::Object{}};
    extra.set("py_callstack", readable_text(traceback));
    const std::string time = fmt::format("{:.6f}", wall_time());
    extra.set("timestamp", time.substr(0, time.find('.')));  // torchrun fails on a fraction
    extra.set("tessera_timestamp", time);
    if (facts != nullptr) extra.set("tessera", facts_of(*facts));
    Json body{Json::Object{}};
    body.set("message", readable_text(message));
    body.set("extraInfo", std::move(extra));
    Json document{Json::Object{}};
    document.set("message", std::move(body));
    write_whole_file(path, document.dump() + "\n", 0600);  // the agent never reads half of it
}

}  // namespace

void record_error(std::string_view message, std::string_view traceback, const ErrorRecord* facts) {
    auto path = env_text("TESSERA_ERROR_FILE");
    if (!path) path = env_text("TORCHELASTIC_ERROR_FILE");
    static std::atomic<bool> recorded{false};  // of this process, as its environment is
    if (path && !recorded.exchange(true)) write(*path, message, traceback, facts);
}

void record_failure(const ErrorRecord* failure) noexcept {
    const auto path = env_text("TESSERA_FAILURE_FILE");
    if (!path) return;
    static std::mutex mutex;  // guards what follows
    static bool recorded = false;
    const std::lock_guard lock(mutex);
    try {
        if (failure == nullptr) {
            DirAt directory;
            std::string name;
            if (!std::exchange(recorded, false) || DirAt::open_parent(*path, directory, name) != 0) return;
            (void)directory.remove_file(name);
        } else if (!std::exchange(recorded, true)) {
            write(*path, failure->message, "", failure);
        }
    } catch (...) {
        log::warning("cannot tell the launcher why a communicator failed: {}", current_error().what());
    }
}

std::optional<RecordedError> read_error_file(const std::string& path) {
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat info{};
    if (!file.valid() || ::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
    std::string text(std::min(static_cast<size_t>(info.st_size), max_file_bytes), '\0');
    const ssize_t got = ::pread(file.get(), text.data(), text.size(), 0);
    if (got != static_cast<ssize_t>(text.size())) return std::nullopt;
    try {
        return parse(text, path);
    } catch (const Error&) {
        return std::nullopt;
    }
}

}  // namespace tsr
