#include "comm/disagreement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "comm/rendezvous.hpp"

namespace tsr {

namespace {

// Ranks of one mind.
struct Party {
    const Said* said;
    std::vector<int> ranks;
};

// In order of the first rank of each.
std::vector<Party> parties_of(std::span<const Said> said) {
    std::vector<Party> parties;
    for (size_t r = 0; r < said.size(); ++r) {
        const auto party =
            std::ranges::find_if(parties, [&](const Party& p) { return p.said->fingerprint == said[r].fingerprint; });
        if (party == parties.end()) {
            parties.push_back({&said[r], {static_cast<int>(r)}});
        } else {
            party->ranks.push_back(static_cast<int>(r));
        }
    }
    return parties;
}

// Those that only called otherwise: "ranks 0 and 2 called all_reduce of 3 f32 (sum), rank 1 broadcast of 3 f32 ..."
std::string calls_of(std::span<const Party> parties) {
    std::string text;
    std::vector<std::string> calls;
    for (const Party& party : parties) {
        calls.push_back(describe(party.said->operation));
        text += fmt::format("{}{} {}{}", text.empty() ? "" : ", ", name_ranks(party.ranks),
                            text.empty() ? "called " : "", calls.back());
    }
    if (std::ranges::adjacent_find(calls) != calls.end()) text += "; the lengths of single tensors differ";
    return text;
}

}  // namespace

Error disagreement(int rank, uint64_t sequence, std::span<const Said> said) {
    const Said& own = said[static_cast<size_t>(rank)];
    const auto other = std::ranges::find_if(said, [&](const Said& s) { return s.fingerprint != own.fingerprint; });
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
            "{} {} finished (finalize, as operation #{}) while {}. All ranks must make the same calls before they "
            "finalize",
            who, one ? "has" : "have", sequence, calls_of(parties));
    }
    return Error(Code::mismatch, fmt::format("rank {}: {}. No data has moved", rank, text))
        .with_rank(rank)
        .with_peer(static_cast<int>(other - said.begin()))
        .with_operation(std::string(name_of(own.operation.collective)), static_cast<int64_t>(sequence));
}

}  // namespace tsr
