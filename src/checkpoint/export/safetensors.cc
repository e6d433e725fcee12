// Tensors in Hugging Face's layout. All sizes follow from names and shapes, so rank 0 writes every header first, and
// then the ranks write the data of their batches in place.
#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/export/export_writer.hpp"
#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/formats/safetensors/files.hpp"
#include "checkpoint/formats/safetensors/header.hpp"

namespace tsr {

namespace {

struct Shard {
    std::string name;
    std::vector<ExportEntry> entries;
    std::vector<TypedBox> boxes;
    std::string header;
    int64_t data_bytes = 0;
};

std::string header_of(std::span<const ExportEntry> entries, const std::map<std::string, std::string>& tied) {
    std::string json = R"({"__metadata__":{"format":"pt")";
    for (const auto& [name, target] : tied) {
        json += ',';
        append_json_string(json, name);
        json += ':';
        append_json_string(json, target);
    }
    json += '}';
    int64_t begin = 0;
    for (const ExportEntry& entry : entries) {
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
        throw Error(Code::unsupported,
                    fmt::format("the header of {} tensors would have {} bytes, but readers accept at "
                                "most {}; write more files",
                                entries.size(), json.size(), max_header_bytes));
    }
    std::string header;
    for (size_t i = 0; i < 8; ++i) header += static_cast<char>(json.size() >> (8 * i) & 0xff);
    return header + json;
}

// Sorted by element size in each file, so that every tensor is aligned to its elements.
std::vector<Shard> cut_into_shards(const ExportSelection& selection, int64_t shard_bytes) {
    std::vector<Shard> shards(1);
    for (const ExportEntry& entry : selection.entries) {
        const int64_t size = entry.box.size_bytes();
        if (shard_bytes > 0 && shards.back().data_bytes + size > shard_bytes && !shards.back().entries.empty()) {
            shards.emplace_back();
        }
        shards.back().data_bytes += size;
        shards.back().entries.push_back(entry);
    }
    for (size_t i = 0; i < shards.size(); ++i) {
        Shard& shard = shards[i];
        shard.name = shards.size() == 1 ? std::string(safetensors_file_name)
                                        : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
        std::stable_sort(shard.entries.begin(), shard.entries.end(), [](const ExportEntry& a, const ExportEntry& b) {
            return size_of(a.box.dtype) > size_of(b.box.dtype);
        });
        std::set<std::string_view> here;
        for (const ExportEntry& entry : shard.entries) {
            shard.boxes.push_back(entry.box);
            here.insert(entry.name);
        }
        std::map<std::string, std::string> tied;
        for (const auto& [name, target] : selection.tied) {
            if (name != "format" && here.contains(target)) tied.emplace(name, target);
        }
        shard.header = header_of(shard.entries, tied);
    }
    return shards;
}

class SafetensorsExport final : public ExportWriter {
   public:
    SafetensorsExport(const Checkpoint& source, const ExportSelection& selection, std::string directory,
                      int64_t shard_bytes, FileSystem& files)
        : source_(source),
          directory_(std::move(directory)),
          files_(files),
          shards_(cut_into_shards(selection, shard_bytes)) {}

    void begin() override {
        for (const Shard& shard : shards_) {
            const std::string path = join(directory_, shard.name);
            const auto file = open_file(files_, path, OpenMode::create);
            const int64_t bytes = static_cast<int64_t>(shard.header.size()) + shard.data_bytes;
            reserve_file(*file, path, bytes);
            write_all(*file, path, std::as_bytes(std::span(shard.header)), 0);
            sync_file(*file, path);
        }
    }

    std::string write(const Share& share) override {
        int64_t batch = 0;
        AlignedBuffer memory;
        for (const Shard& shard : shards_) {
            const std::string path = join(directory_, shard.name);
            std::unique_ptr<File> file;
            std::vector<int64_t> begins;
            int64_t begin = static_cast<int64_t>(shard.header.size());
            for (const TypedBox& box : shard.boxes) {
                begins.push_back(begin);
                begin += box.size_bytes();
            }
            for_each_own_batch(shard.boxes, share, batch, [&](std::span<const BatchPart> parts, int64_t bytes) {
                if (file == nullptr) file = open_file(files_, path, OpenMode::write);
                if (memory.size() < static_cast<size_t>(bytes)) memory = AlignedBuffer(static_cast<size_t>(bytes));
                read_batch(source_, shard.entries, parts, memory.data());
                // A batch is one run of the file: what follows a box's part is the next box.
                const BatchPart& first = parts.front();
                const auto item = static_cast<int64_t>(size_of(shard.boxes[first.index].dtype));
                const int64_t offset = begins[first.index] + first.first * item;
                write_all(*file, path, memory.first(static_cast<size_t>(bytes)), offset);
                file->start_writeback(offset, bytes);
            });
            if (file != nullptr) sync_file(*file, path);
        }
        return "";
    }

    std::vector<std::string> finish(std::span<const std::string> /*reports*/) override {
        std::vector<std::string> names;
        Json::Object weight_map;
        int64_t total = 0;
        for (const Shard& shard : shards_) {
            names.push_back(shard.name);
            total += shard.data_bytes;
            for (const ExportEntry& entry : shard.entries) weight_map.push_back({entry.name, Json(shard.name)});
        }
        if (shards_.size() == 1) return names;
        std::sort(weight_map.begin(), weight_map.end(),
                  [](const Json::Member& a, const Json::Member& b) { return a.key < b.key; });
        Json metadata;
        metadata.set("total_size", total);
        Json index;
        index.set("metadata", std::move(metadata));
        index.set("weight_map", Json(std::move(weight_map)));
        names.emplace_back(safetensors_index_name);
        write_new_text(files_, join(directory_, safetensors_index_name), index.dump() + "\n");
        return names;
    }

   private:
    const Checkpoint& source_;
    std::string directory_;
    FileSystem& files_;
    std::vector<Shard> shards_;
};

}  // namespace

std::unique_ptr<ExportWriter> safetensors_export(const Checkpoint& source, const ExportSelection& selection,
                                                 const std::string& directory, int64_t shard_bytes, FileSystem& files) {
    return std::make_unique<SafetensorsExport>(source, selection, directory, shard_bytes, files);
}

}  // namespace tsr
