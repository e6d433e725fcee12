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
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/thread.hpp"
#include "comm/endpoint.hpp"
#include "comm/group.hpp"
#include "comm/peer_watch.hpp"
#include "comm/rendezvous.hpp"

namespace tsr {

namespace {

// Between two looks at the store and the peers.
constexpr milliseconds pause{20};
constexpr std::string_view committed = "committed";
constexpr std::string_view failed = "failed";

// Throws what ends a wait.
void rest() {
    poll_interrupt();
    std::this_thread::sleep_for(pause);
}

std::string packed(const std::vector<Peer>& peers) {
    return {reinterpret_cast<const char*>(peers.data()), peers.size() * sizeof(Peer)};
}

std::vector<Peer> unpacked(const std::string& bytes) {
    std::vector<Peer> peers(bytes.size() / sizeof(Peer));
    std::memcpy(static_cast<void*>(peers.data()), bytes.data(), peers.size() * sizeof(Peer));
    for (const Peer& peer : peers) {
        if (peer.magic != Peer::current_magic || bytes.size() % sizeof(Peer) != 0) {
            throw Error(Code::version, "another rank uses a different version of Tessera");
        }
    }
    return peers;
}

bool is_in(const std::vector<int>& ranks, int rank) { return std::ranges::find(ranks, rank) != ranks.end(); }

// The members whose ends this process can see.
PeerWatch watch_of(std::vector<Peer> members, int place) {
    const Peer own = members[static_cast<size_t>(place)];
    for (Peer& member : members) {
        if (!member.same_host(own)) member.pid_namespace = 0;
    }
    return {members, place};
}

// What one attempt has come to.
struct Shrinking {
    Store& store;
    Deadline deadline;

    // The participating ranks of `candidates`, by their ranks in the old communicator (Peer::rank). `departed` returns
    // the ranks that are known to be gone.
    std::vector<Peer> agree(const Peer& own, const std::vector<int>& candidates,
                            const std::function<std::vector<int>()>& departed) {
        store.set(fmt::format("in/{}", own.rank), packed({own}), deadline);
        std::vector<Peer> here{own};
        std::vector<int> awaited = candidates;
        std::erase(awaited, own.rank);
        while (true) {
            if (const auto list = store.get("list", grace())) return unpacked(*list);
            // Check departures first, then announcements: a rank that announced itself and then died is detected later.
            const std::vector<int> gone = departed();
            std::erase_if(awaited, [&](int rank) {
                const auto announced = store.get(fmt::format("in/{}", rank), grace());
                if (announced) here.push_back(unpacked(*announced).at(0));
                return announced || is_in(gone, rank);
            });
            if (awaited.empty() || deadline.expired()) break;
            rest();
        }
        std::ranges::sort(here, {}, &Peer::rank);
        (void)store.compare_set("list", std::nullopt, packed(here), grace());
        return unpacked(store.wait("list", grace()));
    }

    // This rank could not make the communicator.
    bool give_up() { return decide(failed) == failed; }

    // This rank has made it: whether all `count` have.
    bool commit(size_t count) {
        if (store.add("made", 1, grace()) == static_cast<int64_t>(count)) return decide(committed) == committed;
        while (!deadline.expired()) {
            if (const auto state = store.get("state", grace())) return *state == committed;
            rest();
        }
        return decide(failed) == committed;
    }

    [[nodiscard]] bool has_failed() const { return store.get("state", grace()) == failed; }

   private:
    // A look at the store is not cut short by a deadline that has just passed.
    [[nodiscard]] Deadline grace() const { return Deadline::in(milliseconds{5000}); }
    std::string decide(std::string_view outcome) {
        (void)store.compare_set("state", std::nullopt, outcome, grace());
        return store.wait("state", grace());
    }
};

// Ends an attempt when a member dies, and says when another member has ended it.
class FailureWatch {
   public:
    FailureWatch(const Shrinking& attempt, const PeerWatch& members)
        : thread_(start_thread("tsr-shrink", [this, attempt, &members] { watch(attempt, members); })) {}
    ~FailureWatch() {
        stop_ = true;
        thread_.join();
    }
    FailureWatch(const FailureWatch&) = delete;
    FailureWatch& operator=(const FailureWatch&) = delete;

