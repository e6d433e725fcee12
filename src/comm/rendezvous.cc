#include "comm/rendezvous.hpp"

#include <fmt/core.h>
#include <openssl/rand.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <type_traits>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/proc.hpp"
#include "comm/host.hpp"

namespace tsr {

namespace {

static_assert(std::is_trivially_copyable_v<Peer>);

// The first byte of a value: what it is.
constexpr char peer_kind = 'P';
constexpr char gave_up_kind = 'G';
constexpr char error_kind = 'E';

// The time that a failed rank still spends on telling the others.
constexpr milliseconds farewell{2000};
// How often a waiting rank asks the launcher whether the missing ranks have ended.
constexpr milliseconds departure_pause{250};
constexpr milliseconds silence_before_notice{5000};

template <size_t N>
void copy_text(std::array<char, N>& to, const std::string& from) {
    std::memcpy(to.data(), from.data(), std::min(from.size(), N - 1));
}

std::string packed(const Peer& peer) {
    std::string value(1, peer_kind);
    return value.append(reinterpret_cast<const char*>(&peer), sizeof peer);
}

Peer unpacked(std::string_view bytes, int rank) {
    Peer peer;
    if (bytes.size() != sizeof peer) {
        throw Error(Code::version,
                    fmt::format("rank {} uses a different version of Tessera: its record has {} bytes, expected {}",
                                rank, bytes.size(), sizeof peer));
    }
    std::memcpy(&peer, bytes.data(), sizeof peer);
    if (peer.magic != Peer::current_magic || peer.rank != rank) {
        throw Error(Code::version, fmt::format("rank {} uses a different version of Tessera", rank));
    }
    peer.host_id.back() = peer.host_name.back() = peer.backend.back() = '\0';
    return peer;
}

std::vector<int> missing_ranks(Store& store, int world_size) {
    std::vector<int> missing;
    for (int rank = 0; rank < world_size; ++rank) {
        if (!store.get(key_of_peer(rank), Deadline::in(farewell))) missing.push_back(rank);
    }
    return missing;
}

// Waits for the key, and calls `look` every `pause`; it throws if there is nothing left to wait for.
template <class Look>
std::string wait_looking(Store& store, const std::string& key, milliseconds pause, Deadline deadline,
                         const Look& look) {
    while (true) {
        try {
            return store.wait(key, deadline.earlier(Deadline::in(pause)));
        } catch (const Error& e) {
            if (e.code() != Code::timeout || deadline.expired()) throw;
        }
        look();
    }
}

// Rank 0's part: collects all records. Throws the error that every rank then throws.
std::vector<Peer> collect(Store& store, const Peer& own, const Departures& departures, Deadline deadline) {
    std::vector<Peer> peers{own};
    // Ranks may come late; after some silence, one log line names the ranks that rank 0 waits for.
    const Deadline silence = Deadline::in(silence_before_notice);
    bool told = false;
    const auto look = [&] {
        refuse_departed(store, own, departures);
        if (told || !silence.expired()) return;
        told = true;
        log::warning("rank 0 is waiting for {} to join the communicator of {} ranks, for at most {} more seconds",
                     name_ranks(missing_ranks(store, own.world_size)), own.world_size,
                     deadline.remaining().count() / 1000);
    };
    for (int rank = 1; rank < own.world_size; ++rank) {
        std::string value;
        try {
            value = wait_looking(store, key_of_peer(rank), departures ? departure_pause : silence_before_notice,
                                 deadline, look);
        } catch (const Error& e) {
            if (e.code() != Code::timeout) throw;
            throw missing_peers(store, own).caused_by(e);
        }
        if (value.empty() || value.front() != peer_kind) {
            refuse_departed(store, own, departures);  // it gave up because that one is gone
            throw Error(Code::timeout,
                        fmt::format("rank {} gave up joining the communicator before all ranks had joined", rank))
                .with_peer(rank)
                .retry_may_help();
        }
        peers.push_back(unpacked(std::string_view(value).substr(1), rank));
        if (peers.back().world_size != own.world_size) {
            throw Error(Code::mismatch, fmt::format("rank {} joins a communicator of {} ranks, but rank 0 one of {}",
                                                    rank, peers.back().world_size, own.world_size))
                .with_peer(rank);
        }
    }
    return peers;
}

// The same error, prefixed with the rank that throws it.
Error said_by(const Error& error, const Peer& own) {
    Error result = Error(error.code(), fmt::format("rank {}: {}", own.rank, error.what()))
                       .with_rank(own.rank)
                       .with_peer(error.record()->peer)
                       .with_operation("create");
    if (error.record()->cause) result = result.caused_by(Error(error.record()->cause));
    return error.record()->retriable ? result.retry_may_help() : result;
}

std::vector<Peer> lead(Store& store, const Peer& own, const Departures& departures, Deadline deadline) {
    try {
        store.set(key_of_peer(own.rank), packed(own), deadline);
        const std::vector<Peer> peers = collect(store, own, departures, deadline);
        std::string all(1, peer_kind);
        all.append(reinterpret_cast<const char*>(peers.data()), peers.size() * sizeof(Peer));
        store.set("all", all, deadline);
        return peers;
    } catch (const Error& e) {
        try {
            store.set("all",
                      fmt::format("{}{} {} {}", error_kind, static_cast<int>(e.code()), e.record()->peer, e.what()),
                      Deadline::in(farewell));
        } catch (const Error&) {
            // The others come to their own deadline.
        }
        throw said_by(e, own);
    }
}

std::vector<Peer> follow(Store& store, const Peer& own, const Departures& departures, Deadline deadline) {
    store.set(key_of_peer(own.rank), packed(own), deadline);
    std::string all;
    try {
        all = !departures ? store.wait("all", deadline) : wait_looking(store, "all", departure_pause, deadline, [&] {
            refuse_departed(store, own, departures);
        });
    } catch (const Error& e) {
        const Error told = e.code() == Code::timeout ? missing_peers(store, own).caused_by(e) : e;
        try {
            store.set(key_of_peer(own.rank), std::string(1, gave_up_kind), Deadline::in(farewell));
        } catch (const Error&) {
            // Rank 0 will find out when it connects.
        }
        throw said_by(told, own);
    }
    if (!all.empty() && all.front() == error_kind) {
        std::istringstream fields(all.substr(1));
        int code = 0;
        int peer = -1;
        std::string text;
        std::getline(fields >> code >> peer >> std::ws, text, '\0');
        throw said_by(Error(static_cast<Code>(code), text).with_peer(peer), own);
    }
    if (all.size() != 1 + sizeof(Peer) * static_cast<size_t>(own.world_size)) {
        throw Error(Code::mismatch,
                    fmt::format("rank {} joins a communicator of {} ranks, but the list of rank 0 has {} bytes",
                                own.rank, own.world_size, all.size()))
            .with_operation("create");
    }
    std::vector<Peer> peers;
    for (int rank = 0; rank < own.world_size; ++rank) {
        peers.push_back(
            unpacked(std::string_view(all).substr(1 + sizeof(Peer) * static_cast<size_t>(rank), sizeof(Peer)), rank));
    }
    return peers;
}

}  // namespace

std::string key_of_peer(int rank) { return fmt::format("peer/{}", rank); }

Error missing_peers(Store& store, const Peer& own) {
    std::vector<int> missing;
    try {
        missing = missing_ranks(store, own.world_size);
    } catch (const Error&) {
        // The store does not answer either, so the message has less detail.
    }
    const std::string who = missing.empty() ? "the others" : name_ranks(missing);
    return Error(
               Code::timeout,
               fmt::format("{} did not join the communicator of {} ranks in time. Check the logs of the missing ranks, "
                           "check that every rank number is used once and that all ranks use the same store, or "
                           "raise the timeout",
                           who, own.world_size))
        .with_peer(missing.empty() ? -1 : missing[0])
        .retry_may_help();
}

void refuse_departed(Store& store, const Peer& own, const Departures& departures) {
    const std::vector<Departure> gone = departures ? departures() : std::vector<Departure>{};
    if (gone.empty() || store.get("all", Deadline::in(farewell))) return;
    for (const Departure& departure : gone) {
        if (departure.rank >= own.world_size || store.get(key_of_peer(departure.rank), Deadline::in(farewell)))
            continue;
        throw Error(
            Code::peer_lost,
            fmt::format("rank {} {} before it joined the communicator of {} ranks; every rank of the job must join",
                        departure.rank, departure.how, own.world_size))
            .with_peer(departure.rank);
    }
}

Nonce random_nonce() {
    Nonce nonce{};
    if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), sizeof nonce) != 1) {
        throw Error(Code::internal, "the random generator of OpenSSL failed");
    }
    return nonce;
}

