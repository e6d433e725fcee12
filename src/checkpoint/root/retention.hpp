// Which saves of a root stay: the union of the newest, the best by a metric and every n-th step. And which is the best,
// by the rule that the saver left in `<root>/best`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/file_system.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

// The directory name of the best save, then "lower" or "higher", a space and the metric's name.
inline constexpr std::string_view best_name = "best";

enum class Better { lower, higher };

struct BestRule {
    std::string metric;
    Better better = Better::lower;
};

struct Retention {
    int latest = 0;  // how many of the newest; 0: all saves stay
    int best = 0;    // how many of the best by `rule`
    std::optional<BestRule> rule;
    int64_t every = 0;  // steps that are multiples of it stay for ever; 0: none
};

// Throws INVALID_ARGUMENT for what cannot be meant, such as the best of no metric.
void check_retention(const Retention& retention);

// A committed save with its value of the rule's metric; none if it has no such metric or it is not a number.
struct RankedSave {
    SavedStep save;
    std::optional<double> metric;
};
// The committed and readable ones of `saves`, in their order. A save whose metrics cannot be read has none.
[[nodiscard]] std::vector<RankedSave> rank_saves(FileSystem& files, const std::string& root,
                                                 const std::vector<SavedStep>& saves,
                                                 const std::optional<BestRule>& rule);
// The directory name of the best of `saves`; none if no save has the metric.
[[nodiscard]] std::optional<std::string> best_of(const std::vector<RankedSave>& saves, Better better);
// Indices of `saves` from the best down; of equal ones the newer is better.
[[nodiscard]] std::vector<size_t> best_first(const std::vector<RankedSave>& saves, Better better);
// The directory names that may go. `saves` are all committed ones, in the order of their commits.
[[nodiscard]] std::vector<std::string> to_remove(const Retention& retention, const std::vector<RankedSave>& saves);

[[nodiscard]] std::string best_text(const std::string& directory, const BestRule& rule);
// The rule in `<root>/best`, which a saver left there; CORRUPT if it cannot be read.
[[nodiscard]] std::optional<BestRule> best_rule(FileSystem& files, const std::string& root);
// The directory name of the best committed save: the truth is the scan, by the rule in `<root>/best`. None if no saver
// left a rule there or no save has the metric; CORRUPT if the rule cannot be read.
[[nodiscard]] std::optional<std::string> best_save(FileSystem& files, const std::string& root);

}  // namespace tsr
