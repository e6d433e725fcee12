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
constexpr int64_t least_memory = int64_t{64} << 20;         // for values and names, whatever their pickles' size
constexpr int max_names_depth = 64;

int64_t budget_of(const Tree& tree) { return static_cast<int64_t>(tree.size_bytes()) * value_bytes_per_byte; }

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

// The message without the file's name, which the caller adds.
std::string without_place(const Error& error, const std::string& place) {
    std::string_view why = error.what();
    if (why.starts_with(place + ": ")) why.remove_prefix(place.size() + 2);
    return std::string(why);
}

// A typed value that is valid in a manifest.
Json checked_value_of(const Tree& tree, Ref node, int64_t& budget) {
    Json value = value_of(tree, node, budget);
    try {
        check_value(value, "the object");
    } catch (const Error& error) {
        throw Error(Code::unsupported, fmt::format("{}: {}", tree.what(), error.what()));
    }
    return value;
}

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
    int64_t budget = least_memory;
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

// Takes the object of a torch.save file apart into names.
class Flattener {
   public:
    Flattener(const TorchArchive& archive, int64_t file_bytes, Manifest& manifest, TorchContents::Tensors& tensors)
        : archive_(archive),
          tree_(archive.tree()),
          file_bytes_(file_bytes),
          manifest_(manifest),
          tensors_(tensors),
          budget_(least_memory + budget_of(archive.tree())) {}

    void run() { add("", tree_.root(), 0); }

   private:
    // Whether it is taken apart: dicts always, lists and tuples depending on their contents.
    bool has_parts(Ref node, int depth) {
        if (--budget_ < 0 || depth > max_names_depth) return false;
        if (TorchArchive::is_tensor(tree_, node) || tree_.is(node, Kind::dict)) return true;
        if (!tree_.is(node, Kind::list) && !tree_.is(node, Kind::tuple)) return false;
        const auto items = tree_.items(node);
        return std::any_of(items.begin(), items.end(), [&](Ref item) { return has_parts(item, depth + 1); });
    }

    using Parts = std::vector<std::pair<std::string, Ref>>;

    // Memory taken, without the names.
    static constexpr int64_t node_bytes = sizeof(std::string) + 48;
    static constexpr int64_t name_bytes = node_bytes + sizeof(Parts::value_type);
    static constexpr int64_t value_bytes = node_bytes + sizeof(Json);
    static constexpr int64_t tensor_bytes =
        2 * node_bytes + sizeof(SavedTensor) + sizeof(SavedPiece) + sizeof(TorchContents::Tensor) + sizeof(TorchPiece);

    void add(const std::string& name, Ref node, int depth) {
        Parts parts;
        const std::string why = TorchArchive::is_tensor(tree_, node) ? "" : take_apart(name, node, depth, parts);
        if (!why.empty() && depth == 0) throw Error(Code::unsupported, fmt::format("{}: {}", tree_.what(), why));
        if (!why.empty() || parts.empty()) return add_leaf(name, node, why);
        for (const auto& [part_name, part] : parts) add(part_name, part, depth + 1);
    }

    // Adds the children to `parts` if each can have its own name; otherwise returns the reason.
    std::string take_apart(const std::string& name, Ref node, int depth, Parts& parts) {
        const std::string begin = name.empty() ? "" : name + ".";
        const auto put = [&](const std::string& key, Ref part) {
            // A key may be long, and shared by many.
            spend(name_bytes + 2 * static_cast<int64_t>(begin.size() + key.size()));
            parts.emplace_back(begin + key, part);
        };
        if (tree_.is(node, Kind::dict)) {
            const auto items = tree_.items(node);
            for (size_t i = 0; i < items.size(); i += 2) {
                const auto key = key_of(items[i]);
                if (!key) return fmt::format("a dict has {} as a key", tree_.name(items[i]));
                put(*key, items[i + 1]);
            }
        } else if ((tree_.is(node, Kind::list) || tree_.is(node, Kind::tuple)) && has_parts(node, depth)) {
            for (const Ref item : tree_.items(node)) put(std::to_string(parts.size()), item);
        }
        if (!parts.empty() && depth >= max_names_depth) return "it is nested too deeply";
        for (const auto& [part, item] : parts) {
            try {
                check_name(part, "a name");
            } catch (const Error& error) {
                return error.what();
            }
            if (names_.contains(part)) return fmt::format("two objects have the name '{}'", part);
        }
        for (const auto& [part, item] : parts) {
            if (!names_.insert(part).second) return fmt::format("two objects have the name '{}'", part);
        }
        return "";
    }

    void spend(int64_t count) {
        budget_ -= count;
        if (budget_ < 0) {
            throw Error(Code::unsupported, fmt::format("{}: the object is far larger than its file", tree_.what()));
        }
    }

    std::optional<std::string> key_of(Ref key) const {
        if (tree_.is(key, Kind::text)) return std::string(tree_.as_text(key));
        if (tree_.is(key, Kind::integer)) return std::to_string(tree_.as_int(key));
        if (tree_.is(key, Kind::boolean)) return tree_.as_bool(key) ? "True" : "False";
        if (tree_.is(key, Kind::none)) return "None";
        return std::nullopt;
    }

    // `why` is the reason if it should have been taken apart but could not.
    void add_leaf(const std::string& given, Ref node, const std::string& why) {
        const bool is_tensor = TorchArchive::is_tensor(tree_, node);
        const std::string name = !given.empty() ? given : is_tensor ? "tensor" : "value";
        spend((is_tensor ? tensor_bytes : value_bytes) + 2 * static_cast<int64_t>(name.size()));
        try {
            if (!is_tensor) {
                manifest_.values.emplace(name, checked_value_of(tree_, node, budget_));
                return;
            }
            const StoredTensor stored = archive_.tensor(node);
            SavedTensor saved;
            saved.dtype = stored.dtype;
            saved.shape = stored.shape;
            if (stored.shape.product() > 0) {
                const Box whole = Box::whole(stored.shape);
                saved.pieces.push_back({whole, 0});
                tensors_[name] = {stored.dtype, {{whole, {0, 0, file_bytes_}, node, {}}}};
            }
            manifest_.tensors.emplace(name, std::make_shared<const SavedTensor>(std::move(saved)));
        } catch (const Error& error) {
            if (error.code() != Code::unsupported) throw;
            manifest_.unreadable.emplace(name, why.empty() ? without_place(error, tree_.what()) : why);
        }
    }

    const TorchArchive& archive_;
    const Tree& tree_;
    int64_t file_bytes_;
    Manifest& manifest_;
    TorchContents::Tensors& tensors_;
    std::set<std::string> names_;  // found so far
    int64_t budget_;
};

}  // namespace

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
    Flattener(archive, status.size, opened.manifest, tensors).run();
    opened.manifest.files.push_back({std::string(name_in_path(path)), status.size, 0});
    opened.contents = std::make_unique<TorchContents>(files, path, std::move(archive), std::move(tensors));
    return opened;
}

}  // namespace tsr