std::string hex(const Nonce& nonce) { return fmt::format("{:016x}{:016x}", nonce[0], nonce[1]); }

std::string name_ranks(const std::vector<int>& ranks) {
    constexpr size_t shown = 8;
    if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
    std::string text = "ranks ";
    for (size_t i = 0; i < std::min(ranks.size(), shown); ++i) {
        const bool last = i + 1 == ranks.size();
        text += fmt::format("{}{}", i == 0 ? "" : last ? " and " : ", ", ranks[i]);
    }
    if (ranks.size() > shown) text += fmt::format(" and {} more", ranks.size() - shown);
    return text;
}

Peer make_peer(int rank, int world_size, const CommOptions& options, const Endpoint& endpoint) {
    Peer peer;
    peer.rank = rank;
    peer.world_size = world_size;
    peer.launcher_rank = env_number("TESSERA_RANK", 0, INT32_MAX).value_or(-1);
    peer.pid = ::getpid();
    peer.start_time = process_start_time(peer.pid).value_or(0);
    peer.pid_namespace = pid_namespace();
    peer.endpoint = endpoint.name();
    const std::string host = host_id(options.host_id);
    if (host.size() >= peer.host_id.size()) {  // a truncated id could equal another host's
        throw Error(Code::invalid_argument,
                    fmt::format("host id '{}...' (TESSERA_HOST_ID) has {} bytes; at most {} are "
                                "allowed",
                                host.substr(0, 32), host.size(), peer.host_id.size() - 1));
    }
    copy_text(peer.host_id, host);
    copy_text(peer.host_name, host_name());
    copy_text(peer.backend, options.backend);
    return peer;
}

std::vector<Peer> exchange_peers(Store& store, const Peer& own, const Departures& departures, Deadline deadline) {
    return own.rank == 0 ? lead(store, own, departures, deadline) : follow(store, own, departures, deadline);
}

void forget_peers(Store& store, const Peer& own) noexcept {
    try {
        store.erase(key_of_peer(own.rank), Deadline::in(farewell));
        if (own.rank == 0) store.erase("all", Deadline::in(farewell));
    } catch (...) {
        // A key that stays costs a few bytes of the store; its name is never used again.
    }
}

std::shared_ptr<Store> next_communicator(const std::shared_ptr<Store>& store, int rank, const std::string& name,
                                         Deadline deadline) {
    // Each rank counts the communicators that it has joined under this name, including failed attempts; all ranks get
    // the same count.
    const int64_t generation = store->add(fmt::format("comm/{}/joined/{}", name, rank), 1, deadline);
    return prefixed(store, fmt::format("comm/{}/{}/", name, generation));
}

}  // namespace tsr
