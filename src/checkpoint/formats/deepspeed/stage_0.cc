#include <fmt/core.h>

#include <optional>
#include <set>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/formats/deepspeed/layout.hpp"
#include "checkpoint/formats/deepspeed/stages.hpp"

namespace tsr {

namespace {

using pickle::no_ref;
using pickle::Ref;
using Fragment = DeepSpeedParts::Fragment;
using Partition = DeepSpeedParts::Partition;
using Members = DeepSpeedParts::Members;

class WholeOptimizer {
   public:
    explicit WholeOptimizer(DeepSpeedParts& parts) : parts_(parts), archives_(parts.archives) {}

    void add() {
        const Ref optimizer = archives_.find(0, "optimizer");
        if (optimizer == no_ref) return;
        const Ref nested = archives_.find(0, optimizer, "optimizer_state_dict");
        const Ref base = nested != no_ref ? nested : optimizer;
        if (archives_.find(0, base, "param_groups") == no_ref) return;
        settings_ = archives_.find(0, base, "param_groups");
        const OptimizerStates states(archives_, 0, base);
        const std::set<std::string_view> buffers = parts_.buffer_names();
        std::vector<std::string_view> names;
        std::vector<Dims> shapes;
        for (const auto& [name, node] : parts_.model) {
            const auto stored = archives_.find_tensor(0, node);
            if (!stored || parts_.aliases.contains(name) || buffers.contains(name)) continue;
            names.push_back(name);
            shapes.push_back(stored->shape);
        }
        if (const Ref flat = archives_.find(0, optimizer, "fp32_groups_flat"); flat != no_ref) {
            return add_whole_vector(states, flat, names, shapes);
        }
        const Ref masters = archives_.find(0, optimizer, "fp32_groups");
        std::vector<Numbered> found;
        std::vector<bool> taken(names.size(), false);
        for (size_t g = 0; g < states.groups(); ++g) {
            std::vector<Numbered> group = numbered(states, masters, g);
            std::vector<std::optional<Dims>> group_shapes;
            for (const Numbered& one : group) group_shapes.push_back(shape_of(one));
            const auto places = places_by_shape(group_shapes, shapes);
            if (!places) return refuse_names(masters != no_ref, g);
            for (size_t i = 0; i < group.size(); ++i) {
                const size_t place = (*places)[i];
                if (taken[place]) return refuse_names(masters != no_ref, g);
                taken[place] = true;
                group[i].name = names[place];
                found.push_back(std::move(group[i]));
            }
        }
        for (const Numbered& one : found) {
            if (one.master != no_ref)
                parts_.objects.add(parts_.source(0), fmt::format("model.{}", one.name), one.master);
            for (const auto& [key, node] : one.state) {
                const std::string name = fmt::format("optim.state.{}.{}", one.name, key);
                if (!parts_.put_scalar(name, 0, node)) parts_.objects.add(parts_.source(0), name, node);
            }
        }
    }
    // Of the optimizer's groups; no_ref: there are none.
    [[nodiscard]] Ref settings() const { return settings_; }

   private:
    struct Numbered {
        std::string_view name;
        Ref master = no_ref;  // no_ref: the model has the parameter itself
        Members state;
    };

    // A group's tensors.
    [[nodiscard]] std::vector<Numbered> numbered(const OptimizerStates& states, Ref masters, size_t group) const {
        std::vector<Numbered> found;
        const size_t count = states.tensors_in(group);
        for (size_t i = 0; i < count; ++i) found.push_back({"", no_ref, states.state(group, i)});
        if (masters == no_ref) return found;
        const auto groups = archives_.list(0, masters);
        if (group >= groups.size() || archives_.list(0, groups[group]).size() != count) {
            archives_.refuse(0, fmt::format("the fp32_groups of its optimizer are not those of group {}", group));
        }
        for (size_t i = 0; i < count; ++i) found[i].master = archives_.list(0, groups[group])[i];
        return found;
    }

    // nullopt: nothing says it.
    [[nodiscard]] std::optional<Dims> shape_of(const Numbered& one) const {
        if (one.master != no_ref) return archives_.archive(0).tensor(one.master).shape;
        for (const auto& [key, node] : one.state) {
            if (key == step_state) continue;
            if (const auto stored = archives_.find_tensor(0, node)) return stored->shape;
        }
        return std::nullopt;
    }

    // All parameters of the only group as one vector.
    void add_whole_vector(const OptimizerStates& states, Ref flat, const std::vector<std::string_view>& names,
                          const std::vector<Dims>& shapes) {
        const auto vectors = archives_.list(0, flat);
        int64_t there = 0;
        for (const Dims& shape : shapes) there += shape.product();
        if (vectors.size() != 1 || archives_.flat_tensor(0, vectors[0]).shape[0] != there) return refuse_names(true, 0);
        const Partition partition{0, vectors[0], there, states.state(0, 0)};
        int64_t at = 0;
        for (size_t i = 0; i < names.size(); ++i) {
            const int64_t count = shapes[i].product();
            std::vector<Fragment> fragments;
            if (count > 0) fragments.push_back({&partition, at, count, 0});
            parts_.put_parameter({std::string(names[i]), shapes[i]}, fragments);
            at += count;
        }
    }

    void refuse_names(bool has_masters, size_t group) {
        const std::string why = fmt::format(
            "DeepSpeed saved the optimizer's tensors without names, and their shapes do not say which parameters group "
            "{} has; save with ZeRO stage 1, or with the trained parameters in one group in the model's order",
            group);
        if (has_masters) archives_.refuse(0, "its fp32 parameters cannot be found: " + why, Code::unsupported);
        parts_.manifest.unreadable.emplace("optim.state", why);
    }

    DeepSpeedParts& parts_;
    const DeepSpeedArchives& archives_;
    Ref settings_ = no_ref;
};

}  // namespace

Ref add_stage_0(DeepSpeedParts& parts) {
    WholeOptimizer optimizer(parts);
    optimizer.add();
    parts.add_module();
    return optimizer.settings();
}

}  // namespace tsr
