// The job token: 256 secret bits that all ranks of a job share, and where a process finds them. It is never passed in
// arguments, where other users could read it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tsr {

struct Token {
    std::array<uint8_t, 32> bytes{};
    std::string source;  // where it came from, for messages: "TESSERA_TOKEN_FILE=/run/..."

    [[nodiscard]] static Token random();
    // Parses 64 hexadecimal digits, optionally followed by a newline. Throws INVALID_ARGUMENT naming `source`, never
    // the text.
    [[nodiscard]] static Token parse(std::string_view text, std::string source);
    [[nodiscard]] std::string hex() const;
};

// Finds the token: `given` if not empty, else TESSERA_TOKEN_FD, TESSERA_TOKEN_FILE, TESSERA_TOKEN, and on `loopback`
// the user's own file, which is created if missing. `address` is for the message of the PERMISSION error.
[[nodiscard]] Token find_token(const std::string& given, bool loopback, const std::string& address);

// The user's runtime directory for Tessera, with mode 0700 and owned by the user: under XDG_RUNTIME_DIR, else
// /run/user/<uid>, else /tmp/tessera-<uid>, else ~/.tessera if another user has taken that. Created if missing. Throws
// PERMISSION if none is exclusively the user's.
[[nodiscard]] std::string runtime_directory();

}  // namespace tsr
