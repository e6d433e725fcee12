#include "checkpoint/formats/deepspeed/archives.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "checkpoint/formats/torch_dcp/reader.hpp"

namespace tsr {

using pickle::Kind;
using pickle::no_ref;
using pickle::Ref;

namespace {

constexpr size_t most_entries = 256;  // of a group of an optimizer, or of what it keeps for a tensor

}  // namespace

DeepSpeedArchives::DeepSpeedArchives(FileSystem& files, const std::string& directory)
    : names_(find_deepspeed(files, directory)) {
    for (const DeepSpeedName& name : names_.model) open(files, directory, name);
    for (const DeepSpeedName& name : names_.optimizer) open(files, directory, name);
}

void DeepSpeedArchives::open(FileSystem& files, const std::string& directory, const DeepSpeedName& name) {
    const std::string path = join(directory, name.str());
    const FileStatus status = status_of(files, path);
    const auto file = open_file(files, path, OpenMode::read);
    refuse_lfs_pointer(*file, path);
    PartReader part(*file, path, 0, status.size);
    TorchArchive archive(part);
    // torch.save names the archive's folder after the file that it wrote.
    std::string_view folder = archive.zip().folder();
    if (!folder.empty()) folder.remove_suffix(1);
    const auto written = DeepSpeedName::parse(folder);
    if (written && *written != name) {
        throw Error(Code::corrupt, fmt::format("{} was written as {}: files of ranks were renamed or exchanged", path,
                                               written->str()));
    }
    if (!archive.tree().is(archive.tree().root(), Kind::dict)) {
        throw Error(Code::corrupt, fmt::format("{} holds no dict: DeepSpeed did not write it", path));
    }
    modified_ns_ = std::max(modified_ns_, status.modified_ns.value_or(0));
    paths_.push_back(path);
    sizes_.push_back(status.size);
    archives_.push_back(std::move(archive));
}

void DeepSpeedArchives::refuse(int file, std::string_view why, Code code) const {
    throw Error(code, fmt::format("{}: {}", path(file), why));
}

Ref DeepSpeedArchives::find(int file, Ref dict, std::string_view key) const {
    if (!tree(file).is(dict, Kind::dict)) tree(file).refuse(dict, fmt::format("a dict with '{}'", key));
    const Ref found = tree(file).find(dict, key);
    return found != no_ref && tree(file).is(found, Kind::none) ? no_ref : found;
}

Ref DeepSpeedArchives::need(int file, Ref dict, std::string_view key) const {
    const Ref found = find(file, dict, key);
    if (found == no_ref) refuse(file, fmt::format("it has no '{}': DeepSpeed did not write it", key));
    return found;
}

std::optional<int64_t> DeepSpeedArchives::find_int(int file, std::string_view key) const {
    const Ref found = find(file, key);
    if (found == no_ref) return std::nullopt;
    return tree(file).as_int(found);
}

std::span<const Ref> DeepSpeedArchives::list(int file, Ref node) const {
    if (!tree(file).is(node, Kind::list) && !tree(file).is(node, Kind::tuple)) tree(file).refuse(node, "a list");
    return tree(file).items(node);
}

DeepSpeedArchives::Members DeepSpeedArchives::members(int file, Ref dict) const {
    if (!tree(file).is(dict, Kind::dict)) tree(file).refuse(dict, "a dict");
    const auto items = tree(file).items(dict);
    Members found;
    for (size_t i = 0; i < items.size(); i += 2) found.emplace_back(tree(file).as_text(items[i]), items[i + 1]);
    return found;
}

DeepSpeedArchives::Members DeepSpeedArchives::state_members(int file, Ref dict) const {
    if (tree(file).is(dict, Kind::dict) && tree(file).items(dict).size() > 2 * most_entries) {
        refuse(file, fmt::format("its optimizer keeps more than {} entries for a tensor", most_entries));
    }
    return members(file, dict);
}

StoredTensor DeepSpeedArchives::flat_tensor(int file, Ref node) const {
    if (!TorchArchive::is_tensor(tree(file), node)) tree(file).refuse(node, "a tensor");
    StoredTensor stored = archive(file).tensor(node);
    if (stored.shape.ndim() != 1 || (stored.shape[0] > 1 && stored.strides[0] != 1)) {
        refuse(file, fmt::format("a partition has the shape {}, not one dimension", stored.shape.str()));
    }
    return stored;
}

std::optional<StoredTensor> DeepSpeedArchives::find_tensor(int file, Ref node) const {
    if (!TorchArchive::is_tensor(tree(file), node)) return std::nullopt;
    try {
        return archive(file).tensor(node);
    } catch (const Error& error) {
        if (error.code() != Code::unsupported) throw;
        return std::nullopt;
    }
}

OptimizerStates::OptimizerStates(const DeepSpeedArchives& archives, int file, Ref optimizer)
    : archives_(archives), file_(file) {
    const pickle::Tree& tree = archives.tree(file);
    for (const Ref group : archives.list(file, archives.need(file, optimizer, "param_groups"))) {
        // Many may be the same, and each is searched.
        if (!tree.is(group, Kind::dict) || tree.items(group).size() > 2 * most_entries) {
            archives.refuse(file, "a group of its optimizer is not a dict, or is too large");
        }
        const Ref numbers = archives.need(file, group, "params");
        groups_.push_back({archives.list(file, numbers), archives.find(file, group, step_state)});
    }
    const Ref states = archives.need(file, optimizer, "state");
    if (!tree.is(states, Kind::dict)) tree.refuse(states, "the state of an optimizer");
    const auto items = tree.items(states);
    for (size_t i = 0; i < items.size(); i += 2) {
        if (tree.is(items[i], Kind::integer)) states_.emplace(tree.as_int(items[i]), items[i + 1]);
    }
}

DeepSpeedArchives::Members OptimizerStates::state(size_t group, size_t of_group) const {
    if (group >= groups_.size() || of_group >= groups_[group].numbers.size()) {
        archives_.refuse(file_, fmt::format("its optimizer has no tensor {} in group {}", of_group, group));
    }
    const auto found = states_.find(archives_.tree(file_).as_int(groups_[group].numbers[of_group]));
    if (found == states_.end()) return {};
    DeepSpeedArchives::Members state = archives_.state_members(file_, found->second);
    add_group_step(state, groups_[group].step);
    return state;
}

void add_group_step(DeepSpeedArchives::Members& state, Ref step) {
    if (step == no_ref || state.empty()) return;
    const bool has_step = std::ranges::any_of(state, [](const auto& one) { return one.first == step_state; });
    if (!has_step) state.emplace_back(step_state, step);
}

}  // namespace tsr
