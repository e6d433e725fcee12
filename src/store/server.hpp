// The TCP server of a store: it lives in the launcher's agent, or in rank 0 when another launcher started the job.
// One thread of its own owns all connections and the table; the object may be used from any thread. It listens on
// exactly the named address. Before the handshake a connection may send 116 bytes and live 5 seconds; at most 64
// such connections exist, and when more come the oldest idle one makes room, so that silent strangers cannot keep
// ranks out. Destroying the server closes every connection: clients get IO at once.
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
    static constexpr milliseconds stranger_grace{250};  // not dropped for others before this age

    // port 0 takes a free one. Throws INVALID_ARGUMENT, IO (address in use), PERMISSION (no token).
    [[nodiscard]] static std::shared_ptr<StoreServer> start(const std::string& host, uint16_t port,
                                                            const StoreOptions& options);
    virtual ~StoreServer() = default;

    [[nodiscard]] virtual uint16_t port() const = 0;
    [[nodiscard]] virtual std::string uri() const = 0;

    // What the server holds now.
    struct Census {
        size_t strangers = 0;  // connections before the handshake's end
        size_t clients = 0;
        size_t keys = 0;
        uint64_t refused = 0;  // connections that ended for their handshake, since the start
    };
    [[nodiscard]] virtual Census census() const = 0;
};

}  // namespace tsr
