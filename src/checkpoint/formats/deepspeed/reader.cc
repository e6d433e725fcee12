#include "checkpoint/formats/deepspeed/reader.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "base/error.hpp"
#include "checkpoint/formats/deepspeed/archives.hpp"
#include "checkpoint/formats/deepspeed/files.hpp"
#include "checkpoint/formats/deepspeed/layout.hpp"
#include "checkpoint/formats/torch_dcp/contents.hpp"
#include "checkpoint/formats/torch_dcp/flattener.hpp"
#include "checkpoint/model/manifest.hpp"

namespace tsr {

namespace {

using pickle::Kind;
using pickle::no_ref;
using pickle::Ref;
using pickle::Tree;

// What DeepSpeed itself puts at the top of a model file; the client state is everything else.
constexpr std::string_view own_keys[] = {"module",           "buffer_names",        "optimizer",
                                         "param_shapes",     "frozen_param_shapes", "frozen_param_fragments",
                                         "shared_params",    "mp_world_size",       "checkpoint_parallel_dimensions",
                                         "ds_autoep_layers", "autoep_layers",       "universal_checkpoint_info"};
constexpr std::string_view engine_keys[] = {"data_sampler",   "random_ltd",    "skipped_steps", "global_steps",
                                            "global_samples", "dp_world_size", "ds_config",     "ds_version"};
constexpr std::string_view loss_scale_keys[] = {
    "cur_scale",     "cur_iter",       "last_overflow_iter",     "scale_factor", "scale_window",      "min_scale",
    "delayed_shift", "cur_hysteresis", "consecutive_hysteresis", "dynamic",      "dynamic_loss_scale"};

template <size_t n>
bool is_one_of(const std::string_view (&names)[n], std::string_view name) {
    return std::ranges::find(names, name) != std::end(names);
}

using Members = DeepSpeedArchives::Members;

// A flat tensor in a file: a rank's partition of a group of parameters, and what the optimizer keeps for it.
struct Partition {
    int file = 0;
    Ref master = no_ref;
    int64_t count = 0;  // elements of parameters, not of padding at its end
    Members state;
};

// A range of a partition that belongs to a parameter.
struct Fragment {
    const Partition* partition = nullptr;
    int64_t begin = 0;  // in the partition
    int64_t count = 0;
    int64_t first = 0;  // in the parameter, row-major
};

class DeepSpeedReader {
   public:
    DeepSpeedReader(FileSystem& files, const std::string& directory)
        : files_(files), archives_(files, directory), names_(archives_.names()), objects_(manifest_, tensors_) {}

    TorchCheckpoint run() {
        for (int file = 0; file < archives_.count(); ++file) objects_.allow(archives_.archive(file));
        describe();
        read_module();
        if (names_.optimizer.empty()) {
            add_whole_optimizer();
            add_module();
        } else if (names_.model[0].rank >= 0) {
            add_stage3();
            add_frozen_fragments();
            add_buffers();
        } else {
            add_groups();
            add_module();
        }
        add_aliases();
        add_values();
        auto contents = std::make_unique<TorchContents>(files_, archives_.take_paths(), archives_.take_archives(),
                                                        std::move(tensors_));
        return {std::move(manifest_), std::move(contents)};
    }

   private:
    [[nodiscard]] Flattener::Source source(int file) const {
        return {&archives_.archive(file), file, archives_.size_bytes(file)};
    }

    // --- what the save is of ---

