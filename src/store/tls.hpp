// TLS 1.3 for connections of the library. Both ends prove who they are by a key made of the job token, or by certificates
// of one authority. There is one cipher suite, no session is resumed, and nobody falls back to an older protocol.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace tsr {

struct Token;

struct TlsOptions {
    enum class Kind { off, token, certificates };
    Kind kind = Kind::off;
    std::string authority;    // PEM files, for `certificates`: that of the authority's certificates,
    std::string certificate;  // this process's own chain,
    std::string key;          // and its key
    // A connection changes its keys after so many bytes. AES-GCM is safe for more than 2^38 with one key.
    uint64_t bytes_per_key = uint64_t{1} << 36;

    // The environment alone decides: TESSERA_TLS (0, 1 or psk), TESSERA_TLS_CA, TESSERA_TLS_CERT and TESSERA_TLS_KEY.
    // Throws INVALID_ARGUMENT.
    [[nodiscard]] static TlsOptions from_environment();
};

class TlsContext;  // what all connections of a Party share: thread-safe

// The key is derived from the token, the digest of the job's id and the epoch. Throws IO, PERMISSION (a key that others
// may read) or INVALID_ARGUMENT (not PEM, or a key of another certificate).
[[nodiscard]] std::shared_ptr<const TlsContext> make_tls(const TlsOptions& options, const Token& token,
                                                         const std::array<uint8_t, 32>& job, uint64_t epoch);

// One connection, over a non-blocking socket that the caller owns. Each call does what the socket allows and never waits.
class Tls {
   public:
    enum class End { client, server };
    Tls(const TlsContext& context, End end, int socket, std::string peer);
    ~Tls();  // sends nothing: a forked child may destroy its copy of a connection
    Tls(const Tls&) = delete;
    Tls& operator=(const Tls&) = delete;

    // All throw IO if the peer is gone, PERMISSION if the handshake fails, and CORRUPT if a record was changed on its way.
    [[nodiscard]] bool shake();  // true: the handshake is complete
    // Bytes moved; 0: none now, see `wants`.
    [[nodiscard]] size_t read(char* bytes, size_t size);
    [[nodiscard]] size_t write(const char* bytes, size_t size);
    [[nodiscard]] bool has_bytes();  // whether read() would return some

    // POLLIN or POLLOUT: what to wait for after a call that moved nothing.
    [[nodiscard]] short wants() const { return wants_; }
    // 32 bytes that both ends of this connection know, and nobody between them.
    [[nodiscard]] std::string exported() const;

   private:
    struct State;
    void stalled(int result);

    std::unique_ptr<State> state_;
    std::string peer_;
    short wants_;
    bool shaken_ = false;
    uint64_t written_ = 0;  // with the present key
    uint64_t bytes_per_key_;
};

}  // namespace tsr
