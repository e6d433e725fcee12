#include "checkpoint/root/retention.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/model/state.hpp"

namespace tsr {

namespace {

constexpr int64_t tail_bytes = 65536;
constexpr int64_t max_best_bytes = 8192;

// The metrics stand at the manifest's end, so most of it need not be read.
Values metrics_of(FileSystem& files, const std::string& manifest) {
    {
        const auto file = open_file(files, manifest, OpenMode::read);
        const int64_t size = file->size();
        if (size < 0) throw os_error(fmt::format("cannot stat {}", manifest), static_cast<int>(-size));
        std::string tail(static_cast<size_t>(std::min(size, tail_bytes)), '\0');
        read_all(*file, manifest, std::as_writable_bytes(std::span(tail)), size - static_cast<int64_t>(tail.size()));
        if (auto metrics = parse_manifest_metrics(tail)) return std::move(*metrics);
    }
    return Manifest::parse(read_text(files, manifest, max_manifest_bytes), manifest).metrics;
}

std::string_view word_of(Better better) { return better == Better::lower ? "lower" : "higher"; }

BestRule parse_rule(std::string_view text, const std::string& path) {
    const size_t line = text.find('\n');
    if (line != std::string_view::npos) {
        std::string_view rule = text.substr(line + 1);
        if (rule.ends_with('\n')) rule.remove_suffix(1);
        for (const Better better : {Better::lower, Better::higher}) {
            const std::string_view word = word_of(better);
            if (rule.size() > word.size() + 1 && rule.starts_with(word) && rule[word.size()] == ' ') {
                return {std::string(rule.substr(word.size() + 1)), better};
            }
        }
    }
    throw Error(Code::corrupt, fmt::format("{} names no metric; open the save by its path, or remove {}: the next save "
                                           "rewrites it",
                                           path, path));
}

}  // namespace

void check_retention(const Retention& retention) {
    const auto refuse = [](const std::string& why) { throw Error(Code::invalid_argument, why); };
    if (retention.latest < 0) {
        refuse(fmt::format("keep_latest is {}; it must be 0 (keep all) or more", retention.latest));
    }
    if (retention.best < 0) refuse(fmt::format("keep_best is {}; it must be 0 or more", retention.best));
    if (retention.every < 0) refuse(fmt::format("keep_every is {}; it must be 0 or more", retention.every));
    if (retention.best > 0 && !retention.rule) {
        refuse(fmt::format("keep_best is {}, but best_metric is not set", retention.best));
    }
    if (retention.rule) check_name(retention.rule->metric, "best_metric");
    if (retention.latest == 0 && (retention.best > 0 || retention.every > 0)) {
        refuse("keep_best or keep_every is set, but keep_latest is 0, which keeps all; set keep_latest to 1 or more");
    }
}

std::vector<RankedSave> rank_saves(FileSystem& files, const std::string& root, const std::vector<SavedStep>& saves,
                                   const std::optional<BestRule>& rule) {
    std::vector<RankedSave> ranked;
    for (const SavedStep& save : saves) {
        if (!save.committed || !save.readable) continue;
        RankedSave& one = ranked.emplace_back(RankedSave{save, std::nullopt});
        if (!rule) continue;
        const std::string manifest = join(join(root, save.directory), manifest_name);
        try {
            const Values metrics = metrics_of(files, manifest);
            const auto found = metrics.find(rule->metric);
            if (found == metrics.end()) continue;
            const double value = double_of(found->second, rule->metric);
            if (!std::isnan(value)) one.metric = value;
        } catch (const Error& error) {
            if (error.code() == Code::not_found) {  // removed since it was listed
                ranked.pop_back();
                continue;
            }
            log::warning("the metrics of {} cannot be read: {}", manifest, error.what());
        }
    }
    return ranked;
}

std::vector<size_t> best_first(const std::vector<RankedSave>& saves, Better better) {
    std::vector<size_t> order;
    for (size_t i = saves.size(); i-- > 0;) {
        if (saves[i].metric) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return better == Better::lower ? *saves[a].metric < *saves[b].metric : *saves[a].metric > *saves[b].metric;
    });
    return order;
}

std::optional<std::string> best_of(const std::vector<RankedSave>& saves, Better better) {
    const std::vector<size_t> order = best_first(saves, better);
    if (order.empty()) return std::nullopt;
    return saves[order.front()].save.directory;
}

std::vector<std::string> to_remove(const Retention& retention, const std::vector<RankedSave>& saves) {
    std::vector<std::string> names;
    if (retention.latest == 0) return names;
    std::vector<bool> stays(saves.size(), false);
    for (size_t i = 0; i < saves.size(); ++i) {
        stays[i] = i + static_cast<size_t>(retention.latest) >= saves.size() ||
                   (retention.every > 0 && saves[i].save.step % retention.every == 0);
    }
    if (retention.rule) {
        // The save that `best` names stays, even if keep_best is 0.
        const auto count = static_cast<size_t>(std::max(retention.best, 1));
        const std::vector<size_t> order = best_first(saves, retention.rule->better);
        for (size_t i = 0; i < std::min(count, order.size()); ++i) stays[order[i]] = true;
    }
    for (size_t i = 0; i < saves.size(); ++i) {
        if (!stays[i]) names.push_back(saves[i].save.directory);
    }
    return names;
}

std::string best_text(const std::string& directory, const BestRule& rule) {
    return fmt::format("{}\n{} {}\n", directory, word_of(rule.better), rule.metric);
}

std::optional<BestRule> best_rule(FileSystem& files, const std::string& root) {
    const std::string path = join(root, best_name);
    std::string text;
    try {
        text = read_text(files, path, max_best_bytes);
    } catch (const Error& error) {
        if (error.code() == Code::not_found) return std::nullopt;
        throw;
    }
    return parse_rule(text, path);
}

std::optional<std::string> best_save(FileSystem& files, const std::string& root) {
    const auto rule = best_rule(files, root);
    if (!rule) return std::nullopt;
    std::vector<std::string> names;
    (void)files.list(root, names);
    while (true) {
        const auto best = best_of(rank_saves(files, root, scan_root(files, root), rule), rule->better);
        // A job that saves here meanwhile may have replaced the one that was listed.
        const std::vector<std::string> before = std::exchange(names, {});
        if (best || files.list(root, names) < 0 || names == before) return best;
    }
}

}  // namespace tsr
