#include "checkpoint/formats/deepspeed/reader.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/formats/deepspeed/parts.hpp"
#include "checkpoint/formats/deepspeed/stages.hpp"

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

class DeepSpeedReader {
   public:
    DeepSpeedReader(FileSystem& files, const std::string& directory)
        : files_(files), parts_(files, directory), archives_(parts_.archives), names_(archives_.names()) {}

    TorchCheckpoint run() {
        describe();
        parts_.read_module();
        if (names_.optimizer.empty()) {
            settings_ = add_stage_0(parts_);
        } else if (names_.model[0].rank >= 0) {
            add_stage_3(parts_);
        } else {
            add_stages_1_and_2(parts_);
        }
        add_aliases();
        add_values();
        auto contents = std::make_unique<TorchContents>(files_, parts_.archives.take_paths(),
                                                        parts_.archives.take_archives(), std::move(parts_.tensors));
        return {std::move(parts_.manifest), std::move(contents)};
    }

   private:
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
        parts_.manifest = manifest_of("deepspeed", newest);
        for (const auto& names : {names_.model, names_.optimizer}) {
            for (const DeepSpeedName& name : names) {
                const auto file = static_cast<int>(parts_.manifest.files.size());
                parts_.manifest.files.push_back({name.str(), archives_.size_bytes(file), 0});
            }
        }
        parts_.manifest.writer.library = "DeepSpeed";
        if (const Ref version = archives_.find(0, "ds_version");
            version != no_ref && archives_.tree(0).is(version, Kind::text)) {
            parts_.manifest.writer.version = archives_.tree(0).as_text(version).substr(0, 100);
        }
        parts_.manifest.world_size = static_cast<int>(world);
        parts_.manifest.step = std::max<int64_t>(archives_.find_int(0, "global_steps").value_or(-1), -1);
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

    // --- names and values ---

    void add_aliases() {
        for (const auto& [name, target] : parts_.aliases) {
            const std::string saved = fmt::format("model.{}", target);
            const std::string alias = fmt::format("model.{}", name);
            if (!parts_.manifest.tensors.contains(saved)) continue;  // frozen ones may have been left out
            parts_.objects.take_name(archives_.archive(0), alias);
            parts_.manifest.aliases.emplace(alias, saved);
        }
    }

    void add_values() {
        const Tree& top = archives_.tree(0);
        const auto items = top.items(top.root());
        for (size_t i = 0; i < items.size(); i += 2) {
            if (!top.is(items[i], Kind::text)) {
                parts_.manifest.unreadable.emplace("client_state",
                                                   fmt::format("it has {} as a key", top.name(items[i])));
                continue;
            }
            const std::string_view key = top.as_text(items[i]);
            const Ref node = items[i + 1];
            if (is_one_of(own_keys, key) || top.is(node, Kind::none)) continue;
            const std::string prefix = key == "lr_scheduler"         ? ""
                                       : is_one_of(engine_keys, key) ? "engine."
                                                                     : "client_state.";
            parts_.objects.add(parts_.source(0), prefix + std::string(key), node);
        }
        if (names_.optimizer.empty()) {
            add_settings(0, settings_);
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
                parts_.objects.add(parts_.source(file), fmt::format("optim.param_groups.{}.{}", number, key), node);
            }
            ++number;
        }
    }

    void add_loss_scale(int file, Ref entries) {
        if (entries == no_ref || !archives_.tree(file).is(entries, Kind::dict)) return;
        for (const std::string_view key : loss_scale_keys) {
            if (const Ref found = archives_.find(file, entries, key); found != no_ref) {
                parts_.objects.add(parts_.source(file), fmt::format("engine.loss_scaler.{}", key), found);
            }
        }
    }

    FileSystem& files_;
    DeepSpeedParts parts_;
    const DeepSpeedArchives& archives_;
    const DeepSpeedFiles& names_;
    Ref settings_ = no_ref;  // of the optimizer's groups, without ZeRO
};

}  // namespace

TorchCheckpoint open_deepspeed(FileSystem& files, const std::string& directory) {
    return DeepSpeedReader(files, directory).run();
}

}  // namespace tsr
