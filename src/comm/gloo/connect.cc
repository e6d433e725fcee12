#include "comm/gloo/connect.hpp"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <gloo/transport/address.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/thread.hpp"
#include "comm/gloo/flight.hpp"
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

std::shared_ptr<::gloo::transport::Context> listen_for_peers(const Bootstrap& bootstrap, const Binding& binding) {
    ::gloo::transport::tcp::attr attributes;
    attributes.hostname = binding.host;
    attributes.iface = binding.interface;
    try {
        const BlockedSignals inherited;  // by Gloo's thread
        auto device = ::gloo::transport::tcp::CreateDevice(attributes);
        auto context = device->createContext(bootstrap.rank, bootstrap.world_size());
        // Gloo allows five times this for a connection.
        context->setTimeout(bootstrap.deadline.remaining() / 5 + milliseconds{1});
        for (int peer = 0; peer < bootstrap.world_size(); ++peer) {
            if (peer != bootstrap.rank) (void)context->createPair(peer);
        }
        return context;
    } catch (const std::exception& error) {
        throw Error(binding.interface.empty() ? Code::io : Code::invalid_argument,
                    fmt::format("rank {}: Gloo cannot listen on {}: {}; name a network interface in "
                                "TESSERA_SOCKET_IFNAME",
                                bootstrap.rank, binding.str(), error.what()));
    }
}

// The addresses at which rank `rank` listens for the others, in order of ranks, itself left out.
std::vector<char> address_for(int own, int rank, const std::string& addresses, size_t count) {
    const size_t size = addresses.size() / count;
    const auto place = static_cast<size_t>(own < rank ? own : own - 1);
    const auto begin = addresses.begin() + static_cast<std::ptrdiff_t>(place * size);
    return {begin, begin + static_cast<std::ptrdiff_t>(size)};
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
        throw os_error(fmt::format("rank {}: cannot take a port for signs of life", rank), errno);
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

// Ranks of this host are watched while all connect; of the others' deaths only the deadline tells. Process ids of other
// hosts mean nothing here, though their name spaces may have the same number.
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
    // The rank beside the store may reach it by loopback, where the other hosts cannot reach the rank. Hosts that are
    // apart in name only (TESSERA_HOST_ID) and have no other network keep loopback.
    if (address.empty() || is_loopback(address)) {
        const bool one_machine = std::ranges::all_of(
            bootstrap.peers, [&](const Peer& p) { return p.host_name == bootstrap.self().host_name; });
        const std::string outside = first_outside_address();
        if (!one_machine && !outside.empty()) return {"", outside};
    }
    return {"", address.empty() ? "127.0.0.1" : address};
}

Connections connect_all(const Bootstrap& bootstrap) {
    const auto context = listen_for_peers(bootstrap, choose_binding(bootstrap));
    const int own = bootstrap.rank;
    const auto count = static_cast<size_t>(bootstrap.world_size()) - 1;
    Connections connections{context, std::vector<sockaddr_storage>(count + 1), {}};
    std::string addresses;
    for (int peer = 0; peer < bootstrap.world_size(); ++peer) {
        if (peer == own) continue;
        const std::vector<char> bytes = context->getPair(peer)->address().bytes();
        addresses.append(bytes.begin(), bytes.end());
        connections.held_ports[static_cast<size_t>(own)] = ::gloo::transport::tcp::Address(bytes).getSockaddr();
    }
    if (count > 0) {
        sockaddr_storage& held = connections.held_ports[static_cast<size_t>(own)];
        connections.own_port = hold_port(own, held);
        addresses.append(reinterpret_cast<const char*>(&held), sizeof held);
    }
    const PeerWatch watch(watchable(bootstrap), own);
    const auto check_peers = [&] {
        poll_interrupt();
        const std::vector<int> dead = watch.dead();
        if (dead.empty()) return;
        throw Error(Code::peer_lost, fmt::format("rank {}: rank {} (pid {}) died while the communicator was made", own,
                                                 dead[0], bootstrap.peers[static_cast<size_t>(dead[0])].pid))
            .with_rank(own)
            .with_peer(dead[0])
            .with_operation("create");
    };
    bootstrap.store->set(key_of(own), addresses, bootstrap.deadline);
    std::vector<std::vector<char>> theirs(count + 1);
    for (int peer = 0; peer < bootstrap.world_size(); ++peer) {
        if (peer == own) continue;
        const std::string all = wait_for_key(*bootstrap.store, key_of(peer), bootstrap.deadline, check_peers);
        if (all.size() != addresses.size()) {
            throw Error(Code::version, fmt::format("rank {}: rank {} describes its Gloo addresses otherwise: it uses "
                                                   "another version of Gloo or Tessera",
                                                   own, peer));
        }
        const size_t rest = all.size() - sizeof(sockaddr_storage);
        theirs[static_cast<size_t>(peer)] = address_for(own, peer, all.substr(0, rest), count);
        std::memcpy(&connections.held_ports[static_cast<size_t>(peer)], all.data() + rest, sizeof(sockaddr_storage));
    }

    // Gloo's connect blocks, so another thread does it; closing the connections makes it return.
    std::mutex mutex;  // guards done and failure
    std::condition_variable changed;
    bool done = false;
    std::optional<std::string> failure;
    std::atomic<int> current{-1};
    std::atomic<bool> stop{false};
    std::thread connector = start_thread("tsr-connect", [&] {
        const NoSigpipe guard;
        std::optional<std::string> error;
        try {
            for (int peer = 0; peer <= static_cast<int>(count) && !stop.load(); ++peer) {
                if (peer == own) continue;
                current.store(peer);
                context->getPair(peer)->connect(theirs[static_cast<size_t>(peer)]);
            }
        } catch (const std::exception& caught) {
            error = caught.what();
        }
        const std::lock_guard lock(mutex);
        failure = error;
        done = true;
        changed.notify_all();
    });
    std::optional<Error> ended;
    {
        std::unique_lock lock(mutex);
        while (!done && !ended) {
            changed.wait_for(lock, bootstrap.deadline.slice(), [&] { return done; });
            if (done) break;
            try {
                check_peers();
                if (bootstrap.deadline.expired()) throw Error(Code::timeout, "it does not answer");
            } catch (const Error& error) {
                ended = error;
            }
        }
    }
    if (ended) {
        stop.store(true);
        for (int peer = 0; peer <= static_cast<int>(count); ++peer) {
            if (peer != own) context->getPair(peer)->close();
        }
    }
    connector.join();
    const int peer = current.load();
    if (ended && ended->code() != Code::timeout) throw Error(*ended);
    if (ended || failure) {
        throw Error(Code::timeout, fmt::format("rank {}: no Gloo connection to rank {} ({}): {}", own, peer,
                                               bootstrap.peers[static_cast<size_t>(peer)].host_name.data(),
                                               failure ? *failure : ended->what()))
            .with_rank(own)
            .with_peer(peer)
            .with_operation("create");
    }
    return connections;
}

void forget_addresses(const Bootstrap& bootstrap) noexcept {
    try {
        (void)bootstrap.store->erase(key_of(bootstrap.rank), Deadline::in(milliseconds{2000}));
    } catch (...) {
        // Rubbish in a store that goes with the job.
    }
}

}  // namespace tsr::gloo_transport
