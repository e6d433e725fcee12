#include "trace/why_hung.hpp"

#include <fmt/core.h>

#include <algorithm>

namespace tsr::cli {

namespace {

using Ranks = std::map<int, Flight>;

bool is_transfer(const Flown& flown) { return is_point_to_point(flown.operation.collective); }
bool is_computation(const Flown& flown) { return flown.operation.collective == Collective::compute; }

// The last collective that the rank began; null if there is none.
const Flown* last_collective(const Flight& flight) {
    const Flown* last = nullptr;
    for (const Flown& flown : flight.operations) {
        if (is_transfer(flown) || is_computation(flown)) continue;
        if (flown.begun() && (last == nullptr || flown.sequence > last->sequence)) last = &flown;
    }
    return last;
}

// "ranks 0-2, 5", "rank 3"
std::string ranks_text(const std::vector<int>& ranks) {
    std::string text;
    for (size_t i = 0; i < ranks.size();) {
        size_t end = i;
        while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) ++end;
        if (!text.empty()) text += ", ";
        text += end == i ? fmt::format("{}", ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[end]);
        i = end + 1;
    }
    return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", text);
}

double seconds(double from_us, double to_us) { return (to_us - from_us) / 1e6; }

// The last time at which the operation was seen: its end, or when the record was written.
double last_seen(const Flown& flown, const Flight& flight) { return flown.ended.value_or(flight.last_time()); }

// What is known about a rank that others wait for. The text begins with "it".
std::string last_words(const Ranks& ranks, int rank, double now) {
    const auto found = ranks.find(rank);
    if (found == ranks.end()) {
        return "it left no record: it was killed, or has not yet reached a point that writes one";
    }
    const Flight& flight = found->second;
    const Flown* last = nullptr;
    for (const Flown& flown : flight.operations) {
        if (!flown.begun()) continue;
        last = &flown;
        if (is_computation(flown) && !flown.ended) break;  // messages come meanwhile
    }
    if (last == nullptr) return "it never started an operation";
    if (!last->ended || !last->finished()) {
        return fmt::format("it has been in {} for {:.1f} s", last->headline(), seconds(*last->started, now));
    }
    return fmt::format("its last operation was {}, finished {:.1f} s earlier", last->headline(),
                       seconds(*last->ended, now));
}

bool same_call(const Operation& a, const Operation& b) {
    return a.collective == b.collective && a.dtype == b.dtype && a.op == b.op && a.peer == b.peer &&
           a.tensors == b.tensors && (a.count == b.count || a.collective == Collective::all_gather_v);
}

std::optional<Hang> hang_in_collective(const Ranks& ranks) {
    const FlightOrigin& origin = ranks.begin()->second.origin;
    uint64_t top = 0;
    for (const auto& [rank, flight] : ranks) {
        if (const Flown* last = last_collective(flight)) top = std::max(top, last->sequence);
    }
    Hang hang{origin.name, origin.id, {}, {}, {}, 0, {}};
    const Flown* example = nullptr;
    double now = 0;
    for (int rank = 0; rank < origin.world_size; ++rank) {
        const auto found = ranks.find(rank);
        const Flown* last = found == ranks.end() ? nullptr : last_collective(found->second);
        if (last == nullptr || last->sequence < top) {
            hang.absent.push_back(rank);
        } else if (!last->finished()) {
            hang.waiting.push_back(rank);
            if (example == nullptr) {
                example = last;
                hang.since = *last->started;
            }
            hang.since = std::min(hang.since, *last->started);
            now = std::max(now, last_seen(*last, found->second));
        }
    }
    if (example == nullptr) return std::nullopt;
    hang.operation = example->headline();
    const std::string waited = fmt::format("{} waited {:.1f} s", ranks_text(hang.waiting), seconds(hang.since, now));
    if (!hang.absent.empty()) {
        hang.sentence = fmt::format("{} never entered {}; {}. ", ranks_text(hang.absent), hang.operation, waited);
        for (size_t i = 0; i < hang.absent.size() && i < 4; ++i) {
            const std::string who = hang.absent.size() == 1 ? "" : fmt::format("Rank {}: ", hang.absent[i]);
            std::string words = last_words(ranks, hang.absent[i], now);
            if (who.empty()) words[0] = 'I';
            hang.sentence += fmt::format("{}{}{}", i == 0 ? "" : " ", who, words) + ".";
        }
        return hang;
    }
    for (const int rank : hang.waiting) {
        const Flown* last = last_collective(ranks.at(rank));
        if (same_call(last->operation, example->operation)) continue;
        hang.absent = {rank};
        hang.sentence = fmt::format("the ranks disagree: rank {} called {}, rank {} {}", hang.waiting.front(),
                                    describe(example->operation), rank, describe(last->operation));
        return hang;
    }
    hang.sentence =
        fmt::format("all ranks entered {}, but it did not finish on {}", hang.operation, ranks_text(hang.waiting));
    return hang;
}

// How many transfers of this kind between the rank and `peer` with `tag` were started.
size_t transfers(const Flight& flight, Collective kind, int peer, int tag) {
    return static_cast<size_t>(std::ranges::count_if(flight.operations, [&](const Flown& flown) {
        return flown.begun() && flown.operation.collective == kind && flown.operation.peer == peer &&
               flown.operation.tag == tag;
    }));
}

bool computes(const Flight& flight) {
    return std::ranges::any_of(
        flight.operations, [](const Flown& flown) { return is_computation(flown) && flown.begun() && !flown.ended; });
}

// The transfer that has waited longest. A rank that computes has posted its transfers ahead and does not wait in them: one of
// these counts only where no other rank waits.
std::optional<Hang> hang_in_transfer(const Ranks& ranks) {
    std::optional<Hang> first;
    std::pair<bool, double> order_of_first;
    for (const auto& [rank, flight] : ranks) {
        const bool ahead = computes(flight);
        for (const Flown& flown : flight.operations) {
            if (!flown.begun() || !is_transfer(flown) || flown.finished()) continue;
            const std::pair order(ahead, *flown.started);
            if (first && order_of_first <= order) continue;
            const Operation& operation = flown.operation;
            const double now = last_seen(flown, flight);
            const bool receives = operation.collective == Collective::recv;
            const Collective other = receives ? Collective::send : Collective::recv;
            const auto peer = ranks.find(operation.peer);
            const bool met =
                peer != ranks.end() && transfers(peer->second, other, rank, operation.tag) >=
                                           transfers(flight, operation.collective, operation.peer, operation.tag);
            Hang hang{flight.origin.name, flight.origin.id, flown.headline(), {rank}, {}, *flown.started, {}};
            if (!met) hang.absent.push_back(operation.peer);
            hang.sentence =
                fmt::format("rank {} waited {:.1f} s in {}; {}", rank, seconds(*flown.started, now), flown.headline(),
                            met ? fmt::format("rank {} started its side, which did not finish", operation.peer)
                                : fmt::format("rank {} never {} it: {}", operation.peer, receives ? "sent" : "received",
                                              last_words(ranks, operation.peer, now)));
            first = std::move(hang);
            order_of_first = order;
        }
    }
    return first;
}

}  // namespace

std::vector<Hang> find_hangs(const Flights& flights) {
    std::vector<Hang> hangs;
    for (const auto& [id, ranks] : flights) {
        for (auto& hang : {hang_in_collective(ranks), hang_in_transfer(ranks)}) {
            if (hang) hangs.push_back(*hang);
        }
    }
    std::ranges::stable_sort(hangs, {}, &Hang::since);
    return hangs;
}

}  // namespace tsr::cli
