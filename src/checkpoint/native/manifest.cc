#include "checkpoint/native/manifest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <set>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "checkpoint/native/rank_file.hpp"
#include "checkpoint/native/root.hpp"
#include "checkpoint/state.hpp"
#include "checkpoint/torch_dcp/writer.hpp"

namespace tsr {

namespace {

constexpr std::string_view head_begins[] = {"{\"format\":\"tessera\",\"version\":1,\"sequence\":",
                                            "{\"format\":\"torch_dcp\",\"version\":1,\"sequence\":"};
constexpr std::string_view head_version = ",\"version\":1,\"sequence\":";
constexpr std::string_view head_middle = ",\"step\":";
constexpr std::string_view crc_begin = "\"crc32c\":\"";
constexpr std::string_view crc_end = "\"}\n";
constexpr size_t tail_bytes = crc_begin.size() + 8 + crc_end.size();

template <class Range, class Append>
void append_list(std::string& out, const Range& range, Append append) {
    bool first = true;
    for (const auto& item : range) {
        if (!first) out += ',';
        first = false;
        append(item);
    }
}

template <class... Args>
void add(std::string& out, fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
}

void append_dims(std::string& out, const Dims& dims) {
    out += '[';
    append_list(out, dims, [&](int64_t n) { add(out, "{}", n); });
    out += ']';
}

void append_values(std::string& out, std::string_view key, const Values& values) {
    add(out, "\"{}\":{{", key);
    append_list(out, values, [&](const auto& entry) {
        out += '\n';
        append_json_string(out, entry.first);
        out += ':';
        entry.second.dump_to(out);
    });
    out += "},\n";
}

struct LayoutKey {
    std::vector<int> mesh;
    std::vector<std::string> placements;
    auto operator<=>(const LayoutKey&) const = default;
};

LayoutKey key_of(const Layout& layout) {
    LayoutKey key;
    key.mesh.assign(layout.mesh_sizes().begin(), layout.mesh_sizes().end());
    for (const Placement& placement : layout.placements()) key.placements.push_back(placement.str());
    return key;
}

template <class T>
size_t index_in(std::vector<T>& list, const T& value) {
    const auto found = std::find(list.begin(), list.end(), value);
    if (found != list.end()) return static_cast<size_t>(found - list.begin());
    list.push_back(value);
    return list.size() - 1;
}

[[noreturn]] void bad(std::string_view why) { throw Error(Code::corrupt, std::string(why)); }

int small_int(const Json& json, int64_t least, int64_t most) {
    const int64_t value = json.as_int();
    if (value < least || value > most) bad(fmt::format("the number {} is not in {} to {}", value, least, most));
    return static_cast<int>(value);
}

// What the layouts table says, before a shape is known.
struct LayoutSpec {
    std::vector<int> mesh;
    std::vector<Placement> placements;
};

SavedTensor tensor_of(const Json& json, const std::vector<LayoutSpec>& layouts, size_t file_count, int world_size) {
    SavedTensor tensor;
    const auto dtype = dtype_from_safetensors(json.at("dtype").as_string());
    if (!dtype) bad(fmt::format("unknown dtype {}", json.at("dtype").as_string()));
    tensor.dtype = *dtype;
    tensor.shape = dims_of(json.at("shape"));
    check_shape(tensor.shape, tensor.dtype, "it");
    const auto file_number = [&](const Json& number) {
        return small_int(number, 0, static_cast<int64_t>(file_count) - 1);
    };

    if (const Json* boxes = json.find("boxes")) {
        std::vector<Box> all;
        for (const Json& entry : boxes->as_array()) {
            if (entry.as_array().size() != 3) bad("a box is [offsets, sizes, file]");
            SavedPiece piece{{dims_of(entry.as_array()[0]), dims_of(entry.as_array()[1])},
                             file_number(entry.as_array()[2])};
            if (!piece.box.inside(tensor.shape)) bad("a box lies outside the tensor");
            all.push_back(piece.box);
            tensor.pieces.push_back(piece);
        }
        // Also checks that no two overlap; with the sum below every element is there once.
        const int count = static_cast<int>(all.size());
        (void)Layout::from_boxes(tensor.shape, all, std::span(&count, 1));
        int64_t covered = 0;
        for (const Box& box : all) {
            if (__builtin_add_overflow(covered, box.numel(), &covered)) bad("its boxes are too many");
        }
        if (covered != tensor.shape.product()) bad("its boxes do not cover it once");
        return tensor;
    }

    const LayoutSpec& spec =
        layouts[static_cast<size_t>(small_int(json.at("layout"), 0, static_cast<int64_t>(layouts.size()) - 1))];
    tensor.layout = Layout::placed(tensor.shape, spec.mesh, spec.placements);
    if (tensor.layout->world_size() != world_size) bad("its mesh is not of the save's world size");
    if (const Json* split = json.find("split")) tensor.split = small_int(*split, 1, max_layout_ranks);
    const int64_t pieces = int64_t{tensor.layout->shard_count()} * tensor.split;
    if (pieces > max_layout_ranks) bad(fmt::format("{} pieces; at most {} are supported", pieces, max_layout_ranks));
    if (tensor.split > 1 && tensor.shape.ndim() == 0) bad("a scalar cannot be split");
    if (const Json* files = json.find("files")) {
        int64_t told = 0;
        for (const Json& run : files->as_array()) {
            FileRun out;
            if (run.is(Json::Kind::array)) {
                const Json::Array& numbers = run.as_array();
                if (numbers.size() < 2 || numbers.size() > 3)
                    bad("a run of files is [first, count] or [first, count, step]");
                out.first = file_number(numbers[0]);
                out.count = small_int(numbers[1], 1, INT32_MAX);
                if (numbers.size() == 3) out.step = small_int(numbers[2], -max_layout_ranks, max_layout_ranks);
            } else {
                out.first = file_number(run);
            }
            const int64_t last = out.first + (int64_t{out.count} - 1) * out.step;
            if (last < 0 || last >= static_cast<int64_t>(file_count)) bad("a run of files leaves the list of files");
            told += out.count;
            tensor.files.push_back(out);
        }
        if (told != pieces) bad(fmt::format("{} files for {} pieces", told, pieces));
    } else if (pieces > static_cast<int64_t>(file_count)) {
        // Fewer files than pieces make sense only if the pieces beyond are empty; file_of() refuses the others.
        for (int64_t piece = static_cast<int64_t>(file_count); piece < pieces; ++piece) {
            const Box shard = tensor.layout->shard(static_cast<int>(piece / tensor.split));
            if (!row_block(shard, tensor.split, static_cast<int>(piece % tensor.split)).empty()) {
                bad("it has more pieces than there are files");
            }
        }
    }
    return tensor;
}

}  // namespace

Box row_block(const Box& box, int split, int block) {
    if (split == 1) return box;
    Box cut = box;
    for (int d = 0; d < box.sizes.ndim(); ++d) {
        if (box.sizes[d] <= 1 && d + 1 < box.sizes.ndim()) continue;
        const Range rows = chunk(box.sizes[d], split, block);
        cut.offsets[d] += rows.begin;
        cut.sizes[d] = rows.end - rows.begin;
        break;
    }
    return cut;
}

int64_t row_count(const Box& box) {
    for (const int64_t size : box.sizes) {
        if (size > 1) return size;
    }
    return 1;
}

int SavedTensor::file_of(int64_t piece) const {
    if (files.empty()) return static_cast<int>(piece);
    for (const FileRun& run : files) {
        if (piece < run.count) return run.first + static_cast<int>(piece) * run.step;
        piece -= run.count;
    }
    throw Error(Code::corrupt, "a piece without a file");
}

void SavedTensor::for_each_piece(const Box& wanted, const std::function<void(const Box& box, int file)>& visit) const {
    if (!layout) {
        for (const SavedPiece& piece : pieces) {
            if (!piece.box.intersect(wanted).empty()) visit(piece.box, piece.file);
        }
        return;
    }
    layout->for_each_overlap(wanted, [&](int shard, const Box& box) {
        for (int block = 0; block < split; ++block) {
            const Box cut = row_block(box, split, block);
            if (!cut.intersect(wanted).empty()) visit(cut, file_of(int64_t{shard} * split + block));
        }
    });
}

Json dims_json(const Dims& dims) {
    Json::Array list;
    for (const int64_t n : dims) list.emplace_back(n);
    return Json(std::move(list));
}

Dims dims_of(const Json& json) {
    std::vector<int64_t> numbers;
    if (json.as_array().size() > static_cast<size_t>(max_ndim)) bad("a tensor of too many dimensions");
    for (const Json& number : json.as_array()) numbers.push_back(number.as_int());
    return Dims(numbers);
}

const SavedTensor* Manifest::find(std::string_view name) const {
    if (const auto alias = aliases.find(name); alias != aliases.end()) name = alias->second;
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : &found->second;
}

void Manifest::for_each(const std::function<void(const std::string& name, const SavedTensor& tensor,
                                                 const std::string* target)>& visit) const {
    auto alias = aliases.begin();
    const auto visit_aliases_before = [&](const std::string* name) {
        for (; alias != aliases.end() && (name == nullptr || alias->first < *name); ++alias) {
            const auto target = tensors.find(alias->second);
            visit(alias->first, target->second, &alias->second);
        }
    };
    for (const auto& [name, tensor] : tensors) {
        visit_aliases_before(&name);
        visit(name, tensor, nullptr);
    }
    visit_aliases_before(nullptr);
}

const std::string& Manifest::saved_name(std::string_view name) const {
    if (const auto alias = aliases.find(name); alias != aliases.end()) return alias->second;
    const auto found = tensors.find(name);
    if (found == tensors.end()) throw Error(Code::internal, fmt::format("'{}' was not looked for", name));
    return found->first;
}

int64_t Manifest::size_bytes() const {
    int64_t sum = 0;
    for (const SavedFile& file : files) sum += file.size;
    return sum;
}

std::string Manifest::dump() const {
    std::vector<LayoutKey> layouts;
    std::vector<std::vector<int>> meshes;
    std::string lines;
    append_list(lines, tensors, [&](const auto& entry) {
        const SavedTensor& tensor = entry.second;
        lines += '\n';
        append_json_string(lines, entry.first);
        add(lines, ":{{\"dtype\":\"{}\",\"shape\":", safetensors_name(tensor.dtype));
        append_dims(lines, tensor.shape);
        if (tensor.layout) {
            add(lines, ",\"layout\":{}", index_in(layouts, key_of(*tensor.layout)));
            if (tensor.split > 1) add(lines, ",\"split\":{}", tensor.split);
            if (!tensor.files.empty()) {
                lines += ",\"files\":[";
                append_list(lines, tensor.files, [&](const FileRun& run) {
                    if (run.count == 1) {
                        add(lines, "{}", run.first);
                    } else if (run.step == 1) {
                        add(lines, "[{},{}]", run.first, run.count);
                    } else {
                        add(lines, "[{},{},{}]", run.first, run.count, run.step);
                    }
                });
                lines += ']';
            }
        } else {
            lines += ",\"boxes\":[";
            append_list(lines, tensor.pieces, [&](const SavedPiece& piece) {
                lines += '[';
                append_dims(lines, piece.box.offsets);
                lines += ',';
                append_dims(lines, piece.box.sizes);
                add(lines, ",{}]", piece.file);
            });
            lines += ']';
        }
        lines += '}';
    });

    std::string out;
    add(out,
        "{{\"format\":\"{}\"{}{}{}{},\n\"save_id\":\"{}\",\"committed\":\"{}\",\n\"writer\":{{\"library\":", format,
        head_version, sequence, head_middle, step, save_id, committed);
    append_json_string(out, writer.library);
    out += ",\"language\":";
    append_json_string(out, writer.language);
    out += ",\"version\":";
    append_json_string(out, writer.version);
    add(out, "}},\n\"world_size\":{},\n", world_size);

    std::string layout_text;
    append_list(layout_text, layouts, [&](const LayoutKey& key) {
        add(layout_text, "{{\"mesh\":{},\"placements\":[", index_in(meshes, key.mesh));
        append_list(layout_text, key.placements, [&](const std::string& p) { add(layout_text, "\"{}\"", p); });
        layout_text += "]}";
    });
    out += "\"meshes\":[";
    append_list(out, meshes, [&](const std::vector<int>& mesh) {
        out += "{\"sizes\":[";
        append_list(out, mesh, [&](int size) { add(out, "{}", size); });
        out += "]}";
    });
    add(out, "],\n\"layouts\":[{}],\n\"files\":[", layout_text);
    append_list(out, files, [&](const SavedFile& file) {
        out += "\n[";
        append_json_string(out, file.name);
        add(out, ",{},\"{}\"]", file.size, hex8(file.header_crc));
    });
    out += "],\n\"tensors\":{";
    out += lines;
    out += "},\n\"aliases\":{";
    append_list(out, aliases, [&](const auto& alias) {
        append_json_string(out, alias.first);
        out += ':';
        append_json_string(out, alias.second);
    });
    out += "},\n";
    if (!unreadable.empty()) {
        out += "\"unreadable\":{";
        append_list(out, unreadable, [&](const auto& entry) {
            append_json_string(out, entry.first);
            out += ':';
            append_json_string(out, entry.second);
        });
        out += "},\n";
    }
    append_values(out, "values", values);
    append_values(out, "metrics", metrics);
    const uint32_t crc = crc32c(out);
    add(out, "{}{}{}", crc_begin, hex8(crc), crc_end);
    return out;
}

Manifest Manifest::parse(std::string_view text, const std::string& path) {
    try {
        if (text.size() < tail_bytes || !text.ends_with(crc_end) ||
            text.substr(text.size() - tail_bytes, crc_begin.size()) != crc_begin) {
            bad("it does not end with its checksum: it was truncated or edited");
        }
        const auto crc = from_hex8(text.substr(text.size() - crc_end.size() - 8, 8));
        if (!crc || *crc != crc32c(text.substr(0, text.size() - tail_bytes))) {
            bad("it fails its checksum: it was changed after the save");
        }
        const Json json = Json::parse(text, "it");
        const std::string& format = json.at("format").as_string();
        if (format != "tessera" && format != torch_dcp_format) bad("it is not a Tessera manifest");
        if (json.at("version").as_int() != manifest_version) {
            throw Error(Code::version, fmt::format("{} is of format version {}; this library reads version {}", path,
                                                   json.at("version").as_int(), manifest_version));
        }
        if (!parse_manifest_head(text)) bad("its beginning is not of the fixed form");
        Manifest manifest;
        manifest.format = format;
        manifest.sequence = json.at("sequence").as_int();
        manifest.step = json.at("step").as_int();
        manifest.save_id = json.at("save_id").as_string();
        manifest.committed = json.at("committed").as_string();
        const Json& writer = json.at("writer");
        manifest.writer = {writer.at("library").as_string(), writer.at("language").as_string(),
                           writer.at("version").as_string()};
        manifest.world_size = small_int(json.at("world_size"), 1, max_layout_ranks);

        std::vector<std::vector<int>> meshes;
        for (const Json& mesh : json.at("meshes").as_array()) {
            std::vector<int>& sizes = meshes.emplace_back();
            for (const Json& size : mesh.at("sizes").as_array()) sizes.push_back(small_int(size, 1, max_layout_ranks));
        }
        std::vector<LayoutSpec> layouts;
        for (const Json& layout : json.at("layouts").as_array()) {
            const int mesh = small_int(layout.at("mesh"), 0, static_cast<int64_t>(meshes.size()) - 1);
            LayoutSpec& spec = layouts.emplace_back();
            spec.mesh = meshes[static_cast<size_t>(mesh)];
            for (const Json& name : layout.at("placements").as_array()) {
                const auto placement = Placement::parse(name.as_string());
                if (!placement) bad(fmt::format("unknown placement {}", name.as_string()));
                spec.placements.push_back(*placement);
            }
        }
        std::set<std::string_view> names;
        for (const Json& entry : json.at("files").as_array()) {
            if (entry.as_array().size() != 3) bad("a file is [name, size, header checksum]");
            const std::string& name = entry.as_array()[0].as_string();
            const bool known = format == torch_dcp_format ? is_dcp_file_name(name) || name == dcp_metadata_name
                                                          : is_rank_file_name(name);
            if (!known) bad(fmt::format("'{}' is not the name of a rank file", name));
            if (!names.insert(name).second) bad(fmt::format("the file {} is listed twice", name));
            const auto header_crc = from_hex8(entry.as_array()[2].as_string());
            if (!header_crc || entry.as_array()[1].as_int() < 0) bad(fmt::format("file {}: bad numbers", name));
            manifest.files.push_back({name, entry.as_array()[1].as_int(), *header_crc});
        }
        if (format == torch_dcp_format &&
            !(json.at("tensors").as_object().empty() && json.at("aliases").as_object().empty())) {
            bad("it tells of tensors, which .metadata does");
        }
        for (const Json::Member& member : json.at("tensors").as_object()) {
            try {
                check_name(member.key, "a tensor's name");
                // This library writes them in order, and then each one's place is known without a search.
                manifest.tensors.emplace_hint(
                    manifest.tensors.end(), member.key,
                    tensor_of(member.value, layouts, manifest.files.size(), manifest.world_size));
            } catch (const Error& error) {
                bad(fmt::format("tensor '{}': {}", member.key, error.what()));
            }
        }
        for (const Json::Member& member : json.at("aliases").as_object()) {
            if (!manifest.tensors.contains(member.value.as_string()) || manifest.tensors.contains(member.key)) {
                bad(fmt::format("the alias '{}' of '{}' makes no sense", member.key, member.value.as_string()));
            }
            manifest.aliases.emplace(member.key, member.value.as_string());
        }
        const auto read_values = [&](std::string_view key, Values& out) {
            for (const Json::Member& member : json.at(key).as_object()) {
                check_value(member.value, fmt::format("value '{}'", member.key));
                out.emplace(member.key, member.value);
            }
        };
        read_values("values", manifest.values);
        read_values("metrics", manifest.metrics);
        return manifest;
    } catch (const Error& error) {
        if (error.code() == Code::version || error.code() == Code::no_memory) throw;
        throw Error(Code::corrupt, fmt::format("{}: {}", path, error.what()));
    }
}

std::optional<ManifestHead> parse_manifest_head(std::string_view text) {
    const auto* begin = std::find_if(std::begin(head_begins), std::end(head_begins),
                                     [&](std::string_view known) { return text.starts_with(known); });
    if (begin == std::end(head_begins)) return std::nullopt;
    text.remove_prefix(begin->size());
    const auto number = [&](int64_t& out) {
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
        if (error != std::errc{} || out < 0) return false;
        text.remove_prefix(static_cast<size_t>(end - text.data()));
        return true;
    };
    ManifestHead head;
    if (!number(head.sequence) || head.sequence > max_sequence || !text.starts_with(head_middle)) return std::nullopt;
    text.remove_prefix(head_middle.size());
    if (!number(head.step) || !text.starts_with(",")) return std::nullopt;
    return head;
}

std::optional<Values> parse_manifest_metrics(std::string_view tail) {
    // Strings hold no bare line break, so that this can only be the key itself.
    constexpr std::string_view key = "\n\"metrics\":";
    constexpr std::string_view end = "},\n";
    const size_t begin = tail.rfind(key);
    if (begin == std::string_view::npos || tail.size() < tail_bytes) return std::nullopt;
    std::string_view text = tail.substr(begin + key.size(), tail.size() - tail_bytes - begin - key.size());
    if (!text.ends_with(end)) return std::nullopt;
    text.remove_suffix(end.size() - 1);
    try {
        Values metrics;
        const Json json = Json::parse(text, "metrics");
        for (const Json::Member& member : json.as_object()) metrics.insert_or_assign(member.key, member.value);
        return metrics;
    } catch (const Error&) {
        return std::nullopt;  // who parses the whole says what is wrong
    }
}

}  // namespace tsr
