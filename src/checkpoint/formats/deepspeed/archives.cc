#include "checkpoint/formats/deepspeed/archives.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "checkpoint/formats/torch_dcp/reader.hpp"

namespace tsr {

using pickle::Kind;
using pickle::no_ref;
using pickle::Ref;

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

DeepSpeedArchives::Members DeepSpeedArchives::optimizer_state(int file, Ref base, size_t group, size_t of_group) const {
    const auto groups = list(file, need(file, base, "param_groups"));
    if (group >= groups.size()) refuse(file, fmt::format("its optimizer has only {} groups", groups.size()));
    const auto numbers = list(file, need(file, groups[group], "params"));
    if (of_group >= numbers.size()) {
        refuse(file, fmt::format("group {} of its optimizer has only {} tensors", group, numbers.size()));
    }
    const int64_t number = tree(file).as_int(numbers[of_group]);
    const Ref states = need(file, base, "state");
    if (!tree(file).is(states, Kind::dict)) tree(file).refuse(states, "the state of an optimizer");
    const auto items = tree(file).items(states);
    Members found;
    for (size_t i = 0; i < items.size(); i += 2) {
        if (!tree(file).is(items[i], Kind::integer) || tree(file).as_int(items[i]) != number) continue;
        found = members(file, items[i + 1]);
        break;
    }
    add_group_step(found, find(file, groups[group], step_state));
    return found;
}

void add_group_step(DeepSpeedArchives::Members& state, Ref step) {
    if (step == no_ref || state.empty()) return;
    const bool has_step = std::ranges::any_of(state, [](const auto& one) { return one.first == step_state; });
    if (!has_step) state.emplace_back(step_state, step);
}

}  // namespace tsr
