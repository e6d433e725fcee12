// Who may use a store: client and server prove to each other, before anything else is said, that they hold the same
// job token, and that they are of the same job and epoch. Four messages of fixed size:
//
//   client                                                       server
//     hello   magic version mode epoch job nonce         (84) ->
//          <- answer  magic version mode refusal epoch nonce mac    (84)
//     proof   mac                                        (32) ->
//          <- verdict                                               (1)
//
// A mac is HMAC-SHA-256 over version, algorithm name, role, modes, job, both epochs and both nonces, with a key
// derived from the token for each role: a message reflected or replayed fails, and nothing in it can be changed. The
// epoch fences off ranks of a former round. Without a token (`insecure`) the macs are zero and job and epoch are
// compared all the same; a secure and an insecure side refuse each other. What follows the handshake is plaintext.
//
// Not in the mac, and why. Addresses: whoever can stand between the two sides can also change the plaintext that follows,
// so an address in the mac would promise what the connection does not keep, and would refuse hosts behind a translation
// of addresses. A rank: the store knows none. Every holder of the token may set every key, and what a rank says of itself
// is a value like others; the transports check it where they can (Endpoint: user, process and a random name).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "store/store.hpp"
#include "store/token.hpp"

namespace tsr::handshake {

inline constexpr uint16_t protocol_version = 1;
inline constexpr size_t hello_size = 84;
inline constexpr size_t answer_size = 84;
inline constexpr size_t proof_size = 32;
inline constexpr size_t verdict_size = 1;

using Digest = std::array<uint8_t, 32>;

enum class Verdict : uint8_t {
    accepted = 1,
    wrong_token = 2,
    other_job = 3,
    other_epoch = 4,
};

// One side's standing: the same for all its handshakes.
struct Party {
    bool insecure = false;
    Digest client_key{};
    Digest server_key{};
    Digest job{};
    uint64_t epoch = 0;
    std::string job_id;
    std::string token_source;

    // Finds the token as tessera/store.h says; `address` is for messages.
    [[nodiscard]] static Party of(const StoreOptions& options, bool loopback, const std::string& address);
};

class Server {
   public:
    explicit Server(const Party& party) : party_(party) {}

    // Whether `bytes`, the first few of a hello, can become one.
    [[nodiscard]] static bool plausible(std::string_view bytes);
    // The answer to a full hello; `refused()` tells whether the connection ends with it.
    [[nodiscard]] std::string answer(std::string_view hello);
    [[nodiscard]] bool refused() const { return refused_; }
    [[nodiscard]] Verdict judge(std::string_view proof) const;

   private:
    const Party& party_;
    Digest client_nonce_{};
    Digest server_nonce_{};
    Digest client_job_{};
    uint64_t client_epoch_ = 0;
    bool refused_ = false;
};

class Client {
   public:
    Client(const Party& party, std::string address);

    [[nodiscard]] std::string hello() const;
    // The proof; throws PERMISSION if the server has another token or mode, VERSION if another protocol.
    [[nodiscard]] std::string prove(std::string_view answer);
    // Throws PERMISSION unless accepted.
    void accept(std::string_view verdict) const;

   private:
    const Party& party_;
    std::string address_;
    Digest nonce_{};
    uint64_t server_epoch_ = 0;
};

}  // namespace tsr::handshake
