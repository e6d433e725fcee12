#include "checkpoint/formats/torch_dcp/reader.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "checkpoint/formats/torch_dcp/contents.hpp"
#include "checkpoint/formats/torch_dcp/flattener.hpp"
#include "checkpoint/model/state.hpp"
#include "checkpoint/model/value.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

using pickle::Kind;
using pickle::Ref;
using pickle::Tree;

constexpr int64_t max_value_bytes = int64_t{64} << 20;
constexpr int64_t max_all_values_bytes = int64_t{1} << 30;  // many names may share the same bytes of a file

void read_values(FileSystem& files, const std::string& directory, const DcpMetadata& metadata, Manifest& manifest) {
    std::vector<std::pair<const std::string*, const DcpItem*>> items;
    for (const auto& [name, item] : metadata.values) items.emplace_back(&name, &item);
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
        return std::pair(a.second->file, a.second->offset) < std::pair(b.second->file, b.second->offset);
    });
    int opened = -1;
    std::string path;
    std::unique_ptr<File> file;
    int64_t left = max_all_values_bytes;
    int64_t budget = least_value_memory;
    int64_t end = 0;  // in the file, of what was read
    for (const auto& [name, item] : items) {
        if (item->length > std::min(max_value_bytes, left)) {
            manifest.unreadable.emplace(
                *name, fmt::format("it is a pickle of {} bytes; at most {} per value and {} in total are supported",
                                   item->length, max_value_bytes, max_all_values_bytes));
            continue;
        }
        left -= item->length;
        if (opened != item->file) {
            path = join(directory, metadata.files[static_cast<size_t>(item->file)]);
            file = open_file(files, path, OpenMode::read);
            refuse_lfs_pointer(*file, path);
            opened = item->file;
            end = 0;
        }
        const bool is_shared = item->offset < end;  // bytes shared by several names add to the budget once
        end = std::max(end, item->offset + item->length);
        PartReader part(*file, path, item->offset, item->length);
        try {
            const TorchArchive archive(part);
            int64_t unspent = budget + (is_shared ? 0 : budget_of(archive.tree()));
            manifest.values.emplace(*name, checked_value_of(archive.tree(), archive.tree().root(), unspent));
            budget = unspent;
        } catch (const Error& error) {
            if (error.code() == Code::unsupported) {
                manifest.unreadable.emplace(*name, without_place(error, path + ": data.pkl"));
                continue;
            }
            throw Error(error.code(), fmt::format("value '{}': {}", *name, error.what()));
        }
    }
}

void add_tensors(DcpMetadata& metadata, Manifest& manifest) {
    for (const auto& [name, tensor] : metadata.tensors) {
        SavedTensor saved;
        saved.dtype = tensor.dtype;
        saved.shape = tensor.shape;
        for (const DcpChunk& chunk : tensor.chunks) saved.pieces.push_back({chunk.box, chunk.item.file});
        manifest.tensors.emplace(name, std::make_shared<const SavedTensor>(std::move(saved)));
    }
    manifest.unreadable = std::move(metadata.unreadable);
}

// The rank in "__<rank>_<number>.distcp"; -1 for other names.
int rank_of(std::string_view name) {
    int rank = -1;
    if (!name.starts_with("__") || !name.ends_with(".distcp")) return -1;
    const auto [end, error] = std::from_chars(name.data() + 2, name.data() + name.size(), rank);
    return error == std::errc{} && *end == '_' && rank >= 0 && rank < max_layout_ranks ? rank : -1;
}

}  // namespace

FileStatus status_of(FileSystem& files, const std::string& path) {
    FileStatus status;
    if (const int64_t result = files.status(path, status); result < 0) {
        throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-result));
    }
    return status;
}

Manifest manifest_of(const char* format, const FileStatus& status) {
    Manifest manifest;
    manifest.format = format;
    manifest.step = -1;
    manifest.committed = utc_text(status.modified_ns.value_or(0));
    manifest.writer = {"PyTorch", "python", ""};
    return manifest;
}