    void describe() {
        const int ranks = static_cast<int>(std::max(names_.model.size(), names_.optimizer.size()));
        const int64_t world = archives_.find_int(0, "dp_world_size").value_or(ranks);
        if (world < 1 || world > max_layout_ranks) archives_.refuse(0, fmt::format("its dp_world_size is {}", world));
        const bool is_whole = names_.optimizer.empty();
        if (is_whole && archives_.find(0, "param_shapes") != no_ref) {
            archives_.refuse(
                0,
                "its optimizer was sharded, but no *_optim_states.pt is there: without them, only 16-bit copies or "
                "placeholders of the parameters are left; copy the files of all ranks",
                Code::not_found);
        }
        if (!is_whole) check_count(names_.optimizer, world, "optimizer");
        if (names_.model[0].rank >= 0) check_count(names_.model, world, "model");
        if (const auto parallel = archives_.find_int(0, "mp_world_size"); parallel.value_or(1) != 1) {
            archives_.refuse(0, fmt::format("{} model-parallel ranks saved it; only one is supported", *parallel),
                             Code::unsupported);
        }
        for (const std::string_view key : {"ds_autoep_layers", "autoep_layers"}) {
            const Ref experts = archives_.find(0, key);
            if (experts != no_ref && !archives_.list(0, experts).empty()) {
                archives_.refuse(0, "it has layers of experts, which are not supported", Code::unsupported);
            }
        }
        for (int file = archives_.first_optimizer(); file < archives_.count(); ++file) {
            check_partition_count(file, world);
        }
        FileStatus newest;
        newest.modified_ns = archives_.modified_ns();
        manifest_ = manifest_of("deepspeed", newest);
        for (const auto& names : {names_.model, names_.optimizer}) {
            for (const DeepSpeedName& name : names) {
                const auto file = static_cast<int>(manifest_.files.size());
                manifest_.files.push_back({name.str(), archives_.size_bytes(file), 0});
            }
        }
        manifest_.writer.library = "DeepSpeed";
        if (const Ref version = archives_.find(0, "ds_version");
            version != no_ref && archives_.tree(0).is(version, Kind::text)) {
            manifest_.writer.version = archives_.tree(0).as_text(version).substr(0, 100);
        }
        manifest_.world_size = static_cast<int>(world);
        manifest_.step = std::max<int64_t>(archives_.find_int(0, "global_steps").value_or(-1), -1);
    }

    // That each rank has its file.
    void check_count(const std::vector<DeepSpeedName>& names, int64_t world, std::string_view what) const {
        const auto there = static_cast<int64_t>(names.size());
        if (there == world) return;
        DeepSpeedName missing = names.back();
        missing.rank = static_cast<int>(there);
        const std::string why =
            there < world ? fmt::format("{} is missing", missing.str()) : std::string("the others are of another save");
        archives_.refuse(
            0, fmt::format("{} data-parallel ranks saved it, but {} {} files are there: {}", world, there, what, why),
            there < world ? Code::not_found : Code::corrupt);
    }

    void check_partition_count(int file, int64_t world) const {
        const Ref counts = archives_.find(file, archives_.need(file, "optimizer_state_dict"), "partition_count");
        if (counts == no_ref) return;
        std::vector<Ref> all{counts};
        if (!archives_.tree(file).is(counts, Kind::integer)) {
            const auto list = archives_.list(file, counts);
            all.assign(list.begin(), list.end());
        }
        for (const Ref one : all) {
            const int64_t count = archives_.tree(file).as_int(one);
            if (count == world) continue;
            archives_.refuse(
                file, fmt::format("its parameters are cut for {} ranks, but {} saved the checkpoint", count, world));
        }
    }

    // A tensor that is another one under a second name becomes its alias.
    void read_module() {
        module_ = archives_.members(0, archives_.need(0, "module"));
        if (const Ref shared = archives_.find(0, "shared_params"); shared != no_ref) {
            for (const auto& [name, target] : archives_.members(0, shared)) {
                aliases_.emplace(name, archives_.tree(0).as_text(target));
            }
        }
        std::map<std::tuple<const ZipEntry*, int64_t, std::string>, std::string_view> known;
        for (const auto& [name, node] : module_) {
            if (aliases_.contains(name)) continue;
            const auto stored = archives_.find_tensor(0, node);
            if (!stored || stored->entry == nullptr || stored->shape.product() == 0) continue;
            const auto [first, is_new] =
                known.try_emplace({stored->entry, stored->first, stored->shape.str() + stored->strides.str()}, name);
            if (!is_new) aliases_.emplace(name, first->second);
        }
    }

