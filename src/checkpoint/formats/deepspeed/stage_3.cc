#include <fmt/core.h>

#include <algorithm>
#include <map>
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
using Parameter = DeepSpeedParts::Parameter;
using Partition = DeepSpeedParts::Partition;

class Vectors {
   public:
    explicit Vectors(DeepSpeedParts& parts) : parts_(parts), archives_(parts.archives) {}

    void add() {
        add_vectors();
        add_frozen_fragments();
        add_buffers();
    }

   private:
    void add_vectors() {
        // By rank, then by the vectors of a rank, one after the other.
        std::vector<std::vector<Partition>> vectors;
        std::vector<std::vector<int64_t>> ends;
        for (int file = archives_.first_optimizer(); file < archives_.count(); ++file) {
            const Ref optimizer = archives_.need(file, "optimizer_state_dict");
            const auto masters = archives_.list(file, archives_.need(file, optimizer, "fp32_flat_groups"));
            std::vector<Partition>& own = vectors.emplace_back();
            std::vector<int64_t>& own_ends = ends.emplace_back();
            for (const Ref master : masters) {
                own.push_back({file, master, archives_.flat_tensor(file, master).shape[0], {}});
                parts_.append_end(own_ends, own.back());
            }
            if (const Ref base = archives_.find(file, optimizer, "optimizer_state_dict"); base != no_ref) {
                add_vector_states(file, own, OptimizerStates(archives_, file, base));
            }
            if (own_ends != ends[0]) {
                archives_.refuse(file, "its partitions have other sizes than those of rank 0: it is of another save");
            }
        }
        const int64_t there = ends[0].empty() ? 0 : ends[0].back();
        int64_t at = 0;
        for (const std::vector<Parameter>& group : parts_.parameters()) {
            for (const Parameter& parameter : group) {
                const Range first = part_of(parameter.shape, vectors.size(), 0);
                const int64_t part = first.end - first.begin;
                if (part > there - at) {
                    archives_.refuse(archives_.first_optimizer(),
                                     fmt::format("its partitions have {} elements, but its part of '{}' ends at "
                                                 "element {}",
                                                 there, parameter.name, at + part));
                }
                std::vector<Fragment> fragments;
                for (size_t r = 0; r < vectors.size(); ++r) {
                    const Range range = part_of(parameter.shape, vectors.size(), r);
                    for (const FlatRange& one : partitions_of(ends[r], {at, at + range.end - range.begin})) {
                        fragments.push_back(
                            {&vectors[r][one.partition], one.begin, one.count, range.begin + one.first});
                    }
                }
                parts_.put_parameter(parameter, fragments);
                at += part;
            }
        }
        if (at != there) {
            archives_.refuse(
                archives_.first_optimizer(),
                fmt::format("its partitions have {} elements, but the parts of its parameters {}", there, at));
        }
    }

    // The optimizer of stage 3 has a rank's vectors as its tensors, in order.
    void add_vector_states(int file, std::vector<Partition>& vectors, const OptimizerStates& states) const {
        size_t count = 0;
        for (size_t group = 0; group < states.groups(); ++group) count += states.tensors_in(group);
        if (count != vectors.size()) {
            archives_.refuse(file,
                             fmt::format("its optimizer has {} tensors for {} partitions", count, vectors.size()));
        }
        size_t next = 0;
        for (size_t group = 0; group < states.groups(); ++group) {
            for (size_t i = 0; i < states.tensors_in(group); ++i) vectors[next++].state = states.state(group, i);
        }
    }

    void add_buffers() {
        const std::set<std::string_view> buffers = parts_.buffer_names();
        for (const auto& [name, node] : parts_.model) {
            if (buffers.contains(name)) parts_.objects.add(parts_.source(0), fmt::format("model.{}", name), node);
        }
    }

    // The parts of a parameter, of which rank r has the elements from r * part on.
    [[nodiscard]] static Range part_of(const Dims& shape, size_t ranks, size_t rank) {
        const int64_t count = shape.product();
        const auto parts = static_cast<int64_t>(ranks);
        const int64_t part = count / parts + (count % parts != 0 ? 1 : 0);
        const int64_t begin = std::min(count, static_cast<int64_t>(rank) * part);
        return {begin, std::min(count, begin + part)};
    }

    void add_frozen_fragments() {
        const Ref shapes = archives_.find(0, "frozen_param_shapes");
        if (shapes == no_ref) return;
        const size_t ranks = archives_.names().model.size();
        std::vector<std::map<std::string_view, Ref>> parts(ranks);
        for (size_t r = 0; r < ranks; ++r) {
            const int file = static_cast<int>(r);
            for (const auto& [name, node] : archives_.members(file, archives_.need(file, "frozen_param_fragments"))) {
                parts[r].emplace(name, node);
            }
        }
        for (const auto& [name, shape_node] : archives_.members(0, shapes)) {
            const Dims shape = parts_.shape_of(name, shape_node);
            std::vector<Partition> partitions(ranks);
            std::vector<Fragment> fragments;
            for (size_t r = 0; r < ranks; ++r) {
                const int file = static_cast<int>(r);
                const auto found = parts[r].find(name);
                if (found == parts[r].end())
                    archives_.refuse(file, fmt::format("it has no part of the parameter '{}'", name));
                partitions[r] = {file, found->second, 0, {}};
                const Range range = part_of(shape, ranks, r);
                if (range.begin < range.end) {
                    fragments.push_back({&partitions[r], 0, range.end - range.begin, range.begin});
                }
            }
            parts_.put_fragments(fmt::format("model.{}", name), shape, fragments,
                                 [](const Fragment& fragment) { return fragment.partition->master; });
        }
    }

    DeepSpeedParts& parts_;
    const DeepSpeedArchives& archives_;
};

}  // namespace

void add_stage_3(DeepSpeedParts& parts) { Vectors(parts).add(); }

}  // namespace tsr