TorchCheckpoint open_torch_dcp(FileSystem& files, const std::string& directory) {
    const std::string path = join(directory, dcp_metadata_name);
    Manifest manifest = manifest_of("torch_dcp", status_of(files, path));
    DcpMetadata metadata = DcpMetadata::parse(read_text(files, path, max_dcp_metadata_bytes), path);
    std::vector<int64_t> sizes(metadata.files.size(), 0);
    const auto count = [&](const DcpItem& item) {
        int64_t& size = sizes[static_cast<size_t>(item.file)];
        size = std::max(size, item.offset + item.length);
    };
    for (const auto& [name, tensor] : metadata.tensors) {
        for (const DcpChunk& chunk : tensor.chunks) count(chunk.item);
    }
    for (const auto& [name, item] : metadata.values) count(item);
    for (size_t i = 0; i < sizes.size(); ++i) {
        manifest.files.push_back({metadata.files[i], sizes[i], 0});
        manifest.world_size = std::max(manifest.world_size, rank_of(metadata.files[i]) + 1);
    }
    add_tensors(metadata, manifest);
    read_values(files, directory, metadata, manifest);
    return {std::move(manifest), std::make_unique<TorchContents>(files, directory, std::move(metadata))};
}

TorchCheckpoint open_torch_dcp(FileSystem& files, const std::string& directory, Manifest manifest) {
    const std::string path = join(directory, dcp_metadata_name);
    std::string text = read_text(files, path, max_dcp_metadata_bytes);
    const auto told = std::find_if(manifest.files.begin(), manifest.files.end(),
                                   [](const SavedFile& file) { return file.name == dcp_metadata_name; });
    if (told == manifest.files.end() || told->size != static_cast<int64_t>(text.size()) ||
        told->header_crc != crc32c(text)) {
        throw Error(Code::corrupt, fmt::format("{} is not the file that {} lists: it was changed after the save", path,
                                               join(directory, manifest_name)));
    }
    manifest.files.erase(told);
    DcpMetadata metadata = DcpMetadata::parse(std::move(text), path);
    // In the metadata's order, as pieces have its file numbers; files without items follow.
    std::unordered_map<std::string_view, size_t> places;
    for (const std::string& name : metadata.files) places.emplace(name, places.size());
    const auto place = [&](const SavedFile& file) {
        const auto found = places.find(file.name);
        return found == places.end() ? places.size() : found->second;
    };
    std::stable_sort(manifest.files.begin(), manifest.files.end(),
                     [&](const SavedFile& a, const SavedFile& b) { return place(a) < place(b); });
    for (size_t i = 0; i < metadata.files.size(); ++i) {
        if (i < manifest.files.size() && manifest.files[i].name == metadata.files[i]) continue;
        throw Error(Code::corrupt, fmt::format("{} lists {}, but the manifest does not", path, metadata.files[i]));
    }
    add_tensors(metadata, manifest);
    return {std::move(manifest), std::make_unique<TorchContents>(files, directory, std::move(metadata))};
}

TorchCheckpoint open_torch_save(FileSystem& files, const std::string& path) {
    const FileStatus status = status_of(files, path);
    TorchCheckpoint opened{manifest_of("torch_save", status), nullptr};
    const auto file = open_file(files, path, OpenMode::read);
    PartReader part(*file, path, 0, status.size);
    TorchArchive archive(part);
    TorchContents::Tensors tensors;
    Flattener(opened.manifest, tensors).add_object({&archive, 0, status.size});
    opened.manifest.files.push_back({std::string(name_in_path(path)), status.size, 0});
    std::vector<TorchArchive> archives;
    archives.push_back(std::move(archive));
    opened.contents =
        std::make_unique<TorchContents>(files, std::vector<std::string>{path}, std::move(archives), std::move(tensors));
    return opened;
}

}  // namespace tsr