    [[nodiscard]] std::set<std::string_view> buffer_names() const {
        std::set<std::string_view> names;
        for (const Ref one : archives_.list(0, archives_.need(0, "buffer_names"))) {
            names.insert(archives_.tree(0).as_text(one));
        }
        return names;
    }

    // --- tensors ---

    struct Parameter {
        std::string name;
        Dims shape;
    };
    // Parameters in the order of their elements, a list for each group.
    [[nodiscard]] std::vector<std::vector<Parameter>> parameters() const {
        std::vector<std::vector<Parameter>> groups;
        std::set<std::string_view> names;
        for (const Ref group : archives_.list(0, archives_.need(0, "param_shapes"))) {
            std::vector<Parameter>& found = groups.emplace_back();
            for (const auto& [name, shape] : archives_.members(0, group)) {
                if (!names.insert(name).second)
                    archives_.refuse(0, fmt::format("two parameters are called '{}'", name));
                found.push_back({std::string(name), shape_of(name, shape)});
            }
        }
        return groups;
    }
    [[nodiscard]] Dims shape_of(std::string_view name, Ref node) const {
        const Dims shape = dims_of(archives_.tree(0), node);
        try {
            check_shape(shape, DType::f32, fmt::format("parameter '{}'", name));
        } catch (const Error& error) {
            archives_.refuse(0, error.what());
        }
        return shape;
    }

    static constexpr int64_t piece_bytes = sizeof(SavedPiece) + sizeof(TorchPiece);
    static constexpr int64_t tensor_bytes = sizeof(SavedTensor) + sizeof(TorchContents::Tensor) + 256;

    void put(const std::string& name, SavedTensor saved, TorchContents::Tensor tensor) {
        objects_.take_name(archives_.archive(0), name);
        objects_.spend(archives_.archive(0), tensor_bytes + 2 * static_cast<int64_t>(name.size()) +
                                                 piece_bytes * static_cast<int64_t>(tensor.pieces.size()));
        saved.dtype = tensor.dtype;
        if (!tensor.pieces.empty()) tensors_[name] = std::move(tensor);
        manifest_.tensors.emplace(name, std::make_shared<const SavedTensor>(std::move(saved)));
    }

    // A tensor of ranges of flat tensors; `node_of` gives the flat tensor of a fragment.
    template <class NodeOf>
    void put_fragments(const std::string& name, const Dims& shape, const std::vector<Fragment>& fragments,
                       NodeOf node_of) {
        SavedTensor saved;
        saved.shape = shape;
        TorchContents::Tensor tensor;
        bool is_first = true;
        for (const Fragment& fragment : fragments) {
            const int file = fragment.partition->file;
            const Ref node = node_of(fragment);
            const StoredTensor stored = archives_.flat_tensor(file, node);
            if (fragment.count > stored.shape[0] - fragment.begin) {
                archives_.refuse(file, fmt::format("'{}' needs elements {} to {} of a partition of {}", name,
                                                   fragment.begin, fragment.begin + fragment.count, stored.shape[0]));
            }
            if (!is_first && tensor.dtype != stored.dtype) {
                archives_.refuse(file, fmt::format("'{}' is {} here, but {} in another rank's file", name,
                                                   name_of(stored.dtype), name_of(tensor.dtype)));
            }
            is_first = false;
            tensor.dtype = stored.dtype;
            int64_t at = fragment.begin;
            for (const Box& box : boxes_of_range(shape, {fragment.first, fragment.first + fragment.count})) {
                TorchPiece piece{box, {file, 0, archives_.size_bytes(file)}, node};
                piece.first = at;
                at += box.numel();
                saved.pieces.push_back({box, file});
                tensor.pieces.push_back(std::move(piece));
            }
        }
        put(name, std::move(saved), std::move(tensor));
    }

