#include "comm/gloo/connect.hpp"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "base/thread.hpp"
#include "comm/gloo/handshake.hpp"
#include "comm/peer_watch.hpp"

namespace tsr::gloo_transport {

namespace {

std::string first_outside_address() {
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return {};
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
        if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
        if ((entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0) continue;
        std::array<char, INET_ADDRSTRLEN> text{};
        const auto* address = reinterpret_cast<const sockaddr_in*>(static_cast<const void*>(entry->ifa_addr));
        if (::inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size()) != nullptr) return text.data();
    }
    return {};
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

std::string key_of(int rank) { return fmt::format("gloo/{}", rank); }

// What a rank publishes in the store, as plain bytes.
struct Told {
    Door door;
    sockaddr_storage held{};
};
static_assert(std::is_trivially_copyable_v<Told>);

// What Gloo makes of the name of a host or an interface; port 0.
sockaddr_storage resolved(int rank, const Binding& binding) {
    ::gloo::transport::tcp::attr attributes;
    attributes.hostname = binding.host;
    attributes.iface = binding.interface;
    try {
        return ::gloo::transport::tcp::CreateDeviceAttr(attributes).ai_addr;
    } catch (const std::exception& error) {
        throw Error(binding.interface.empty() ? Code::io : Code::invalid_argument,
                    fmt::format("rank {}: Gloo cannot listen on {}: {}; name a network interface in "
                                "TESSERA_SOCKET_IFNAME",
                                rank, binding.str(), error.what()));
    }
}

// Gloo's pair, over an existing connection. Gloo itself would take the first connection to its port for the peer.
class Pair final : public ::gloo::transport::tcp::Pair {
   public:
    Pair(::gloo::transport::tcp::Context* context, ::gloo::transport::tcp::Device* device, int rank,
         milliseconds timeout)
        : ::gloo::transport::tcp::Pair(context, device, rank, timeout) {
        // The base class listens already, and a stranger on this host may have connected.
        const std::lock_guard lock(m_);
        changeState(CLOSED);
        state_ = INITIALIZING;
        fd_ = -1;
        rx_ = {};
        ex_ = nullptr;
    }

