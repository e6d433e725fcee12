// The events of a job as JSON lines for programs: {"event": "start" | "exit" | "stop" | "restart" | "end", "time": …}.
// Each line is written at once, or as soon as a slow reader accepts it: nothing waits for the reader.
#pragma once

#include <poll.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "base/json.hpp"
#include "launch/log_mux.hpp"

namespace tsr {

class EventLog {
   public:
    // With an empty path nothing is written.
    explicit EventLog(std::string path) : path_(std::move(path)) {}
    // Creates or truncates the file. Returns false if it is a FIFO without a reader. Throws IO.
    [[nodiscard]] bool open();
    void write(const char* event, double time, Json::Object fields);
    void append_polls(std::vector<pollfd>& polls) const;
    void write_some();
    void write_all(Deadline deadline);
    // What was lost and why; empty if nothing.
    [[nodiscard]] std::string losses() const;

   private:
    std::string path_;
    Fd file_;
    std::optional<OutputQueue> queue_;  // of that file
};

// Seconds since 1970.
[[nodiscard]] double wall_time();

}  // namespace tsr