    // A parameter and what the optimizer keeps for it.
    void put_parameter(const Parameter& parameter, const std::vector<Fragment>& fragments) {
        put_fragments("model." + parameter.name, parameter.shape, fragments,
                      [](const Fragment& fragment) { return fragment.partition->master; });
        if (fragments.empty()) return;
        const Partition& first = *fragments[0].partition;
        for (const auto& [key, node] : first.state) {
            const std::string name = fmt::format("optim.state.{}.{}", parameter.name, key);
            if (put_scalar(name, first.file, node)) continue;
            const auto of_fragment = [&, &key = key](const Fragment& fragment) {
                for (const auto& [other, found] : fragment.partition->state) {
                    if (other == key) return found;
                }
                archives_.refuse(fragment.partition->file,
                                 fmt::format("its optimizer has no '{}', as another rank's has", key));
            };
            if (const auto why = why_not_flat(fragments, of_fragment)) {
                objects_.take_name(archives_.archive(0), name);
                manifest_.unreadable.emplace(name, *why);
            } else {
                put_fragments(name, parameter.shape, fragments, of_fragment);
            }
        }
    }

    // Optimizers of other kinds may keep what has other sizes than the parameters.
    template <class NodeOf>
    [[nodiscard]] std::optional<std::string> why_not_flat(const std::vector<Fragment>& fragments,
                                                          NodeOf node_of) const {
        for (const Fragment& fragment : fragments) {
            const int file = fragment.partition->file;
            const Ref node = node_of(fragment);
            const auto stored = archives_.find_tensor(file, node);
            if (!stored) return fmt::format("{} is not supported", archives_.tree(file).name(node));
            const Dims& shape = stored->shape;
            if (shape.ndim() == 1 && shape[0] >= fragment.partition->count) continue;
            return fmt::format("it has the shape {} for a partition of {} elements", shape.str(),
                               fragment.partition->count);
        }
        return std::nullopt;
    }

    // A tensor without dimensions, or a number, which becomes one. False for others.
    bool put_scalar(const std::string& name, int file, Ref node) {
        TorchPiece piece{Box::whole(Dims{}), {file, 0, archives_.size_bytes(file)}, node};
        TorchContents::Tensor tensor;
        if (const auto stored = archives_.find_tensor(file, node)) {
            if (stored->shape.ndim() != 0) return false;
            tensor.dtype = stored->dtype;
        } else if (archives_.tree(file).is(node, Kind::integer)) {
            piece.number = static_cast<float>(archives_.tree(file).as_int(node));
        } else if (archives_.tree(file).is(node, Kind::real)) {
            piece.number = static_cast<float>(archives_.tree(file).as_real(node));
        } else {
            return false;
        }
        SavedTensor saved;
        saved.pieces.push_back({piece.box, file});
        tensor.pieces.push_back(std::move(piece));
        put(name, std::move(saved), std::move(tensor));
        return true;
    }

    // --- stages 1 and 2: each group is one vector, cut into a partition for each rank ---

