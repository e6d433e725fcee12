// Group::shrink: the surviving ranks of a failed communicator agree through the store on who they are, and create a new
// one. Memory of the old one is never used again, so that a rank that was only stopped writes where nobody reads.
//
// It works in attempts, each with its own keys. A rank announces itself ("in/<rank>"). When every rank has announced
// itself or is known to be gone, or the time is up, the first rank to notice proposes the list of those announced: the
// store accepts one proposal ("list"). These ranks create the communicator; when all have ("made"), it is committed; if
// one failed to or died meanwhile, the attempt has failed ("state", written once), and the ranks that still create it
// stop: they must announce themselves in the next attempt while the others still wait for them. The next attempt is
// among the ranks of that list. Every outcome is decided by a compare_set, so that all ranks see the same.
#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "comm/attempt.hpp"
#include "comm/endpoint.hpp"
#include "comm/group.hpp"
#include "comm/peer_watch.hpp"
#include "comm/rendezvous.hpp"

namespace tsr {

namespace {

bool is_in(const std::vector<int>& ranks, int rank) { return std::ranges::find(ranks, rank) != ranks.end(); }

// The participating ranks of `candidates`, by their ranks in the old communicator (Peer::rank). `departed` returns the
// ranks that are known to be gone.
std::vector<Peer> agree(Store& store, const Peer& own, const std::vector<int>& candidates,
                        const std::function<std::vector<int>()>& departed, Deadline deadline) {
    store.set(fmt::format("in/{}", own.rank), packed({own}), deadline);
    std::vector<Peer> here{own};
    std::vector<int> awaited = candidates;
    std::erase(awaited, own.rank);
    while (true) {
        if (const auto list = store.get("list", Attempt::grace())) return unpacked_peers(*list);
        // Check departures first, then announcements: a rank that announced itself and then died is detected later.
        const std::vector<int> gone = departed();
        std::erase_if(awaited, [&](int rank) {
            const auto announced = store.get(fmt::format("in/{}", rank), Attempt::grace());
            if (announced) here.push_back(unpacked_peers(*announced).at(0));
            return announced || is_in(gone, rank);
        });
        if (awaited.empty() || deadline.expired()) break;
        rest();
    }
    std::ranges::sort(here, {}, &Peer::rank);
    (void)store.compare_set("list", std::nullopt, packed(here), Attempt::grace());
    return unpacked_peers(store.wait("list", Attempt::grace()));
}

}  // namespace

// Ends all that goes on in this communicator, which is to be remade as `how` says; the options of the one to come.
CommOptions Group::begin_remaking(const CommOptions& asked, std::string_view how) {
    refuse_own_thread();
    CommOptions options = with_own_place(asked);
    check_options(options);
    if (!store_) {
        throw Error(Code::invalid_state,
                    fmt::format("rank {}: communicator '{}' has no store through which the remaining ranks could meet",
                                rank_, options_.name))
            .with_rank(rank_);
    }
    if (left_.load(std::memory_order_acquire) || finalized_.load(std::memory_order_acquire)) throw_if_unusable();
    // Ends operations still in progress on the old communicator or on those split from it, so that all ranks get here.
    if (!poisoned_.load(std::memory_order_acquire)) abort(fmt::format("it is being {}", how));
    abort_splits(fmt::format("communicator '{}', from which it was split, is being {} ({})", options_.name, how,
                             error()->what()),
                 Splits::all);
    await_queue();
    return options;
}

Error Group::store_is_lost(const Error& why, std::string_view operation, std::string_view participle) const {
    return Error(why.code(), fmt::format("rank {}: communicator '{}' cannot be {} without the store through which its "
                                         "ranks met: {}. Exit this process, and let the launcher restart the job",
                                         rank_, options_.name, participle, why.what()))
        .with_rank(rank_)
        .with_operation(std::string(operation))
        .caused_by(why);
}

// This rank's place in the communicator to come.
size_t Group::place_among(const std::vector<Peer>& members, const Peer& own) const {
    const auto mine = std::ranges::find(members, rank_, &Peer::rank);
    if (mine != members.end() && mine->endpoint == own.endpoint) return static_cast<size_t>(mine - members.begin());
    throw Error(Code::aborted, fmt::format("rank {}: the other ranks of communicator '{}' have continued without this "
                                           "rank, which was too late; exit this process",
                                           rank_, options_.name))
        .with_rank(rank_)
        .with_operation("shrink");
}

std::shared_ptr<Communicator> Group::shrink(const CommOptions& asked) {
    const Call once = enter();
    const CommOptions options = begin_remaking(asked, "shrunk to the remaining ranks");
    std::vector<int> candidates(static_cast<size_t>(world_size_));
    for (int r = 0; r < world_size_; ++r) candidates[static_cast<size_t>(r)] = r;
    std::optional<PeerWatch> processes;  // of the candidates, from the second attempt on
    const auto departed = [&] {
        std::vector<int> ranks = transport_->departed();
        if (processes) {
            for (const int index : processes->dead()) ranks.push_back(candidates[static_cast<size_t>(index)]);
        }
        return ranks;
    };
    for (int number = 1;; ++number) {
        const auto store = prefixed(store_, fmt::format("shrink/{}/{}/{}/", origin_.name, origin_.id, number));
        Attempt attempt(*store);
        Endpoint endpoint;
        const Peer own = make_peer(rank_, world_size_, options, endpoint);
        std::vector<Peer> members;
        try {
            members = agree(*store, own, candidates, departed, Deadline::in(options.timeout));
        } catch (const Error& e) {
            if (e.code() != Code::io && e.code() != Code::timeout) throw;
            throw store_is_lost(e, "shrink", "shrunk");
        }
        const auto place = static_cast<int>(place_among(members, own));
        candidates.clear();
        for (Peer& member : members) {
            candidates.push_back(member.rank);
            member.world_size = static_cast<int32_t>(members.size());
            member.rank = static_cast<int32_t>(&member - members.data());
        }
        processes.emplace(watch_of(members, place));
        const Made made = make_together(attempt, *processes, store_,
                                        {place, members, std::move(endpoint), prefixed(store, "transport/"), options,
                                         Deadline::in(options.timeout)});
        if (made.group) return made.group;
        if (number > world_size_) {
            const Error why = made.error.value_or(Error(Code::timeout, "a rank was lost in every attempt"));
            throw Error(why.code(), fmt::format("rank {}: communicator '{}' could not be re-created from the {} "
                                                "remaining ranks in {} attempts",
                                                rank_, options_.name, members.size(), number))
                .with_rank(rank_)
                .with_operation("shrink")
                .caused_by(why);
        }
    }
}

}  // namespace tsr
