#include "launch/log_mux.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/error.hpp"
#include "base/terminal.hpp"
#include "base/write_whole.hpp"

namespace tsr {

namespace {

// Any pipe or terminal that poll() calls writable takes this much without blocking.
constexpr size_t safe_write = 4096;

// The prefix in the colour of its rank, without the blank at its end.
std::string coloured(int rank, std::string_view prefix) {
    constexpr std::array<int, 6> palette = {36, 33, 32, 35, 34, 31};
    const size_t text = prefix.find_last_not_of(' ') + 1;
    return fmt::format("\x1b[{}m{}\x1b[0m{}", palette[static_cast<size_t>(rank) % palette.size()],
                       prefix.substr(0, text), prefix.substr(text));
}

}  // namespace

void LineBuffer::feed(std::string_view bytes, const std::function<void(std::string_view line)>& line) {
    while (!bytes.empty()) {
        const size_t newline = bytes.find('\n');
        const bool whole = newline != std::string_view::npos && partial_.size() + newline <= max_line;
        const size_t taken = whole ? newline : std::min(bytes.size(), max_line - partial_.size());
        partial_ += bytes.substr(0, taken);
        bytes.remove_prefix(whole ? taken + 1 : taken);
        if (whole || partial_.size() >= max_line) emit(line);
    }
}

void LineBuffer::finish(const std::function<void(std::string_view line)>& line) {
    if (!partial_.empty()) emit(line);
}

void LineBuffer::emit(const std::function<void(std::string_view line)>& line) {
    std::string_view text = partial_;
    if (text.ends_with('\r')) text.remove_suffix(1);
    const size_t back = text.rfind('\r');
    if (back != std::string_view::npos) text.remove_prefix(back + 1);
    line(text);
    partial_.clear();
}

void Tail::add(std::string_view line) {
    lines_.emplace_back(line.substr(0, max_line));
    if (lines_.size() > max_lines) lines_.pop_front();
}

void OutputQueue::push(std::string_view bytes) {
    if (failure_ == 0) pending_ += bytes;
}

void OutputQueue::write_some() {
    while (!empty()) {
        pollfd entry{fd_, POLLOUT, 0};
        if (::poll(&entry, 1, 0) <= 0) break;
        const ssize_t written = ::write(fd_, pending_.data() + sent_, std::min(pending_.size() - sent_, safe_write));
        if (written < 0 && (errno == EINTR || errno == EAGAIN)) break;
        if (written < 0) {
            failure_ = errno;
            sent_ = pending_.size();
            break;
        }
        sent_ += static_cast<size_t>(written);
    }
    if (empty() || sent_ > high_water) {
        pending_.erase(0, sent_);
        sent_ = 0;
    }
}

void OutputQueue::write_all(Deadline deadline) {
    for (write_some(); !empty() && !deadline.expired(); write_some()) {
        pollfd entry{fd_, POLLOUT, 0};
        (void)::poll(&entry, 1, static_cast<int>(deadline.slice().count()));
    }
}

std::string OutputQueue::loss(const std::string& what) const {
    if (failure_ != 0) return failure_ == EPIPE ? "" : os_error(what, failure_).what();
    return empty() ? "" : what + ": nobody reads it";
}

LogMux::LogMux(int out, int err) : out_(out), err_(err) {}

void LogMux::add_rank(int rank, Fd out, Fd err, RankOutput output) {
    tails_[rank] = {};
    for (const Stream stream : both_streams) {
        const auto index = static_cast<size_t>(stream);
        const bool is_out = stream == Stream::out;
        Source source{};
        source.pipe = std::move(is_out ? out : err);
        ::fcntl(source.pipe.get(), F_SETFL, O_NONBLOCK);  // only our end: the rank's end is another description
        source.output = is_out ? &out_ : &err_;
        source.shown = output.shown[index];
        source.plain_prefix = output.prefix;
        source.prefix = !output.prefix.empty() && wants_colours(source.output->fd()) ? coloured(rank, output.prefix)
                                                                                     : output.prefix;
        source.said_twice = output.prefix.empty() || !output.names_rank ? "" : fmt::format("[rank{}]:", rank);
        source.file = output.files[index];
        source.duplicate = duplicates_[index];
        source.tail = is_out ? nullptr : &tails_[rank];
        sources_.push_back(std::move(source));
    }
}

void LogMux::duplicate(Stream stream, std::vector<std::string> texts, SharedFile file) {
    duplicates_[static_cast<size_t>(stream)] = {std::move(texts), std::move(file)};
}

std::vector<std::string> LogMux::last_error_lines(int rank) const {
    const auto tail = tails_.find(rank);
    return tail == tails_.end() ? std::vector<std::string>{} : tail->second.lines();
}

void LogMux::say(std::string_view line) {
    err_.push(fmt::format("tessera: {}\n", line));
    err_.write_some();
}

void LogMux::append_polls(std::vector<pollfd>& polls) const {
    if (!out_.empty()) polls.push_back({out_.fd(), POLLOUT, 0});
    if (!err_.empty()) polls.push_back({err_.fd(), POLLOUT, 0});
    if (congested()) return;
    for (const Source& source : sources_) polls.push_back({source.pipe.get(), POLLIN, 0});
}

void LogMux::handle_polls(const pollfd* polls, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        if (polls[i].revents == 0) continue;
        const auto source =
            std::ranges::find_if(sources_, [&](const Source& s) { return s.pipe.get() == polls[i].fd; });
        if (source != sources_.end() && !read_some(*source)) sources_.erase(source);
    }
    out_.write_some();
    err_.write_some();
}

