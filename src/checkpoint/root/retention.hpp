// Which saves of a root are kept: the union of the newest, the best by a metric and every n-th step. Also which save is
// the best, by the rule that the saver wrote to `<root>/best`.
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
    int latest = 0;  // number of newest saves to keep; 0: keep all saves
    int best = 0;    // number of best saves to keep, by `rule`
    std::optional<BestRule> rule;
    int64_t every = 0;  // steps that are multiples of this are kept for good; 0: none
};

// Throws INVALID_ARGUMENT for contradictory settings, such as `best` without a metric.
void check_retention(const Retention& retention);

// A committed save and its value of the rule's metric; nullopt if it lacks the metric or the value is NaN.
struct RankedSave {
    SavedStep save;
    std::optional<double> metric;
};
// The committed and readable saves of `saves`, in their order. A save whose metrics cannot be read has none.
[[nodiscard]] std::vector<RankedSave> rank_saves(FileSystem& files, const std::string& root,
                                                 const std::vector<SavedStep>& saves,
                                                 const std::optional<BestRule>& rule);
// The directory name of the best of `saves`; nullopt if no save has the metric.
[[nodiscard]] std::optional<std::string> best_of(const std::vector<RankedSave>& saves, Better better);
// Indices of `saves`, best first; of equal saves the newer is better.
[[nodiscard]] std::vector<size_t> best_first(const std::vector<RankedSave>& saves, Better better);
// The directory names of the saves to remove. `saves` are all committed saves, in commit order.
[[nodiscard]] std::vector<std::string> to_remove(const Retention& retention, const std::vector<RankedSave>& saves);

[[nodiscard]] std::string best_text(const std::string& directory, const BestRule& rule);
// The rule that a saver wrote to `<root>/best`; CORRUPT if it cannot be read.
[[nodiscard]] std::optional<BestRule> best_rule(FileSystem& files, const std::string& root);
// The directory name of the best committed save, found by scanning with the rule in `<root>/best`. nullopt if there is
// no rule or no save has the metric; CORRUPT if the rule cannot be read.
[[nodiscard]] std::optional<std::string> best_save(FileSystem& files, const std::string& root);

}  // namespace tsr
