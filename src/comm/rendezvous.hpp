// How the ranks of a new communicator find each other: each publishes one Peer record and receives all others. For a
// communicator created from a store, the records go through the store (rank 0 collects and publishes the list); for a
// split, through the parent communicator. Keys are unique to one communicator and erased once it is created.
#pragma once

#include <sys/types.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "comm/communicator.hpp"
#include "comm/endpoint.hpp"
#include "store/store.hpp"

namespace tsr {

// 128 random bits.
using Nonce = std::array<uint64_t, 2>;
[[nodiscard]] Nonce random_nonce();
[[nodiscard]] std::string hex(const Nonce& nonce);

// What a rank publishes about itself: plain bytes of a fixed size, for a store as well as an all-gather.
struct Peer {
    static constexpr uint64_t current_magic = 0x3130'5245'4550'5354;  // "TSPEER01"
    uint64_t magic = current_magic;
    int32_t rank = 0;
    int32_t world_size = 0;
    int32_t color = 0;  // of a split
    int32_t key = 0;
    int32_t failed = 0;          // the code of this rank's error if its split request is invalid,
    uint32_t why_length = 0;     // and the length of the error's text in bytes
    int64_t launcher_rank = -1;  // its rank under `tessera run`; -1: not started by it
    int64_t pid = 0;
    uint64_t start_time = 0;  // of the process, to detect a reused pid
    uint64_t pid_namespace = 0;
    Nonce endpoint{};                 // names the rank's socket, over which it passes memory
    std::array<char, 128> host_id{};  // ranks with equal host ids reach each other's memory
    std::array<char, 64> host_name{};
    std::array<char, 64> backend{};

    // Ranks that are threads of one process.
    [[nodiscard]] bool same_process(const Peer& other) const {
        return pid == other.pid && start_time == other.start_time && pid_namespace == other.pid_namespace &&
               same_host(other);
    }
    [[nodiscard]] bool same_host(const Peer& other) const { return host_id == other.host_id; }
};

// The arguments of a transport's constructor.
struct Bootstrap {
    int rank = 0;                  // this rank's index in `peers`
    std::vector<Peer> peers;       // in rank order
    Endpoint endpoint;             // this rank's socket, listening since before its Peer record was published
    std::shared_ptr<Store> store;  // keys unique to this communicator, for transports that exchange more
    CommOptions options;
    Deadline deadline;

    [[nodiscard]] int world_size() const { return static_cast<int>(peers.size()); }
    [[nodiscard]] const Peer& self() const { return peers[static_cast<size_t>(rank)]; }
};

// This process and host, and a fresh endpoint.
[[nodiscard]] Peer make_peer(int rank, int world_size, const CommOptions& options, const Endpoint& endpoint);

// Collective. Throws TIMEOUT naming the ranks that did not join, PEER_LOST naming one that ended without joining,
// INVALID_ARGUMENT or MISMATCH on every rank if the ranks disagree on the world size. `store` must hold only keys of
// this communicator.
[[nodiscard]] std::vector<Peer> exchange_peers(Store& store, const Peer& own, const Departures& departures,
                                               Deadline deadline);

// The key of a rank's record.
[[nodiscard]] std::string key_of_peer(int rank);
// The TIMEOUT of a rank that waits for the others; names those that have no record.
[[nodiscard]] Error missing_peers(Store& store, const Peer& own);
// Throws PEER_LOST if one of `departures` has no record. A rank that has joined may have none, because it erases it; but
// then "all" was set before it ended.
void refuse_departed(Store& store, const Peer& own, const Departures& departures);

// Erases this rank's keys. Call it once all ranks have read what they need.
void forget_peers(Store& store, const Peer& own) noexcept;

// A view of `store` for the next communicator that the ranks create under this name.
[[nodiscard]] std::shared_ptr<Store> next_communicator(const std::shared_ptr<Store>& store, int rank,
                                                       const std::string& name, Deadline deadline);

// "rank 3", "ranks 1, 2 and 5", "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 20 more"
[[nodiscard]] std::string name_ranks(const std::vector<int>& ranks);

}  // namespace tsr
