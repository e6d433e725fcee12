#include "checkpoint/formats/torch_dcp/writer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "base/attempt.hpp"
#include "base/crc32.hpp"
#include "base/error.hpp"
#include "base/parallel.hpp"
#include "checkpoint/formats/torch_dcp/archive_writer.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/model/state.hpp"

namespace tsr {

namespace {

// "config" {"a": 1} -> "config.a" 1. PyTorch does this to every dict before it saves or looks one up.
class Flattening {
   public:
    Flattening(const Values& values, const NameTaken& is_tensor) : all_(values), is_tensor_(is_tensor) {
        for (const auto& [name, value] : values) add(name, value);
    }
    Values take() { return std::move(out_); }

   private:
    static bool is_dict(const Json& value) { return value.is(Json::Kind::object) && value.find("~") == nullptr; }
    static bool has_dict(const Json& value) {
        if (!value.is(Json::Kind::array)) return is_dict(value) && !value.as_object().empty();
        return std::any_of(value.as_array().begin(), value.as_array().end(), has_dict);
    }
    // Also checks that the name is valid: a reader refuses metadata with invalid names.
    bool is_free(const std::string& name) const {
        return !attempt([&] { check_name(name, "a name"); }) && !all_.contains(name) && !out_.contains(name) &&
               !is_tensor_(name);
    }
    void add(const std::string& name, const Json& value) {
        std::vector<std::pair<std::string, const Json*>> parts;
        if (is_dict(value)) {
            for (const Json::Member& member : value.as_object())
                parts.emplace_back(name + "." + member.key, &member.value);
        } else if (value.is(Json::Kind::array) && has_dict(value)) {
            for (const Json& item : value.as_array())
                parts.emplace_back(fmt::format("{}.{}", name, parts.size()), &item);
        }
        // If a name is taken, the whole value stays as it is.
        if (parts.empty() ||
            !std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return is_free(part.first); })) {
            out_.insert_or_assign(name, value);
            return;
        }
        for (const auto& [part, content] : parts) add(part, *content);
    }

    const Values& all_;
    const NameTaken& is_tensor_;
    Values out_;
};

// Data with the checksums in their places.
class WithCrcs final : public ChunkSource {
   public:
    WithCrcs(const ChunkSource& data, const std::vector<CrcPlace>& places, const std::vector<uint32_t>& crcs)
        : data_(data) {
        for (size_t i = 0; i < places.size(); ++i) {
            for (const int64_t at : places[i].at) words_.emplace(at, crcs[i]);
        }
    }

    int64_t size() const override { return data_.size(); }
    const std::byte* contiguous(int64_t begin, int64_t end) const override {
        const auto word = words_.upper_bound(begin - word_bytes);
        return word == words_.end() || word->first >= end ? data_.contiguous(begin, end) : nullptr;
    }
    void copy(int64_t begin, int64_t end, std::byte* to) const override {
        data_.copy(begin, end, to);
        for (auto word = words_.upper_bound(begin - word_bytes); word != words_.end() && word->first < end; ++word) {
            for (int64_t i = 0; i < word_bytes; ++i) {  // little-endian, and the chunk may end within
                const int64_t at = word->first + i;
                if (at >= begin && at < end) to[at - begin] = static_cast<std::byte>(word->second >> (8 * i) & 0xff);
            }
        }
    }
    std::shared_ptr<std::byte> buffer() const override { return data_.buffer(); }
    void written(int64_t begin) const override { data_.written(begin); }

   private:
    static constexpr int64_t word_bytes = 4;

    const ChunkSource& data_;
    std::map<int64_t, uint32_t> words_;
};

}  // namespace

Values flattened(const Values& values, const NameTaken& is_tensor) { return Flattening(values, is_tensor).take(); }

std::string DcpFile::dump() const {
    const auto list_of = [](const std::vector<Part>& list) {
        Json::Array out;
        for (const Part& part : list) {
            out.push_back(Json(Json::Array{Json(part.name), dims_json(part.box.offsets), dims_json(part.box.sizes),
                                           Json(part.offset), Json(part.length)}));
        }
        return Json(std::move(out));
    };
    Json json;
    json.set("file", Json(Json::Array{Json(file.name), Json(file.size)}));
    json.set("parts", list_of(parts));
    json.set("values", list_of(values));
    return json.dump();
}

DcpFile DcpFile::parse(std::string_view text) {
    const Json json = Json::parse(text, "a rank's report");
    const auto list_of = [](const Json& list) {
        std::vector<Part> out;
        for (const Json& entry : list.as_array()) {
            const Json::Array& fields = entry.as_array();
            out.push_back({fields.at(0).as_string(),
                           {dims_of(fields.at(1)), dims_of(fields.at(2))},
                           fields.at(3).as_int(),
                           fields.at(4).as_int()});
        }
        return out;
    };
    DcpFile out;
    out.file.name = json.at("file").as_array().at(0).as_string();
    out.file.size = json.at("file").as_array().at(1).as_int();
    out.parts = list_of(json.at("parts"));
    out.values = list_of(json.at("values"));
    return out;
}