bool LogMux::read_some(Source& source) {
    std::array<char, 65536> chunk;
    const ssize_t got = ::read(source.pipe.get(), chunk.data(), chunk.size());
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    const auto print = [&](std::string_view line) { emit(source, line); };
    if (got == 0) {
        source.lines.finish(print);
        return false;
    }
    const std::string_view bytes(chunk.data(), static_cast<size_t>(got));
    write(source.file, bytes);
    source.lines.feed(bytes, print);
    return true;
}

void LogMux::emit(Source& source, std::string_view line) {
    if (!source.said_twice.empty() && line.starts_with(source.said_twice)) {
        line.remove_prefix(source.said_twice.size());
        if (line.starts_with(' ')) line.remove_prefix(1);
    }
    if (source.tail != nullptr) source.tail->add(line);
    const auto& [texts, file] = source.duplicate;
    const auto in_line = [&](const std::string& text) { return line.find(text) != std::string_view::npos; };
    if (file && std::ranges::any_of(texts, in_line)) write(file, fmt::format("{}{}\n", source.plain_prefix, line));
    if (!source.shown) return;
    source.output->push(source.prefix);
    source.output->push(line);
    source.output->push("\n");
}

void LogMux::write(const SharedFile& file, std::string_view bytes) {
    if (!file || !file->valid() || write_whole(file->get(), bytes)) return;
    lost_file_ = os_error("cannot write a rank's log file", errno).what();
    say(lost_file_ + "; the log ends here");
    file->reset();
}

void LogMux::drain(Deadline deadline) {
    while (!sources_.empty() && !deadline.expired()) {
        std::vector<pollfd> polls;
        append_polls(polls);
        if (::poll(polls.data(), polls.size(), static_cast<int>(deadline.slice().count())) < 0 && errno != EINTR) break;
        handle_polls(polls.data(), polls.size());
    }
    for (Source& source : sources_) {
        source.lines.finish([&](std::string_view line) { emit(source, line); });
    }
    sources_.clear();
    out_.write_all(deadline);
    err_.write_all(deadline);
}

std::string LogMux::losses() const {
    std::string text = lost_file_;
    for (const std::string& loss :
         {out_.loss("cannot write standard output"), err_.loss("cannot write standard error")}) {
        if (!loss.empty()) text += (text.empty() ? "" : "; ") + loss;
    }
    return text;
}

}  // namespace tsr
