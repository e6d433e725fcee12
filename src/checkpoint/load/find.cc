#include "checkpoint/load/find.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"
#include "checkpoint/formats/deepspeed/files.hpp"
#include "checkpoint/formats/safetensors/files.hpp"
#include "checkpoint/root/retention.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

bool is_zip(FileSystem& files, const std::string& path) {  // written by torch.save
    return first_bytes(files, path).starts_with("PK\x03\x04");
}

Found found_best(FileSystem& files, const std::string& root) {
    if (const auto best = best_save(files, root)) return {Format::native, join(root, *best)};
    throw Error(Code::not_found,
                fmt::format("{} has no best save: its saver had no best_metric, or no save has that metric", root));
}

Found found_by_file(FileSystem& files, const std::string& path) {
    const std::string_view name = name_in_path(path);
    if (name == latest_name || name == manifest_name) return resolve_checkpoint(files, parent_of(path));
    if (name == dcp_metadata_name) return {Format::torch_dcp, parent_of(path)};
    if (is_zip(files, path)) return {Format::torch_save, path};
    if (name.ends_with(safetensors_ending) || name.ends_with(safetensors_index_ending) ||
        looks_like_safetensors(first_bytes(files, path))) {  // the hub's cache uses other names
        return {Format::safetensors, path};
    }
    refuse_lfs_pointer(first_bytes(files, path), path);
    throw Error(
        Code::not_found,
        fmt::format("{} is neither a checkpoint directory, nor a safetensors file, nor a torch.save file (a zip; "
                    "the format before PyTorch 1.6 is not supported)",
                    path));
}

[[noreturn]] void refuse_root(const std::string& path, size_t saves) {
    throw Error(Code::not_found,
                saves == 1 ? fmt::format("{} holds 1 save, which is not committed: it has no {}", path, manifest_name)
                           : fmt::format("{} holds {} saves, but none is committed: they have no {}", path, saves,
                                         manifest_name));
}

[[noreturn]] void refuse_uncommitted(FileSystem& files, const std::string& path) {
    std::string advice;
    try {
        const std::string root = parent_of(path);
        if (const auto newest = newest_save(files, root)) {
            advice = fmt::format("; the newest committed save in its root is {}", join(root, *newest));
        }
    } catch (const Error&) {
        advice.clear();
    }
    throw Error(Code::not_found,
                fmt::format("{} is not a committed checkpoint: it has no {}, so the save is still running or was "
                            "interrupted{}",
                            path, manifest_name, advice));
}

Found found_in_directory(FileSystem& files, const std::string& path) {
    if (exists(files, join(path, manifest_name))) return {Format::native, path};
    if (exists(files, join(path, dcp_metadata_name))) return {Format::torch_dcp, path};
    const std::vector<SavedStep> saves = scan_root(files, path);
    if (const auto newest = newest_save(files, path)) return {Format::native, join(path, *newest)};
    if (!saves.empty()) refuse_root(path, saves.size());

    const std::vector<std::string> names = list_directory(files, path);
    if (has_deepspeed(names)) return {Format::deepspeed, path};
    const bool has_parts = std::ranges::any_of(
        names, [](const std::string& name) { return is_rank_file_name(name) || name == writing_name; });
    if (has_parts || is_step_directory_name(name_in_path(path))) refuse_uncommitted(files, path);
    if (has_safetensors(names)) return {Format::safetensors, path};
    if (std::ranges::find(names, torch_save_file_name) != names.end()) {
        return resolve_checkpoint(files, join(path, torch_save_file_name));
    }
    if (const auto newest = newest_deepspeed(files, path, names)) return {Format::deepspeed, *newest};
    if (std::ranges::any_of(names, [](const std::string& name) { return name.ends_with(".distcp"); })) {
        throw Error(
            Code::not_found,
            fmt::format("{} has files of a PyTorch checkpoint but no {}: the save is still running, was interrupted, "
                        "or used use_collectives=False, which is not supported",
                        path, dcp_metadata_name));
    }
    throw Error(Code::not_found, fmt::format("{} holds no checkpoint", path));
}

}  // namespace

Found resolve_checkpoint(FileSystem& files, const std::string& path) {
    if (path.empty()) throw Error(Code::invalid_argument, "the path of a checkpoint is empty");
    FileStatus status;
    const int64_t found = files.status(path, status);
    const bool is_file = found == 0 && status.kind == FileStatus::Kind::file;
    if (name_in_path(path) == best_name && (found == -ENOENT || (is_file && !is_zip(files, path)))) {
        return found_best(files, parent_of(path));
    }
    if (found == -ENOENT || found == -ENOTDIR) {
        const bool is_latest = name_in_path(path) == latest_name;
        if (is_latest && exists(files, parent_of(path))) return resolve_checkpoint(files, parent_of(path));
        throw Error(Code::not_found, fmt::format("no checkpoint at {}: the path does not exist", path));
    }
    if (found < 0) throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-found));
    if (is_file) return found_by_file(files, path);
    if (status.kind == FileStatus::Kind::directory) return found_in_directory(files, path);
    throw Error(Code::not_found, fmt::format("{} is not a checkpoint directory", path));
}

}  // namespace tsr