DcpImage make_dcp_image(const std::string& name, const std::vector<Piece>& pieces, const Values& values, int64_t begin,
                        CopyStreams* copies) {
    DcpFile out;
    std::vector<CrcPlace> crc_places;
    std::deque<std::string> texts;
    std::vector<ByteRuns::Part> runs;
    int64_t at = begin;
    const auto add_text = [&](std::string text) {
        texts.push_back(std::move(text));
        runs.push_back({std::as_bytes(std::span(texts.back()))});
    };
    const auto add_archive = [&](const std::string& object, const Piece* piece) {
        ZipWriter zip(std::string(archive_folder), at);
        begin_archive(zip, object);
        size_t entry = 0;
        CrcPlace place;
        if (piece != nullptr) {
            entry = zip.add_data(storage_entry(0), piece->size_bytes(), 0);
            const int64_t end = at - begin + zip.size_bytes();
            place = {end - piece->size_bytes(), end, {}};
            add_text(zip.take_text());
            runs.push_back({std::span(piece->data, static_cast<size_t>(piece->size_bytes())),
                            copies != nullptr ? copies->of(piece->device) : nullptr});
        }
        end_archive(zip);
        zip.finish();
        add_text(zip.take_text());
        if (piece != nullptr) {
            const auto [before, behind] = zip.crc_places(entry);
            place.at = {at - begin + before, at - begin + behind};
            crc_places.push_back(place);
        }
        const int64_t offset = at;
        at += zip.size_bytes();
        return std::pair(offset, zip.size_bytes());
    };
    for (const auto& [value_name, value] : values) {
        pickle::PickleWriter object;
        object.typed(value);
        const auto [offset, length] = add_archive(object.finish(), nullptr);
        out.values.push_back({value_name, {}, offset, length});
    }
    for (const Piece& piece : pieces) {
        pickle::PickleWriter object;
        put_tensor(object, piece.dtype, piece.box->sizes, 0);
        const auto [offset, length] = add_archive(object.finish(), &piece);
        out.parts.push_back({std::string(piece.name), *piece.box, offset, length});
    }
    ByteRuns data{std::span<const ByteRuns::Part>(runs)};
    out.file = {name, begin + data.size(), 0};
    return {std::move(out), std::move(data), std::move(texts), std::move(crc_places)};
}

std::vector<uint32_t> crcs_of(const ChunkSource& data, const std::vector<CrcPlace>& places, int threads) {
    struct Segment {
        size_t place;
        int64_t begin;
        int64_t end;
    };
    std::vector<Segment> segments;  // each within one chunk
    for (size_t i = 0; i < places.size(); ++i) {
        for (int64_t begin = places[i].begin; begin < places[i].end;) {
            const int64_t end = std::min(places[i].end, begin - begin % chunk_bytes + chunk_bytes);
            segments.push_back({i, begin, end});
            begin = end;
        }
    }
    std::vector<uint32_t> of_segments(segments.size());
    std::vector<std::shared_ptr<std::byte>> buffers(static_cast<size_t>(std::max(threads, 1)));
    run_parallel(segments.size(), threads, [&](size_t i, int worker) {
        const auto bytes = static_cast<size_t>(segments[i].end - segments[i].begin);
        const std::byte* memory = data.contiguous(segments[i].begin, segments[i].end);
        if (memory == nullptr) {  // it is on a device
            std::shared_ptr<std::byte>& buffer = buffers[static_cast<size_t>(worker)];
            if (buffer == nullptr) buffer = data.buffer();
            data.copy(segments[i].begin, segments[i].end, buffer.get());
            memory = buffer.get();
        }
        of_segments[i] = crc32(std::span(memory, bytes));
    });
    std::vector<uint32_t> crcs(places.size(), 0);
    for (size_t i = 0; i < segments.size(); ++i) {
        uint32_t& crc = crcs[segments[i].place];
        crc = crc32_joined(crc, of_segments[i], segments[i].end - segments[i].begin);
    }
    return crcs;
}

std::unique_ptr<ChunkSource> with_crcs(const ChunkSource& data, const std::vector<CrcPlace>& places,
                                       const std::vector<uint32_t>& crcs) {
    return std::make_unique<WithCrcs>(data, places, crcs);
}

void write_dcp_file(FileSystem& files, const std::string& path, const ChunkSource& data,
                    const std::vector<CrcPlace>& places, const std::vector<uint32_t>& crcs,
                    const WriteOptions& options) {
    const auto file = create_reserved(files, path, data.size());
    const WriteOptions how = files.writes_in_order() ? one_writer(options) : options;
    write_stream(*file, path, 0, *with_crcs(data, places, crcs), how, nullptr);
    finish_file(*file, path, data.size());
}

std::string dcp_metadata(const SavePlan& plan, const Aliases& aliases, const std::vector<DcpFile>& files) {
    DcpMetadata metadata;
    for (const auto& [name, tensor] : plan.tensors()) metadata.tensors[name] = {tensor->dtype, tensor->shape, {}};
    for (const DcpFile& file : files) {
        const int number = static_cast<int>(metadata.files.size());
        metadata.files.push_back(file.file.name);
        for (const DcpFile::Part& part : file.parts) {
            metadata.tensors.at(part.name).chunks.push_back({part.box, {number, part.offset, part.length}});
        }
        for (const DcpFile::Part& part : file.values) metadata.values[part.name] = {number, part.offset, part.length};
    }
    for (const auto& [name, target] : aliases) metadata.tensors[name] = metadata.tensors.at(target);
    return metadata.dump();
}

}  // namespace tsr