    // Becomes true once the attempt has failed.
    [[nodiscard]] const std::atomic<bool>& attempt_failed() const { return failed_; }

   private:
    void watch(Shrinking attempt, const PeerWatch& members) {
        const InterruptedBy stopped(stop_);
        while (!failed_ && !stop_) {
            try {
                rest();
                if (!members.dead().empty()) attempt.give_up();
                failed_ = attempt.has_failed();
            } catch (...) {  // NOLINT(bugprone-empty-catch): stopped, or the store did not answer: it is asked again
            }
        }
    }

    std::atomic<bool> stop_{false};
    std::atomic<bool> failed_{false};
    std::thread thread_;  // last: it uses the others
};

}  // namespace

// Ends all that goes on in this communicator; the options of the one to come.
CommOptions Group::begin_shrink(const CommOptions& asked) {
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
    if (!poisoned_.load(std::memory_order_acquire)) abort("it is being shrunk to the remaining ranks");
    abort_splits(fmt::format("communicator '{}', from which it was split, is being shrunk to the remaining ranks ({})",
                             options_.name, error()->what()),
                 Splits::all);
    await_queue();
    return options;
}

Error Group::store_is_lost(const Error& why) const {
    return Error(why.code(),
                 fmt::format("rank {}: communicator '{}' cannot be shrunk without the store through which its "
                             "ranks met: {}. Exit this process, and let the launcher restart the job",
                             rank_, options_.name, why.what()))
        .with_rank(rank_)
        .with_operation("shrink")
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
    const CommOptions options = begin_shrink(asked);
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
    for (int attempt = 1;; ++attempt) {
        const Deadline deadline = Deadline::in(options.timeout);
        const auto store = prefixed(store_, fmt::format("shrink/{}/{}/{}/", origin_.name, origin_.id, attempt));
        Shrinking shrinking{*store, deadline};
        Endpoint endpoint;
        const Peer own = make_peer(rank_, world_size_, options, endpoint);
        std::vector<Peer> members;
        try {
            members = shrinking.agree(own, candidates, departed);
        } catch (const Error& e) {
            if (e.code() != Code::io && e.code() != Code::timeout) throw;
            throw store_is_lost(e);
        }
        const auto place = static_cast<int>(place_among(members, own));
        candidates.clear();
        for (Peer& member : members) {
            candidates.push_back(member.rank);
            member.world_size = static_cast<int32_t>(members.size());
            member.rank = static_cast<int32_t>(&member - members.data());
        }
        std::optional<Error> error;
        try {
            const Deadline making = Deadline::in(options.timeout);
            shrinking.deadline = making;
            processes.emplace(watch_of(members, place));
            const FailureWatch watch(shrinking, *processes);
            const auto group = [&] {
                const InterruptedBy failure(watch.attempt_failed(), Code::aborted);
                return make_group(
                    store_, {place, members, std::move(endpoint), prefixed(store, "transport/"), options, making});
            }();
            if (shrinking.commit(members.size())) return group;
            group->abort("a rank was lost while the communicator was created");
            group->leave();
        } catch (...) {
            error = current_error();
            if (!shrinking.give_up() || error->code() == Code::interrupted) throw;
        }
        if (attempt > world_size_) {
            const Error why = error.value_or(Error(Code::timeout, "a rank was lost in every attempt"));
            throw Error(why.code(), fmt::format("rank {}: communicator '{}' could not be re-created from the {} "
                                                "remaining ranks in {} attempts",
                                                rank_, options_.name, members.size(), attempt))
                .with_rank(rank_)
                .with_operation("shrink")
                .caused_by(why);
        }
    }
}

}  // namespace tsr
