#include <fmt/core.h>

#include <optional>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/formats/deepspeed/layout.hpp"
#include "checkpoint/formats/deepspeed/stages.hpp"

namespace tsr {

namespace {

using pickle::Kind;
using pickle::no_ref;
using pickle::Ref;
using Fragment = DeepSpeedParts::Fragment;
using Parameter = DeepSpeedParts::Parameter;
using Partition = DeepSpeedParts::Partition;

class Groups {
   public:
    explicit Groups(DeepSpeedParts& parts) : parts_(parts), archives_(parts.archives) {}

    void add() {
        const auto groups = parts_.parameters();
        const auto optimizers = partitions(groups.size());
        const int first = archives_.first_optimizer();
        const Ref alignment =
            archives_.find(first, archives_.need(first, "optimizer_state_dict"), "param_alignment_paddings");
        for (size_t g = 0; g < groups.size(); ++g) {
            std::vector<int64_t> ends;
            for (const auto& partitions : optimizers) parts_.append_end(ends, partitions[g]);
            const int64_t there = ends.back();
            const std::vector<int64_t> paddings = paddings_of(alignment, g, groups[g].size());
            int64_t at = 0;
            for (size_t p = 0; p < groups[g].size(); ++p) {
                const Parameter& parameter = groups[g][p];
                const int64_t count = parameter.shape.product();
                if (count > there - at) {
                    archives_.refuse(first, fmt::format("group {} has {} elements in all ranks' files, but parameter "
                                                        "'{}' ends at element {}",
                                                        g, there, parameter.name, at + count));
                }
                std::vector<Fragment> fragments;
                for (const FlatRange& range : partitions_of(ends, {at, at + count})) {
                    fragments.push_back({&optimizers[range.partition][g], range.begin, range.count, range.first});
                }
                parts_.put_parameter(parameter, fragments);
                at += count + paddings[p];
            }
            // At its end, a group may be padded to twice the number of ranks.
            if (there - at >= 2 * static_cast<int64_t>(optimizers.size())) {
                archives_.refuse(
                    first, fmt::format("group {} has {} elements in all ranks' files, but its parameters have {}", g,
                                       there, at));
            }
        }
    }

   private:
    // By rank, then by group.
    [[nodiscard]] std::vector<std::vector<Partition>> partitions(size_t groups) const {
        std::vector<std::vector<Partition>> found;
        for (int file = archives_.first_optimizer(); file < archives_.count(); ++file) {
            const Ref optimizer = archives_.need(file, "optimizer_state_dict");
            const auto masters =
                archives_.list(file, archives_.need(file, optimizer, "single_partition_of_fp32_groups"));
            if (masters.size() != groups) {
                archives_.refuse(file, fmt::format("it has {} groups of parameters, but {} has {}", masters.size(),
                                                   archives_.names().model[0].str(), groups));
            }
            std::vector<Partition>& own = found.emplace_back();
            const Ref base = archives_.find(file, optimizer, "base_optimizer_state");
            const bool is_elastic = base != no_ref && archives_.tree(file).is(base, Kind::list);  // the states alone
            const Ref elastic_step = is_elastic ? archives_.find(file, optimizer, "base_optimizer_state_step") : no_ref;
            std::optional<OptimizerStates> states;
            if (base != no_ref && !is_elastic) states.emplace(archives_, file, base);
            for (size_t g = 0; g < masters.size(); ++g) {
                Partition partition{file, masters[g], archives_.flat_tensor(file, masters[g]).shape[0], {}};
                if (states) partition.state = states->state(g, 0);
                if (is_elastic && g < archives_.list(file, base).size()) {
                    partition.state = archives_.state_members(file, archives_.list(file, base)[g]);
                    add_group_step(partition.state, elastic_step);
                }
                own.push_back(std::move(partition));
            }
        }
        return found;
    }

    // After each parameter of a group, if they were aligned.
    [[nodiscard]] std::vector<int64_t> paddings_of(Ref all, size_t group, size_t count) const {
        std::vector<int64_t> paddings(count, 0);
        const int file = archives_.first_optimizer();
        if (all == no_ref) return paddings;
        const auto groups = archives_.list(file, all);
        if (group >= groups.size() || archives_.list(file, groups[group]).size() != count) {
            archives_.refuse(file, fmt::format("its param_alignment_paddings are not those of group {}'s {} parameters",
                                               group, count));
        }
        for (size_t i = 0; i < count; ++i) {
            paddings[i] = archives_.tree(file).as_int(archives_.list(file, groups[group])[i]);
            if (paddings[i] < 0 || paddings[i] > most_padding) {
                archives_.refuse(file, fmt::format("a parameter has a padding of {} elements", paddings[i]));
            }
        }
        return paddings;
    }

    static constexpr int64_t most_padding = 64;  // elements; DeepSpeed aligns to 16 bytes

    DeepSpeedParts& parts_;
    const DeepSpeedArchives& archives_;
};

}  // namespace

void add_stages_1_and_2(DeepSpeedParts& parts) {
    Groups(parts).add();
    parts.add_module();
}

}  // namespace tsr
