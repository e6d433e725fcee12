// What happened to a job, as JSON lines for programs: {"event": "start" | "exit" | "stop" | "restart" | "end", "time": …}.
// Each line is written when it happens.
#pragma once

#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/json.hpp"

namespace tsr {

class EventLog {
   public:
    // Empty path: nothing is written. The file is made anew. Throws IO.
    explicit EventLog(const std::string& path);
    void write(const char* event, double time, Json::Object fields);

   private:
    std::string path_;
    Fd file_;
};

// Seconds since 1970.
[[nodiscard]] double wall_time();

}  // namespace tsr