    void add_groups() {
        const auto groups = parameters();
        const auto optimizers = partitions(groups.size());
        const int first = archives_.first_optimizer();
        const Ref alignment =
            archives_.find(first, archives_.need(first, "optimizer_state_dict"), "param_alignment_paddings");
        for (size_t g = 0; g < groups.size(); ++g) {
            std::vector<int64_t> ends;
            for (const auto& partitions : optimizers) append_end(ends, partitions[g]);
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
                put_parameter(parameter, fragments);
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

    // Of partitions that follow each other.
    void append_end(std::vector<int64_t>& ends, const Partition& partition) const {
        int64_t end = 0;
        if (__builtin_add_overflow(ends.empty() ? 0 : ends.back(), partition.count, &end)) {
            archives_.refuse(partition.file, "the total size of its partitions exceeds 2^63 elements");
        }
        ends.push_back(end);
    }

    // By rank, then by group.
    [[nodiscard]] std::vector<std::vector<Partition>> partitions(size_t groups) const {
        std::vector<std::vector<Partition>> found;
        for (int file = archives_.first_optimizer(); file < archives_.count(); ++file) {
            const Ref optimizer = archives_.need(file, "optimizer_state_dict");
            const auto masters =
                archives_.list(file, archives_.need(file, optimizer, "single_partition_of_fp32_groups"));
            if (masters.size() != groups) {
                archives_.refuse(file, fmt::format("it has {} groups of parameters, but {} has {}", masters.size(),
                                                   names_.model[0].str(), groups));
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

    // What the optimizer does not have: buffers, frozen parameters, and without ZeRO all that is not 16-bit.
    void add_module() {
        for (const auto& [key, node] : module_) {
            const std::string name = fmt::format("model.{}", key);
            if (!manifest_.tensors.contains(name) && !aliases_.contains(key)) objects_.add(source(0), name, node);
        }
    }

    // --- stage 3: each parameter is cut into a part for each rank, in vectors for groups ---

    void add_buffers() {
        const std::set<std::string_view> buffers = buffer_names();
        for (const auto& [name, node] : module_) {
            if (buffers.contains(name)) objects_.add(source(0), fmt::format("model.{}", name), node);
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
        const size_t ranks = names_.model.size();
        std::vector<std::map<std::string_view, Ref>> parts(ranks);
        for (size_t r = 0; r < ranks; ++r) {
            const int file = static_cast<int>(r);
            for (const auto& [name, node] : archives_.members(file, archives_.need(file, "frozen_param_fragments"))) {
                parts[r].emplace(name, node);
            }
        }
        for (const auto& [name, shape_node] : archives_.members(0, shapes)) {
            const Dims shape = shape_of(name, shape_node);
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
            put_fragments(fmt::format("model.{}", name), shape, fragments,
                          [](const Fragment& fragment) { return fragment.partition->master; });
        }
    }

    void add_stage3() {
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
                append_end(own_ends, own.back());
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
        for (const std::vector<Parameter>& group : parameters()) {
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
                put_parameter(parameter, fragments);
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

    // --- without ZeRO: the optimizer's tensors are complete, but have numbers, not names ---

    struct Numbered {
        std::string_view name;
        Ref master = no_ref;  // no_ref: the model has the parameter itself
        Members state;
    };

    void add_whole_optimizer() {
        const Ref optimizer = archives_.find(0, "optimizer");
        if (optimizer == no_ref) return;
        const Ref nested = archives_.find(0, optimizer, "optimizer_state_dict");
        const Ref base = nested != no_ref ? nested : optimizer;
        if (archives_.find(0, base, "param_groups") == no_ref) return;
        whole_settings_ = archives_.find(0, base, "param_groups");
        const OptimizerStates states(archives_, 0, base);
        const std::set<std::string_view> buffers = buffer_names();
        std::vector<std::string_view> names;
        std::vector<Dims> shapes;
        for (const auto& [name, node] : module_) {
            const auto stored = archives_.find_tensor(0, node);
            if (!stored || aliases_.contains(name) || buffers.contains(name)) continue;
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
            if (one.master != no_ref) objects_.add(source(0), fmt::format("model.{}", one.name), one.master);
            for (const auto& [key, node] : one.state) {
                const std::string name = fmt::format("optim.state.{}.{}", one.name, key);
                if (!put_scalar(name, 0, node)) objects_.add(source(0), name, node);
            }
        }
    }

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
            put_parameter({std::string(names[i]), shapes[i]}, fragments);
            at += count;
        }
    }

    void refuse_names(bool has_masters, size_t group) {
        const std::string why = fmt::format(
            "DeepSpeed saved the optimizer's tensors without names, and their shapes do not say which parameters group "
            "{} has; save with ZeRO stage 1, or with the trained parameters in one group in the model's order",
            group);
        if (has_masters) archives_.refuse(0, "its fp32 parameters cannot be found: " + why, Code::unsupported);
        manifest_.unreadable.emplace("optim.state", why);
    }

    // --- names and values ---

    void add_aliases() {
        for (const auto& [name, target] : aliases_) {
            const std::string saved = fmt::format("model.{}", target);
            const std::string alias = fmt::format("model.{}", name);
            if (!manifest_.tensors.contains(saved)) continue;  // frozen ones may have been left out
            objects_.take_name(archives_.archive(0), alias);
            manifest_.aliases.emplace(alias, saved);
        }
    }

    void add_values() {
        const Tree& top = archives_.tree(0);
        const auto items = top.items(top.root());
        for (size_t i = 0; i < items.size(); i += 2) {
            if (!top.is(items[i], Kind::text)) {
                manifest_.unreadable.emplace("client_state", fmt::format("it has {} as a key", top.name(items[i])));
                continue;
            }
            const std::string_view key = top.as_text(items[i]);
            const Ref node = items[i + 1];
            if (is_one_of(own_keys, key) || top.is(node, Kind::none)) continue;
            const std::string prefix = key == "lr_scheduler"         ? ""
                                       : is_one_of(engine_keys, key) ? "engine."
                                                                     : "client_state.";
            objects_.add(source(0), prefix + std::string(key), node);
        }
        if (names_.optimizer.empty()) {
            add_settings(0, whole_settings_);
            add_loss_scale(0, archives_.find(0, "optimizer"));
            return;
        }
        const int file = archives_.first_optimizer();
        const Ref optimizer = archives_.need(file, "optimizer_state_dict");
        for (const std::string_view key : {"base_optimizer_state", "optimizer_state_dict"}) {
            const Ref base = archives_.find(file, optimizer, key);
            if (base != no_ref && archives_.tree(file).is(base, Kind::dict))
                add_settings(file, archives_.find(file, base, "param_groups"));
        }
        // An object: its attributes.
        const Ref scaler = archives_.find(file, optimizer, "loss_scaler");
        if (scaler != no_ref && archives_.tree(file).is(scaler, Kind::call)) {
            add_loss_scale(file, archives_.tree(file).state(scaler));
        }
    }

    void add_settings(int file, Ref groups) {
        if (groups == no_ref) return;
        size_t number = 0;
        for (const Ref group : archives_.list(file, groups)) {
            for (const auto& [key, node] : archives_.members(file, group)) {
                if (key == "params") continue;  // numbers of what has names here
                objects_.add(source(file), fmt::format("optim.param_groups.{}.{}", number, key), node);
            }
            ++number;
        }
    }

    void add_loss_scale(int file, Ref entries) {
        if (entries == no_ref || !archives_.tree(file).is(entries, Kind::dict)) return;
        for (const std::string_view key : loss_scale_keys) {
            if (const Ref found = archives_.find(file, entries, key); found != no_ref) {
                objects_.add(source(file), fmt::format("engine.loss_scaler.{}", key), found);
            }
        }
    }

    static constexpr int64_t most_padding = 64;  // elements; DeepSpeed aligns to 16 bytes

    FileSystem& files_;
    DeepSpeedArchives archives_;
    const DeepSpeedFiles& names_;
    Manifest manifest_;
    TorchContents::Tensors tensors_;
    Flattener objects_;
    Members module_;                                           // in its order
    std::map<std::string, std::string, std::less<>> aliases_;  // in the model, name -> the name that has the data
    Ref whole_settings_ = no_ref;                              // of the optimizer's groups, without ZeRO
};

}  // namespace

TorchCheckpoint open_deepspeed(FileSystem& files, const std::string& directory) {
    return DeepSpeedReader(files, directory).run();
}

}  // namespace tsr
