// Merges the output of the ranks: complete lines, each prefixed with its rank, to the agent's own output, and raw bytes
// to files. Owned by the agent's thread, which polls the descriptors. Memory is bounded: when the terminal
// does not accept the output, the ranks' pipes are no longer read, and the ranks block as they would on the terminal.
#pragma once

#include <poll.h>

#include <array>
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
#include "launch/rank_output.hpp"

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

// A file that ranks or streams may share. On an error it is closed, for all of them.
using SharedFile = std::shared_ptr<Fd>;

// What becomes of a rank's output, by stream.
struct RankOutput {
    std::string prefix;      // before each printed line
    bool names_rank = true;  // the prefix does, so PyTorch's own "[rank3]:" before a line is left out
    std::array<SharedFile, 2> files;
    std::array<bool, 2> shown{true, true};  // printed to the agent's own output
};

class LogMux {
   public:
    LogMux(int out, int err);

    // Takes ownership of the reading ends of a rank's pipes.
    void add_rank(int rank, Fd out, Fd err, RankOutput output);
    // Lines of this stream of ranks that are added later also go to `file`, with their prefix, if they contain one of
    // the texts.
    void duplicate(Stream stream, std::vector<std::string> texts, SharedFile file);
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
    struct Duplicate {
        std::vector<std::string> texts;
        SharedFile file;
    };
    struct Source {
        Fd pipe;
        OutputQueue* output;
        bool shown;
        std::string prefix;        // as printed, perhaps in colour
        std::string plain_prefix;  // as in files
        std::string said_twice;    // "[rank3]:", which PyTorch puts before the lines of a traceback
        LineBuffer lines;
        SharedFile file;
        Duplicate duplicate;
        Tail* tail;  // of standard error; nullptr for standard output
    };

    bool read_some(Source& source);  // false at the end
    void emit(Source& source, std::string_view line);
    void write(const SharedFile& file, std::string_view bytes);
    [[nodiscard]] bool congested() const { return out_.full() || err_.full(); }

    OutputQueue out_;
    OutputQueue err_;
    std::array<Duplicate, 2> duplicates_;  // by stream
    std::list<Source> sources_;
    std::map<int, Tail> tails_;  // by rank
    std::string lost_file_;      // the error of the first log file that could not be written
};

}  // namespace tsr
