// The TCP server of a store. It runs in the launcher's agent, or in rank 0 if another launcher started the job. A dedicated
// thread owns all connections and the table; the object is thread-safe. It listens on exactly the given address. A connection
// may send 116 bytes before it has proved that it has the token, and its handshake, TLS included, may take 5 seconds; at most
// 64 such connections exist, and further ones replace the oldest idle one, so that silent clients cannot keep ranks out.
// Destroying the server closes all connections: clients get IO at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "store/store.hpp"

namespace tsr {

class StoreServer {
   public:
    static constexpr size_t max_strangers = 64;
    static constexpr milliseconds stranger_lifetime{5000};
    static constexpr milliseconds stranger_grace{250};  // minimum age before it is dropped for others

    // Port 0 chooses a free one. Throws INVALID_ARGUMENT, IO (address in use), PERMISSION (no token).
    [[nodiscard]] static std::shared_ptr<StoreServer> start(const std::string& host, uint16_t port,
                                                            const StoreOptions& options);
    virtual ~StoreServer() = default;

    [[nodiscard]] virtual uint16_t port() const = 0;
    [[nodiscard]] virtual std::string uri() const = 0;

    // Current counts of the server.
    struct Census {
        size_t strangers = 0;  // connections before the end of the handshake
        size_t clients = 0;
        size_t keys = 0;
        uint64_t refused = 0;  // connections closed because of their handshake, since the start
    };
    [[nodiscard]] virtual Census census() const = 0;
};

}  // namespace tsr
