#include "launch/events.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/write_whole.hpp"

namespace tsr {

EventLog::EventLog(const std::string& path) : path_(path) {
    if (path.empty()) return;
    file_ = Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
    if (!file_.valid()) throw os_error(fmt::format("the events file {}", path), errno);
}

void EventLog::write(const char* event, double time, Json::Object fields) {
    if (!file_.valid()) return;
    Json line{Json::Object{}};
    line.set("event", event);
    line.set("time", time);
    for (Json::Member& field : fields) {
        if (field.value.is(Json::Kind::string)) field.value = readable_utf8(field.value.as_string());  // a rank's words
        line.set(field.key, std::move(field.value));
    }
    const std::string text = line.dump() + "\n";
    if (write_whole(file_.get(), text)) return;
    log::warning("{}", os_error(fmt::format("writing the events file {} fails", path_), errno).what());
    file_.reset();
}

double wall_time() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace tsr
