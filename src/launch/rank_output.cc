#include "launch/rank_output.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "base/error.hpp"

namespace tsr {

namespace {

std::optional<int> whole_number(std::string_view text) {
    int value = 0;
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc{} || end != text.data() + text.size() || value < 0) return std::nullopt;
    return value;
}

std::optional<int> streams(std::string_view text) {
    return text.size() == 1 && text[0] >= '0' && text[0] <= '3' ? std::optional(text[0] - '0') : std::nullopt;
}

}  // namespace

StreamChoice StreamChoice::parse(std::string_view text) {
    StreamChoice choice;
    if (const auto all = streams(text)) {
        choice.of_all_ = *all;
        return choice;
    }
    const auto wrong = [&](const std::string& why) {
        return Error(Code::invalid_argument,
                     fmt::format("'{}': {}; expected 0 (none), 1 (standard output), 2 (standard error) or 3 (both) for "
                                 "all ranks, or RANK:STREAMS separated by commas, such as 0:1,12:3",
                                 text, why));
    };
    std::string_view left = text;
    for (bool more = true; more;) {
        const size_t comma = left.find(',');
        const std::string_view entry = left.substr(0, comma);
        more = comma != std::string_view::npos;
        left.remove_prefix(more ? comma + 1 : left.size());
        const size_t colon = entry.find(':');
        const auto rank = colon == std::string_view::npos ? std::nullopt : whole_number(entry.substr(0, colon));
        const auto chosen = colon == std::string_view::npos ? std::nullopt : streams(entry.substr(colon + 1));
        if (!rank || !chosen) throw wrong(fmt::format("'{}' is not valid", entry));
        if (!choice.of_ranks_.emplace(*rank, *chosen).second) throw wrong(fmt::format("rank {} occurs twice", *rank));
    }
    return choice;
}

bool StreamChoice::includes(int local_rank, Stream stream) const {
    const auto own = of_ranks_.find(local_rank);
    const int chosen = own == of_ranks_.end() ? of_all_ : own->second;
    return (chosen & (stream == Stream::out ? 1 : 2)) != 0;
}

bool StreamChoice::any() const {
    return of_all_ != 0 || std::ranges::any_of(of_ranks_, [](const auto& entry) { return entry.second != 0; });
}

bool OutputOptions::has_file(int local_rank, Stream stream) const {
    return redirects.includes(local_rank, stream) || tee.includes(local_rank, stream);
}

bool OutputOptions::shows(int local_rank, Stream stream) const {
    if (redirects.includes(local_rank, stream) && !tee.includes(local_rank, stream)) return false;
    return shown.empty() || std::ranges::find(shown, local_rank) != shown.end();
}

bool OutputOptions::writes_files() const {
    return redirects.any() || tee.any() || !out_filters.empty() || !err_filters.empty();
}

void OutputOptions::check(int ranks) const {
    const int greatest_shown = shown.empty() ? -1 : std::ranges::max(shown);
    for (const auto& [option, rank] : {std::pair{"--redirects", redirects.greatest_rank()},
                                       {"--tee", tee.greatest_rank()},
                                       {"--local-ranks-filter", greatest_shown}}) {
        if (rank >= ranks) {
            throw Error(Code::invalid_argument, fmt::format("{} names local rank {}, but the local ranks are 0 to {}",
                                                            option, rank, ranks - 1));
        }
    }
}

std::string expand_prefix(std::string_view text, const RankNames& names) {
    const std::pair<std::string_view, std::string> values[] = {{"${rank}", std::to_string(names.rank)},
                                                               {"${local_rank}", std::to_string(names.local_rank)},
                                                               {"${role_name}", names.role},
                                                               {"${hostname}", names.host}};
    std::string expanded;
    while (!text.empty()) {
        const auto* const value =
            std::ranges::find_if(values, [&](const auto& entry) { return text.starts_with(entry.first); });
        if (value != std::end(values)) {
            expanded += value->second;
            text.remove_prefix(value->first.size());
        } else {
            expanded += text.front();
            text.remove_prefix(1);
        }
    }
    return expanded;
}

std::vector<std::string> comma_separated(std::string_view text) {
    if (text.empty()) return {};
    std::vector<std::string> items(1);
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] != ',') {
            items.back() += text[i];
        } else if (i + 1 < text.size() && text[i + 1] == ',') {
            items.back() += ',';
            ++i;
        } else {
            items.emplace_back();
        }
    }
    return items;
}

}  // namespace tsr
