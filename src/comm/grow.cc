// How the ranks of a job that replaces its dead make their communicators: the first one, and Group::grow.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.hpp"
#include "base/log.hpp"
#include "comm/attempt.hpp"
#include "comm/endpoint.hpp"
#include "comm/group.hpp"
#include "comm/seats.hpp"

namespace tsr {

namespace {

std::string latest_key(int rank) { return fmt::format("latest/{}", rank); }

// A process that the launcher gave up, and that lives nevertheless, must not take the place back.
void refuse_if_replaced(const Seats& seats) {
    const auto latest = seats.store->get(latest_key(seats.rank), Attempt::grace());
    int number = 0;
    if (latest) std::from_chars(latest->data(), latest->data() + latest->size(), number);
    if (number <= seats.replacement) return;
    throw Error(Code::aborted, fmt::format("another process has replaced rank {}, which the launcher considers dead; "
                                           "exit this process",
                                           seats.rank));
}

int64_t first_open_attempt(const Seats& seats) {
    for (int64_t attempt = seats.attempt + 1;; ++attempt) {
        if (!seats.store->get(fmt::format("{}/{}", attempt, Attempt::state_key), Attempt::grace())) return attempt;
    }
}

std::string refusal_key(int64_t attempt) { return fmt::format("{}/refusal", attempt); }

// This rank will not come to the next attempt.
void tell_refusal(const Seats& seats, const Error& why) noexcept {
    try {
        const Json said = Json::Object{{"code", static_cast<int64_t>(why.code())},
                                       {"rank", seats.rank},
                                       {"why", readable_utf8(std::string_view(why.what()).substr(0, 4096))}};
        seats.store->set(refusal_key(seats.attempt), said.dump(), Attempt::grace());
    } catch (const std::exception& error) {  // then the others wait until their deadline
        log::warning("rank {} cannot tell the others why it does not grow: {}", seats.rank, error.what());
    }
}

// `attempt`: the last one of this call of which this rank was a member; 0: none.
void throw_if_refused(const Seats& seats, int64_t attempt) {
    const auto said = attempt > 0 ? seats.store->get(refusal_key(attempt), Attempt::grace()) : std::nullopt;
    if (!said) return;
    const Json refusal = Json::parse(*said, "a refusal");
    const int64_t rank = refusal.at("rank").as_int();
    throw Error(static_cast<Code>(refusal.at("code").as_int()),
                fmt::format("rank {}: {}", rank, refusal.at("why").as_string()))
        .with_peer(static_cast<int>(rank));
}

// The members of the attempt, by rank; empty if it has failed. A rank whose time is up leaves its announcement there, so
// that the others name only those that did not come.
std::vector<Peer> meet(Attempt& attempt, const Seats& seats, const Peer& own, int64_t former, Deadline deadline) {
    Store& store = attempt.store();
    if (!store.compare_set(key_of_peer(own.rank), std::nullopt, packed({own}), Attempt::grace())) {
        attempt.give_up();
        return {};
    }
    if (store.add("here", 1, Attempt::grace()) == own.world_size) {
        std::string all;
        for (int rank = 0; rank < own.world_size; ++rank) all += store.wait(key_of_peer(rank), Attempt::grace());
        store.set("all", all, Attempt::grace());
    }
    while (true) {
        try {
            std::vector<Peer> members = unpacked_peers(store.wait("all", deadline.earlier(Deadline::in(poll_slice))));
            if (members.size() == static_cast<size_t>(own.world_size)) return members;
            throw Error(Code::mismatch, fmt::format("rank {} joins a communicator of {} ranks, but others one of {}",
                                                    own.rank, own.world_size, members.size()));
        } catch (const Error& e) {
            if (e.code() != Code::timeout) throw;
            if (deadline.expired()) throw missing_peers(store, own).caused_by(e);
        }
        if (attempt.has_failed()) return {};
        throw_if_refused(seats, former);
        refuse_departed(store, own, seats.departures);
    }
}

// A lost rank ends an attempt, not the call: another process comes in its place, or the launcher ends the job.
bool is_loss(const Error& error) { return error.code() == Code::peer_lost || error.code() == Code::aborted; }

std::shared_ptr<Group> attempt_until(Seats& seats, const std::shared_ptr<Store>& store, const CommOptions& options,
                                     Deadline deadline) {
    if (seats.replacement > 0) {
        seats.store->set(latest_key(seats.rank), std::to_string(seats.replacement), Attempt::grace());
    }
    int64_t former = 0;
    while (true) {
        refuse_if_replaced(seats);
        seats.attempt = first_open_attempt(seats);
        const auto own_store = prefixed(seats.store, fmt::format("{}/", seats.attempt));
        Attempt attempt(*own_store);
        Endpoint endpoint;
        const Peer own = make_peer(seats.rank, seats.world_size, options, endpoint);
        const std::vector<Peer> members = meet(attempt, seats, own, former, deadline);
        if (members.empty()) continue;
        former = seats.attempt;
        const PeerWatch processes = watch_of(members, seats.rank);
        const Made made = make_together(
            attempt, processes, store,
            {seats.rank, members, std::move(endpoint), prefixed(own_store, "transport/"), options, deadline});
        if (made.group) {
            forget_peers(*own_store, own);
            return made.group;
        }
        if (!made.error) continue;
        if (!is_loss(*made.error)) tell_refusal(seats, *made.error);
        if (!is_loss(*made.error) || deadline.expired()) throw *made.error;
    }
}

// The next communicator of these ranks. `store`: the one at which they met.
std::shared_ptr<Group> take_seats(Seats seats, const std::shared_ptr<Store>& store, const CommOptions& options) {
    try {
        auto group = attempt_until(seats, store, options, Deadline::in(options.timeout));
        group->set_seats(std::move(seats));
        return group;
    } catch (const Error& error) {
        // The communicator has all ranks of the job, so the numbers are the launcher's.
        const Error told = error.with_rank(seats.rank).with_launcher_peer(error.record()->peer);
        if (options.on_failure) options.on_failure(told.record().get());
        throw told;
    }
}

}  // namespace

std::shared_ptr<Communicator> create_replaceable(std::shared_ptr<Store> store, int rank, int world_size,
                                                 int replacement, const CommOptions& options,
                                                 const Departures& departures) {
    check_place(store, rank, world_size, options);
    // Each process counts the communicators that it has made under this name; all ranks get the same count.
    const int64_t number = store->add(fmt::format("seats/{}/made/{}/{}", options.name, rank, replacement), 1,
                                      Deadline::in(options.timeout));
    Seats seats{prefixed(store, fmt::format("seats/{}/{}/", options.name, number)), rank, world_size, replacement,
                departures};
    try {
        return take_seats(std::move(seats), store, options);
    } catch (const Error& error) {
        throw Error(error.code(), fmt::format("rank {}: {}", rank, error.what()))
            .with_rank(rank)
            .with_peer(error.record()->peer)
            .with_launcher_peer(error.record()->launcher_peer)
            .with_operation("create")
            .caused_by(error);
    }
}

std::shared_ptr<Communicator> grow(Communicator& comm, const CommOptions& options) {
    auto* const group = dynamic_cast<Group*>(&comm);
    if (group == nullptr) throw Error(Code::unsupported, fmt::format("communicator '{}' cannot be grown", comm.name()));
    return group->grow(options);
}

std::shared_ptr<Communicator> Group::grow(const CommOptions& asked) {
    const Call once = enter();
    if (!seats_) {
        throw Error(Code::invalid_state,
                    fmt::format("rank {}: communicator '{}' cannot be grown: only the one that a rank of `tessera run "
                                "--on-loss replace` makes from its environment can, and those grown from it. To "
                                "continue with the remaining ranks, shrink it",
                                rank_, options_.name))
            .with_rank(rank_);
    }
    const CommOptions options = begin_remaking(asked, "grown");
    try {
        return take_seats(*seats_, store_, options);
    } catch (const Error& error) {
        if (error.code() == Code::io) throw store_is_lost(error, "grow", "grown");
        const bool late = error.code() == Code::timeout;
        throw Error(error.code(), fmt::format("rank {}: communicator '{}' cannot be grown: {}{}", rank_, options_.name,
                                              error.what(), late ? "; a rank that is alive must call grow, too" : ""))
            .with_rank(rank_)
            .with_peer(error.record()->peer)
            .with_launcher_peer(error.record()->launcher_peer)
            .with_operation("grow")
            .caused_by(error);
    }
}

}  // namespace tsr
