// Access control of a store: before any other message, client and server prove to each other that they hold the same
// job token and belong to the same job and epoch. Four messages of fixed size:
//
//   client                                                       server
//     hello   magic version mode epoch job nonce         (84) ->
//          <- answer  magic version mode refusal epoch nonce mac    (84)
//     proof   mac                                        (32) ->
//          <- verdict                                               (1)
//
// A MAC is HMAC-SHA-256 over version, algorithm name, role, modes, job, both epochs and both nonces, with a key derived
// from the token for each role: a reflected, replayed or modified message fails. The epoch fences off ranks of an
// earlier round. Without a token (`insecure`) the MACs are zero, but job and epoch are still compared. Sides of different
// modes (without a token, with one, with TLS by the token, with TLS by certificates) refuse each other, and as the modes are
// in the MACs, nobody in between can talk a side into another mode.
//
// What follows the verdict is plaintext, or TLS 1.3. With TLS each side first sends a MAC (32) over what TLS exports for this
// connection, the server before the client. So the two ends of the encryption hold the token, whoever signed their
// certificates; and a stranger never reaches the code of TLS.
//
// Deliberately not in the MAC. Addresses: an attacker between the two sides can also change plaintext that follows, so
// an address in the MAC would promise more than the connection provides, and would refuse hosts behind NAT. Ranks:
// the store does not know them. Every holder of the token may set every key, and what a rank publishes about itself is
// an ordinary value; the transports verify it where they can (Endpoint: user, process and a random name).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "store/store.hpp"
#include "store/tls.hpp"
#include "store/token.hpp"

namespace tsr::handshake {

inline constexpr uint16_t protocol_version = 1;
inline constexpr size_t hello_size = 84;
inline constexpr size_t answer_size = 84;
inline constexpr size_t proof_size = 32;
inline constexpr size_t verdict_size = 1;
inline constexpr size_t binding_size = 32;

using Digest = std::array<uint8_t, 32>;

enum class Verdict : uint8_t {
    accepted = 1,
    wrong_token = 2,
    other_job = 3,
    other_epoch = 4,
};

enum class Mode : uint8_t { insecure = 0, token = 1, tls_by_token = 2, tls_by_certificates = 3 };
enum class Role : uint8_t { client = 1, server = 2 };

// The credentials of one side, the same for all its handshakes.
struct Party {
    Mode mode = Mode::token;
    Digest client_key{};
    Digest server_key{};
    Digest job{};
    uint64_t epoch = 0;
    std::string job_id;
    std::string token_source;
    std::shared_ptr<const TlsContext> tls;  // nullptr: plaintext

    [[nodiscard]] bool insecure() const { return mode == Mode::insecure; }
    // Finds the token as tessera/store.h documents, and TLS by TlsOptions::from_environment(); `address` is for messages.
    [[nodiscard]] static Party of(const StoreOptions& options, bool loopback, const std::string& address);
};

// What `role` sends over a new TLS connection: the MAC over what TLS exports there.
[[nodiscard]] std::string binding_of(const Party& party, Role role, std::string_view exported);
[[nodiscard]] bool is_binding_of(const Party& party, Role role, std::string_view exported, std::string_view binding);

class Server {
   public:
    explicit Server(const Party& party) : party_(party) {}

    // Whether `bytes` can be the beginning of a hello.
    [[nodiscard]] static bool plausible(std::string_view bytes);
    // The answer to a complete hello; afterwards `refusal()` says why the connection must end, if it must.
    [[nodiscard]] std::string answer(std::string_view hello);
    [[nodiscard]] const std::string& refusal() const { return refusal_; }
    [[nodiscard]] Verdict judge(std::string_view proof) const;

   private:
    const Party& party_;
    Digest client_nonce_{};
    Digest server_nonce_{};
    Digest client_job_{};
    uint64_t client_epoch_ = 0;
    std::string refusal_;
};

class Client {
   public:
    Client(const Party& party, std::string address);

    [[nodiscard]] std::string hello() const;
    // Returns the proof. Throws PERMISSION if the server has a different token or mode, VERSION if a different
    // protocol.
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
