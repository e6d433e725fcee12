#include "checkpoint/safetensors/export.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/native/lease.hpp"
#include "checkpoint/native/rank_file.hpp"

namespace tsr {

namespace {

// A directory under another name, which goes unless it is moved to its place.
class Draft {
   public:
    Draft(FileSystem& files, std::string place) : files_(files), place_(std::move(place)) {
        while (place_.size() > 1 && place_.back() == '/') place_.pop_back();
        if (exists(files_, place_)) {
            throw Error(Code::invalid_argument, fmt::format("{} is there already; name a new directory", place_));
        }
        make_directories(files_, parent_of(place_));
        path_ = fmt::format("{}.tmp-{}", place_, random_id().substr(0, 8));
        const int64_t made = files_.make_directory(path_);
        if (made < 0) throw os_error(fmt::format("cannot create the directory {}", path_), static_cast<int>(-made));
    }
    ~Draft() {
        if (moved_) return;
        for (const std::string& name : names_) (void)files_.remove_file(join(path_, name));
        if (files_.remove_directory(path_) < 0) log::warning("could not remove {}", path_);
    }
    Draft(const Draft&) = delete;
    Draft& operator=(const Draft&) = delete;

    [[nodiscard]] std::string path_of(const std::string& name) {
        names_.push_back(name);
        return join(path_, name);
    }
    void move_to_its_place() {
        sync_directory(files_, path_);
        const int64_t result = files_.rename(path_, place_);
        if (result < 0) throw os_error(fmt::format("cannot rename {} to {}", path_, place_), static_cast<int>(-result));
        moved_ = true;
        sync_directory(files_, parent_of(place_));
    }

   private:
    FileSystem& files_;
    std::string place_;
    std::string path_;
    std::vector<std::string> names_;
    bool moved_ = false;
};

struct Entry {
    std::string source;  // its name in the checkpoint
    std::string name;
    TypedBox box;
};

// Sorted by element size, so that every tensor is aligned to its elements.
std::string header_of(std::span<const Entry> entries, const std::map<std::string, std::string>& tied) {
    std::string json = R"({"__metadata__":{"format":"pt")";
    for (const auto& [name, target] : tied) {
        json += ',';
        append_json_string(json, name);
        json += ':';
        append_json_string(json, target);
    }
    json += '}';
    int64_t begin = 0;
    for (const Entry& entry : entries) {
        json += ',';
        append_json_string(json, entry.name);
        json += fmt::format(R"(:{{"dtype":"{}","shape":[)", safetensors_name(entry.box.dtype));
        for (int d = 0; d < entry.box.box.sizes.ndim(); ++d) {
            json += fmt::format("{}{}", d > 0 ? "," : "", entry.box.box.sizes[d]);
        }
        json += fmt::format(R"(],"data_offsets":[{},{}]}})", begin, begin + entry.box.size_bytes());
        begin += entry.box.size_bytes();
    }
    json += '}';
    json.append((8 - json.size() % 8) % 8, ' ');
    if (static_cast<int64_t>(json.size()) > max_header_bytes) {
        throw Error(Code::unsupported, fmt::format("the header of {} tensors would have {} bytes, and readers take at "
                                                   "most {}; write more files",
                                                   entries.size(), json.size(), max_header_bytes));
    }
    std::string header;
    for (size_t i = 0; i < 8; ++i) header += static_cast<char>(json.size() >> (8 * i) & 0xff);
    return header + json;
}

std::vector<std::vector<Entry>> cut_into_files(std::vector<Entry> entries, int64_t shard_bytes) {
    std::vector<std::vector<Entry>> shards(1);
    int64_t bytes = 0;
    for (Entry& entry : entries) {
        const int64_t size = entry.box.size_bytes();
        if (shard_bytes > 0 && bytes + size > shard_bytes && !shards.back().empty()) {
            shards.emplace_back();
            bytes = 0;
        }
        bytes += size;
        shards.back().push_back(std::move(entry));
    }
    for (std::vector<Entry>& shard : shards) {
        std::stable_sort(shard.begin(), shard.end(),
                         [](const Entry& a, const Entry& b) { return size_of(a.box.dtype) > size_of(b.box.dtype); });
    }
    return shards;
}

}  // namespace

Exported export_safetensors(const Checkpoint& source, const std::string& directory, const ExportOptions& options,
                            FileSystem& files) {
    const Manifest& manifest = source.manifest();
    Exported exported;
    std::vector<Entry> entries;
    std::map<std::string, std::string> tied;
    std::map<std::string, std::string> written;  // a saved name -> the name under which it is written
    for (const std::string& name : source.names()) {
        if (!name.starts_with(options.under) || name.size() == options.under.size()) continue;
        const std::string to = name.substr(options.under.size());
        const auto [first, is_new] = written.emplace(manifest.saved_name(name), to);
        if (!is_new) {
            if (to != "format") tied.emplace(to, first->second);
            continue;
        }
        const SavedTensor& tensor = *manifest.find(name);
        entries.push_back({name, to, {Box::whole(tensor.shape), tensor.dtype}});
        exported.size_bytes += tensor.size_bytes();
    }
    if (entries.empty()) {
        throw Error(Code::invalid_argument,
                    options.under.empty()
                        ? fmt::format("{} holds no tensor", source.path())
                        : fmt::format("no tensor of {} begins with '{}'; `tessera ckpt tree` lists all", source.path(),
                                      options.under));
    }
    for (const auto& [name, value] : manifest.values) exported.left_out.push_back(name);
    exported.tensor_count = static_cast<int64_t>(entries.size());

    Draft draft(files, directory);
    const std::vector<std::vector<Entry>> shards = cut_into_files(std::move(entries), options.shard_bytes);
    Json::Object weight_map;
    for (size_t i = 0; i < shards.size(); ++i) {
        const std::string name = shards.size() == 1
                                     ? std::string("model.safetensors")
                                     : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
        std::map<std::string, std::string> tied_here;
        std::vector<StreamedPart> parts;
        int64_t bytes = 0;
        std::set<std::string_view> here;
        for (const Entry& entry : shards[i]) {
            parts.push_back({entry.source, entry.box});
            bytes += entry.box.size_bytes();
            here.insert(entry.name);
            weight_map.push_back({entry.name, Json(name)});
        }
        for (const auto& [alias, target] : tied) {
            if (here.contains(target)) tied_here.emplace(alias, target);
        }
        const std::string header = header_of(shards[i], tied_here);
        StreamedFile file(files, draft.path_of(name), static_cast<int64_t>(header.size()), bytes);
        file.append(source, parts, options.progress);
        file.finish(header);
        exported.files.push_back(name);
    }
    if (shards.size() > 1) {
        std::sort(weight_map.begin(), weight_map.end(),
                  [](const Json::Member& a, const Json::Member& b) { return a.key < b.key; });
        Json metadata;
        metadata.set("total_size", exported.size_bytes);
        Json index;
        index.set("metadata", std::move(metadata));
        index.set("weight_map", Json(std::move(weight_map)));
        const std::string name = "model.safetensors.index.json";
        write_new_text(files, draft.path_of(name), index.dump() + "\n");
        exported.files.push_back(name);
    }
    draft.move_to_its_place();
    return exported;
}

}  // namespace tsr
