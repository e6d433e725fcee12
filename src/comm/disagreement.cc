#include "comm/disagreement.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "comm/rendezvous.hpp"

namespace tsr {

namespace {

// The ranks that issued the same operation.
struct Party {
    const Said* said;
    std::vector<int> ranks;
};

// In order of the first rank of each.
std::vector<Party> parties_of(std::span<const Said> said) {
    std::vector<Party> parties;
    for (const Said& one : said) {
        auto party = std::ranges::find_if(
            parties, [&](const Party& p) { return p.said->operation.fingerprint == one.operation.fingerprint; });
        if (party == parties.end()) party = parties.insert(party, {&one, {}});
        party->ranks.insert(party->ranks.end(), one.ranks.begin(), one.ranks.end());
    }
    for (Party& party : parties) std::ranges::sort(party.ranks);
    std::ranges::sort(parties, {}, [](const Party& p) { return p.ranks.front(); });
    return parties;
}

// Operations that a program does not issue by that name, such as those of a split or the votes of a load, show their
// label.
std::string labelled(const std::string& call, const Operation& operation) {
    const std::string_view label(operation.label.data(), ::strnlen(operation.label.data(), operation.label.size()));
    return label.empty() ? call : fmt::format("{} ({})", call, label);
}

// The calls of all parties: "ranks 0 and 2 called all_reduce of 3 f32 (sum), rank 1 broadcast of 3 f32 ..."
std::string calls_of(std::span<const Party> parties) {
    std::string text;
    std::vector<std::string> calls;
    for (const Party& party : parties) {
        calls.push_back(labelled(describe(party.said->operation), party.said->operation));
        text += fmt::format("{}{} {}{}", text.empty() ? "" : ", ", name_ranks(party.ranks),
                            text.empty() ? "called " : "", calls.back());
    }
    if (std::ranges::adjacent_find(calls) != calls.end()) text += "; the lengths of individual tensors differ";
    return text;
}

}  // namespace

Error disagreement(int rank, uint64_t sequence, std::span<const Said> said) {
    const Operation& own =
        std::ranges::find_if(said, [&](const Said& s) { return s.ranks.front() == rank; })->operation;
    const auto other =
        std::ranges::find_if(said, [&](const Said& s) { return s.operation.fingerprint != own.fingerprint; });
    std::vector<Party> parties = parties_of(said);
    const auto finished = std::ranges::find_if(
        parties, [](const Party& party) { return party.said->operation.collective == Collective::finalize; });
    std::string text;
    if (finished == parties.end()) {
        text = fmt::format("the ranks disagree on operation #{}: {}", sequence, calls_of(parties));
    } else {
        const std::string who = name_ranks(finished->ranks);
        const bool one = finished->ranks.size() == 1;
        parties.erase(finished);
        text = fmt::format(
            "{} {} called finalize (as operation #{}) while {}. All ranks must make the same calls before they "
            "finalize",
            who, one ? "has" : "have", sequence, calls_of(parties));
    }
    return Error(Code::mismatch, fmt::format("rank {}: {}. No data was transferred", rank, text))
        .with_rank(rank)
        .with_peer(other->ranks.front())
        .with_operation(std::string(name_of(own.collective)), static_cast<int64_t>(sequence));
}

}  // namespace tsr