    void take(Fd connection) {
        const std::lock_guard lock(m_);
        fd_ = connection.release();
        handleConnected();
    }
};

class Context final : public ::gloo::transport::tcp::Context {
   public:
    using ::gloo::transport::tcp::Context::Context;
    std::unique_ptr<::gloo::transport::Pair>& createPair(int peer) override {
        auto& pair = pairs_.at(static_cast<size_t>(peer));
        pair = std::make_unique<Pair>(this, device_.get(), peer, getTimeout());
        return pair;
    }
};

std::shared_ptr<::gloo::transport::Context> over(std::vector<Fd> connections, int own) {
    try {
        const BlockedSignals inherited;  // by Gloo's thread
        // Each pair listens for a moment, where no other host can come.
        const auto device = std::dynamic_pointer_cast<::gloo::transport::tcp::Device>(
            ::gloo::transport::tcp::CreateDevice("127.0.0.1"));
        auto context = std::make_shared<Context>(device, own, static_cast<int>(connections.size()));
        context->setTimeout(milliseconds{0});  // none: every wait has its own
        for (int peer = 0; peer < static_cast<int>(connections.size()); ++peer) {
            if (peer == own) continue;
            dynamic_cast<Pair&>(*context->createPair(peer)).take(std::move(connections[static_cast<size_t>(peer)]));
        }
        return context;
    } catch (const std::exception& error) {
        throw Error(Code::io, fmt::format("rank {}: Gloo does not accept its connections: {}", own, error.what()));
    }
}

// A socket that holds a free port of the address.
Fd hold_port(int rank, sockaddr_storage& address) {
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = 0;
    if (address.ss_family == AF_INET6) {
        reinterpret_cast<sockaddr_in6*>(&address)->sin6_port = 0;
        size = sizeof(sockaddr_in6);
    } else {
        reinterpret_cast<sockaddr_in*>(&address)->sin_port = 0;
        size = sizeof(sockaddr_in);
    }
    Fd port(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!port.valid() || ::bind(port.get(), plain, size) != 0 || ::getsockname(port.get(), plain, &size) != 0) {
        throw os_error(fmt::format("rank {}: cannot reserve a port for liveness probes", rank), errno);
    }
    return port;
}

std::string wait_for_key(Store& store, const std::string& key, Deadline deadline, const std::function<void()>& check) {
    for (;;) {
        try {
            return store.wait(key, deadline.earlier(Deadline::in(poll_slice)));
        } catch (const Error& error) {
            if (error.code() != Code::timeout || deadline.expired()) throw;
        }
        check();
    }
}

// Ranks of this host are watched while all connect; the death of others is noticed only at the deadline. Process ids of
// other hosts have no meaning here, although their namespaces may have the same number.
std::vector<Peer> watchable(const Bootstrap& bootstrap) {
    std::vector<Peer> peers = bootstrap.peers;
    for (Peer& peer : peers) {
        if (!peer.same_host(bootstrap.self())) peer.pid_namespace = ~bootstrap.self().pid_namespace;
    }
    return peers;
}

}  // namespace

Binding choose_binding(const Bootstrap& bootstrap) {
    if (const char* name = std::getenv("TESSERA_SOCKET_IFNAME");
        name != nullptr && *name != '\0') {  // NOLINT(concurrency-mt-unsafe)
        return {name, ""};
    }
    const bool one_host =
        std::ranges::all_of(bootstrap.peers, [&](const Peer& p) { return p.same_host(bootstrap.self()); });
    std::string address = bootstrap.store->local_address();
    if (one_host) return {"", address.empty() ? "127.0.0.1" : address};
    // A rank on the store's host may reach the store through loopback, where other hosts cannot reach the rank. Hosts
    // that differ only in name (TESSERA_HOST_ID) and have no other network keep loopback.
    if (address.empty() || is_loopback(address)) {
        const bool one_machine = std::ranges::all_of(
            bootstrap.peers, [&](const Peer& p) { return p.host_name == bootstrap.self().host_name; });
        const std::string outside = first_outside_address();
        if (!one_machine && !outside.empty()) return {"", outside};
    }
    return {"", address.empty() ? "127.0.0.1" : address};
}

Connections connect_all(const Bootstrap& bootstrap) {
    const int own = bootstrap.rank;
    const auto count = static_cast<size_t>(bootstrap.world_size());
    Connections connections{nullptr, std::vector<sockaddr_storage>(count), {}};
    const Binding binding = choose_binding(bootstrap);
    Told told{{resolved(own, binding), random_nonce()}, {}};
    Fd listener;
    try {
        listener = listen_at(told.door.address);
    } catch (const Error& error) {
        throw Error(Code::io, fmt::format("rank {}: Gloo cannot listen on {}; name a network interface in "
                                          "TESSERA_SOCKET_IFNAME",
                                          own, binding.str()))
            .caused_by(error);
    }
    told.held = told.door.address;
    connections.own_port = hold_port(own, told.held);
    const PeerWatch watch(watchable(bootstrap), own);
    const auto check_peers = [&] {
        poll_interrupt();
        const std::vector<int> dead = watch.dead();
        if (dead.empty()) return;
        throw Error(Code::peer_lost, fmt::format("rank {}: rank {} (pid {}) ended while the communicator was created",
                                                 own, dead[0], bootstrap.peers[static_cast<size_t>(dead[0])].pid))
            .with_rank(own)
            .with_peer(dead[0])
            .with_operation("create");
    };
    bootstrap.store->set(key_of(own), std::string(reinterpret_cast<const char*>(&told), sizeof told),
                         bootstrap.deadline);
    std::vector<Door> doors(count);
    for (int peer = 0; peer < bootstrap.world_size(); ++peer) {
        Told theirs = told;
        if (peer != own) {
            const std::string bytes = wait_for_key(*bootstrap.store, key_of(peer), bootstrap.deadline, check_peers);
            if (bytes.size() != sizeof theirs) {
                throw Error(Code::version, fmt::format("rank {}: rank {} uses a different version of Tessera: its "
                                                       "Gloo address record has another format",
                                                       own, peer));
            }
            std::memcpy(&theirs, bytes.data(), sizeof theirs);
        }
        doors[static_cast<size_t>(peer)] = theirs.door;
        connections.held_ports[static_cast<size_t>(peer)] = theirs.held;
    }
    connections.context = over(shake_hands(own, doors, listener, bootstrap.deadline, check_peers), own);
    return connections;
}

void forget_addresses(const Bootstrap& bootstrap) noexcept {
    try {
        (void)bootstrap.store->erase(key_of(bootstrap.rank), Deadline::in(milliseconds{2000}));
    } catch (...) {
        // Only stale keys, in a store that ends with the job.
    }
}

}  // namespace tsr::gloo_transport
