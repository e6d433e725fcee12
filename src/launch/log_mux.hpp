// Merges the output of the ranks: complete lines, each prefixed with its rank, to the agent's own output, and raw bytes
// to one file per rank. Owned by the agent's thread, which polls the descriptors. Memory is bounded: when the terminal
// does not accept the output, the ranks' pipes are no longer read, and the ranks block as they would on the terminal.
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

// Splits a stream of bytes into lines. Lines longer than `max_line` are split.
class LineBuffer {
   public:
    static constexpr size_t max_line = 65536;
    // Calls `line` with each line, without its end ("\n" or "\r\n"). Of a progress bar, which rewrites its line with
    // "\r", only the last state before the newline counts.
    void feed(std::string_view bytes, const std::function<void(std::string_view line)>& line);
    void finish(const std::function<void(std::string_view line)>& line);  // for a last line without a newline

   private:
    void emit(const std::function<void(std::string_view line)>& line);

    std::string partial_;
};

// The last lines of a stream, limited in number and length.
class Tail {
   public:
    static constexpr size_t max_lines = 100;  // a stack trace and the message before it
    static constexpr size_t max_line = 1000;
    void add(std::string_view line);
    [[nodiscard]] std::vector<std::string> lines() const { return {lines_.begin(), lines_.end()}; }

   private:
    std::deque<std::string> lines_;
};

// Queues bytes for a descriptor that may not accept them at once.
class OutputQueue {
   public:
    static constexpr size_t high_water = size_t{1} << 20;
    explicit OutputQueue(int fd) : fd_(fd) {}
    void push(std::string_view bytes);
    void write_some();  // as much as possible without blocking
    void write_all(Deadline deadline);
    [[nodiscard]] int fd() const { return fd_; }
    [[nodiscard]] bool empty() const { return sent_ == pending_.size(); }
    [[nodiscard]] bool full() const { return pending_.size() - sent_ > high_water; }
    // If output is lost when the job ends now: why, prefixed with `what`; otherwise empty. A reader that has closed its
    // end is not a loss.
    [[nodiscard]] std::string loss(const std::string& what) const;

   private:
    int fd_;
    std::string pending_;
    size_t sent_ = 0;
    int failure_ = 0;  // errno of a failed write: further output is dropped, and the job continues
};

class LogMux {
   public:
    LogMux(int out, int err, bool prefix);

    // Takes ownership of the reading ends of a rank's pipes. `file` may be invalid.
    void add_rank(int rank, const std::string& program, Fd out, Fd err, Fd file);
    // The last lines that the most recently added rank `rank` printed to its standard error.
    [[nodiscard]] std::vector<std::string> last_error_lines(int rank) const;
    // Prints a line of the agent to its standard error.
    void say(std::string_view line);

    // For poll(): append_polls adds the descriptors to watch; handle_polls takes the results (the same entries, in the
    // same order).
    void append_polls(std::vector<pollfd>& polls) const;
    void handle_polls(const pollfd* polls, size_t count);

    // Call after the ranks have ended: reads what is left in the pipes, and writes everything.
    void drain(Deadline deadline);
    // Which output of the ranks was lost and why; empty if none.
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
    std::string lost_file_;      // the error of the first log file that could not be written
};

}  // namespace tsr
