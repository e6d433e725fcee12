// Merges what the ranks print: whole lines, each with its rank before it, on the agent's own output, and raw into a file a
// rank. Owned by the agent's thread, which polls the descriptors. Memory is bounded: when the terminal does not take
// the output, the ranks' pipes are no longer read, and the ranks wait as they would for the terminal.
#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"

namespace tsr {

// Cuts a stream of bytes into lines. A line longer than `max_line` is cut there.
class LineBuffer {
   public:
    static constexpr size_t max_line = 65536;
    // Calls `line` with each line without its end ("\n" or "\r\n"). Of a progress bar, which returns to the line's begin
    // with "\r" again and again, only the last state before the newline is a line.
    void feed(std::string_view bytes, const std::function<void(std::string_view line)>& line);
    void finish(const std::function<void(std::string_view line)>& line);  // what has no newline

   private:
    void emit(const std::function<void(std::string_view line)>& line);

    std::string partial_;
};

// The last lines of a stream, a bounded number of bounded length.
class Tail {
   public:
    static constexpr size_t max_lines = 100;  // a trace and the message before it
    static constexpr size_t max_line = 1000;
    void add(std::string_view line);
    [[nodiscard]] std::vector<std::string> lines() const { return {lines_.begin(), lines_.end()}; }

   private:
    std::deque<std::string> lines_;
};

// Bytes for a descriptor that may not take them at once.
class OutputQueue {
   public:
    static constexpr size_t high_water = size_t{1} << 20;
    explicit OutputQueue(int fd) : fd_(fd) {}
    void push(std::string_view bytes);
    void write_some();  // as much as goes without blocking
    void write_all(Deadline deadline);
    [[nodiscard]] int fd() const { return fd_; }
    [[nodiscard]] bool empty() const { return sent_ == pending_.size(); }
    [[nodiscard]] bool full() const { return pending_.size() - sent_ > high_water; }
    // Why something is lost if this is the end, `what` first; empty: nothing is. That a reader has gone is no loss.
    [[nodiscard]] std::string loss(const std::string& what) const;

   private:
    int fd_;
    std::string pending_;
    size_t sent_ = 0;
    int failure_ = 0;  // errno of a write that failed: the rest is dropped, the job goes on
};

class LogMux {
   public:
    LogMux(int out, int err, bool prefix);

    // Takes the reading ends of a rank's pipes. `file` may be invalid.
    void add_rank(int rank, const std::string& program, Fd out, Fd err, Fd file);
    // What rank `rank`, of those added last under this number, has printed last on its standard error.
    [[nodiscard]] std::vector<std::string> last_error_lines(int rank) const;
    // The agent's own line, on its error output.
    void say(std::string_view line);

    // For poll(): appends what to watch, then takes the results (the same entries, in the same order).
    void append_polls(std::vector<pollfd>& polls) const;
    void handle_polls(const pollfd* polls, size_t count);

    // Reads what is still in the pipes, and writes everything. The ranks have ended.
    void drain(Deadline deadline);
    // What of the ranks' output was lost, and why; empty: nothing.
    [[nodiscard]] std::string losses() const;

   private:
    struct Stream {
        Fd pipe;
        OutputQueue* output;
        std::string prefix;
        std::string said_twice;  // "[rank3]:", which PyTorch puts before the lines of a traceback
        LineBuffer lines;
        std::shared_ptr<Fd> file;
        Tail* tail;  // of standard error; nullptr for standard output
    };

    bool read_some(Stream& stream);  // false at the end
    void emit(Stream& stream, std::string_view line);
    [[nodiscard]] bool congested() const { return out_.full() || err_.full(); }

    OutputQueue out_;
    OutputQueue err_;
    bool prefix_;
    std::list<Stream> streams_;
    std::map<int, Tail> tails_;  // by rank
    std::string lost_file_;      // the first log file that could not be written, and why
};

}  // namespace tsr
