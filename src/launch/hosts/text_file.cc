#include "launch/hosts/text_file.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>

#include "base/dir_at.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"

namespace tsr {

namespace {

constexpr std::string_view spaces = " \t\r\v\f";
constexpr size_t longest_shown = 80;

}  // namespace

std::string read_text_file(const std::string& path, size_t limit, std::string_view what) {
    const auto failed = [&](int error) {
        const std::string text = fmt::format("cannot read {} {}", what, path);
        if (error == ENOENT) return Error(Code::not_found, text + ": it does not exist");
        return os_error(text, error);
    };
    const int opened = DirAt::working().open_file(path, O_RDONLY, 0, DirAt::Links::followed);
    if (opened < 0) throw failed(-opened);
    const Fd file(opened);
    std::string text;
    char chunk[4096];
    while (true) {
        const ssize_t got = ::read(file.get(), chunk, sizeof chunk);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) throw failed(errno);
        if (got == 0) return text;
        text.append(chunk, static_cast<size_t>(got));
        if (text.size() > limit) refuse("{} {} is larger than {} bytes", what, path, limit);
    }
}

std::string_view trimmed(std::string_view text) {
    const size_t first = text.find_first_not_of(spaces);
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(spaces) + 1 - first);
}

std::vector<std::string_view> pieces_of(std::string_view text, char separator) {
    std::vector<std::string_view> pieces;
    while (true) {
        const size_t end = text.find(separator);
        pieces.push_back(text.substr(0, end));
        if (end == std::string_view::npos) return pieces;
        text.remove_prefix(end + 1);
    }
}

std::vector<std::string_view> trimmed_lines(std::string_view text) {
    std::vector<std::string_view> lines = pieces_of(text, '\n');
    for (std::string_view& line : lines) line = trimmed(line);
    return lines;
}

std::string shown(std::string_view text) {
    std::string line = readable_utf8(text.substr(0, longest_shown));
    for (char& c : line) {
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
    }
    return line + (text.size() > longest_shown ? "..." : "");
}

}  // namespace tsr
