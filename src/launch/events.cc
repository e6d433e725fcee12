#include "launch/events.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "base/error.hpp"

namespace tsr {

bool EventLog::open() {
    if (path_.empty()) return true;
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    file_ = Fd(::open(path_.c_str(), flags, 0644));
    if (file_.valid()) {
        queue_.emplace(file_.get());
        return true;
    }
    const int failure = errno;
    struct stat info{};  // ENXIO also stands for a socket or a missing device
    if (failure == ENXIO && ::stat(path_.c_str(), &info) == 0 && S_ISFIFO(info.st_mode)) return false;
    throw os_error(fmt::format("cannot open events file {}", path_), failure);
}

void EventLog::write(const char* event, double time, Json::Object fields) {
    if (!queue_) return;
    Json line{Json::Object{}};
    line.set("event", event);
    line.set("time", time);
    for (Json::Member& field : fields) {
        if (field.value.is(Json::Kind::string)) field.value = readable_utf8(field.value.as_string());  // a rank's words
        line.set(field.key, std::move(field.value));
    }
    queue_->push(line.dump() + "\n");
    queue_->write_some();
}

void EventLog::append_polls(std::vector<pollfd>& polls) const {
    if (queue_ && !queue_->empty()) polls.push_back({file_.get(), POLLOUT, 0});
}

void EventLog::write_some() {
    if (queue_) queue_->write_some();
}

void EventLog::write_all(Deadline deadline) {
    if (queue_) queue_->write_all(deadline);
}

std::string EventLog::losses() const {
    return queue_ ? queue_->loss(fmt::format("cannot write events file {}", path_)) : "";
}

double wall_time() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace tsr
