#include "store/token.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <vector>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"
#include "store/address.hpp"

namespace tsr {

namespace {

constexpr size_t hex_digits = 64;

int nibble(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

// Reads from the start whatever the shared file offset is: many processes may have inherited the same description.
Token read_token(int fd, const std::string& source) {
    char text[hex_digits + 2];
    const ssize_t size = ::pread(fd, text, sizeof text, 0);
    if (size < 0) throw os_error(fmt::format("the job token cannot be read ({})", source), errno);
    return Token::parse(std::string_view(text, static_cast<size_t>(size)), source);
}

Token token_of_file(const std::string& path, const std::string& source) {
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
    if (!file.valid()) throw os_error(fmt::format("the job token's file cannot be opened ({})", source), errno);
    struct stat info{};
    if (::fstat(file.get(), &info) != 0) throw os_error(fmt::format("fstat of {}", path), errno);
    if (!S_ISREG(info.st_mode)) {
        throw Error(Code::permission, fmt::format("the job token's file ({}) is not a regular file", source));
    }
    if (info.st_uid != ::geteuid()) {
        throw Error(Code::permission, fmt::format("the job token's file ({}) belongs to user {}, not to user {}",
                                                  source, info.st_uid, ::geteuid()));
    }
    if ((info.st_mode & 077) != 0) {
        throw Error(Code::permission,
                    fmt::format("the job token's file ({}) has mode {:04o}, so that others may read it; chmod 600 it",
                                source, info.st_mode & 07777));
    }
    return read_token(file.get(), source);
}

// A directory that is the user's alone; nullopt if `path` is something else.
std::optional<Fd> own_directory(const std::string& path, bool create) {
    if (create && ::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return std::nullopt;
    Fd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    struct stat info{};
    if (!directory.valid() || ::fstat(directory.get(), &info) != 0) return std::nullopt;
    if (info.st_uid != ::geteuid() || (info.st_mode & 077) != 0) return std::nullopt;
    return directory;
}

bool is_of_user(const std::string& path) {
    struct stat info{};
    return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid();
}

// The token that all processes of this user share on this machine. Whoever comes first makes it: written in full
// under a private name, then linked, so that nobody reads half a token.
Token token_of_user() {
    const std::string directory = runtime_directory();
    const std::string path = directory + "/token";
    const std::string source = "the user's token file " + path;
    if (::access(path.c_str(), F_OK) != 0) {
        std::string draft = directory + "/token.XXXXXX";
        const Fd file(::mkostemp(draft.data(), O_CLOEXEC));  // mode 0600
        if (!file.valid()) throw os_error(fmt::format("a token file cannot be made in {}", directory), errno);
        const std::string text = Token::random().hex() + "\n";
        const bool written = ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
        const int write_failure = errno;
        const bool linked = written && (::link(draft.c_str(), path.c_str()) == 0 || errno == EEXIST);
        const int link_failure = errno;
        ::unlink(draft.c_str());
        if (!linked) throw os_error(fmt::format("writing {}", path), written ? link_failure : write_failure);
    }
    return token_of_file(path, source);
}

}  // namespace

void random_bytes(uint8_t* bytes, size_t size) {
    while (size > 0) {
        const ssize_t got = ::getrandom(bytes, size, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) throw os_error("getrandom", errno);
        bytes += got;
        size -= static_cast<size_t>(got);
    }
}

Token Token::random() {
    Token token;
    random_bytes(token.bytes.data(), token.bytes.size());
    token.source = "drawn by this process";
    return token;
}

Token Token::parse(std::string_view text, std::string source) {
    if (text.ends_with('\n')) text.remove_suffix(1);
    Token token;
    bool valid = text.size() == hex_digits;
    for (size_t i = 0; valid && i < token.bytes.size(); ++i) {
        const int high = nibble(text[2 * i]);
        const int low = nibble(text[2 * i + 1]);
        valid = high >= 0 && low >= 0;
        token.bytes[i] = static_cast<uint8_t>(high << 4 | low);
    }
    if (!valid) {
        throw Error(Code::invalid_argument,
                    fmt::format("the job token ({}) must be {} hexadecimal digits, as `openssl rand -hex 32` prints; "
                                "it has {} characters or others than digits",
                                source, hex_digits, text.size()));
    }
    token.source = std::move(source);
    return token;
}

std::string Token::hex() const {
    std::string text;
    text.reserve(hex_digits);
    for (const uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
    return text;
}

std::string runtime_directory() {
    const uid_t user = ::geteuid();
    // The first two exist where somebody logged in, and are the user's; a shell that ssh or a launcher starts may not know.
    std::vector<std::string> places = {fmt::format("/run/user/{}", user)};
    if (const auto xdg = env_text("XDG_RUNTIME_DIR")) places.insert(places.begin(), *xdg);
    for (const std::string& place : places) {
        std::string path = place + "/tessera";
        if (own_directory(place, false) && own_directory(path, true)) return path;
    }
    std::string shared = fmt::format("/tmp/tessera-{}", user);
    if (own_directory(shared, true)) return shared;
    // Another user may have made that first.
    if (const auto home = env_text("HOME"); home && is_of_user(*home)) {
        std::string path = *home + "/.tessera";
        if (own_directory(path, true)) return path;
    }
    throw Error(
        Code::permission,
        fmt::format("neither {} nor .tessera in the home directory is a directory of user {} alone (mode 0700, no "
                    "symbolic link), to hold the job token: set XDG_RUNTIME_DIR to one, or TESSERA_TOKEN_FILE to "
                    "a file of mode 0600",
                    shared, user));
}

Token find_token(const std::string& given, bool loopback, const std::string& address) {
    if (!given.empty()) return Token::parse(given, "the token option");
    const auto file = env_text("TESSERA_TOKEN_FILE");
    if (const auto fd = env_number("TESSERA_TOKEN_FD", 0, 1 << 20)) {
        const std::string source = fmt::format("TESSERA_TOKEN_FD={}", *fd);
        try {
            return read_token(static_cast<int>(*fd), source);
        } catch (const Error& error) {
            // A program between the launcher and this process may have closed the descriptor, or it is another now.
            if (!file) {
                throw Error(Code::permission,
                            fmt::format("{}; the descriptor must stay open in every process between the launcher and "
                                        "this one, or set TESSERA_TOKEN_FILE",
                                        error.what()))
                    .caused_by(error);
            }
        }
    }
    if (file) return token_of_file(*file, "TESSERA_TOKEN_FILE=" + *file);
    if (const auto text = env_text("TESSERA_TOKEN")) return Token::parse(*text, "TESSERA_TOKEN");
    if (loopback) return token_of_user();
    if (address.starts_with("tcp://")) {
        check_host(Address::parse(address).host);
    } else if (address.find("://") == std::string::npos && !address.empty()) {
        check_host(address);  // that a server is to listen on
    }
    throw Error(Code::permission,
                fmt::format("no job token for the store at {}: give all ranks the same TESSERA_TOKEN_FILE (mode 0600, "
                            "made by `openssl rand -hex 32`) or TESSERA_TOKEN, or start the job with --insecure or "
                            "TESSERA_INSECURE=1 if everybody on the network is trusted",
                            address));
}

}  // namespace tsr
