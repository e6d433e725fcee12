#include "checkpoint/model/manifest.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/brief.hpp"
#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/json_view.hpp"
#include "checkpoint/model/state.hpp"

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

void append_number(std::string& out, uint64_t number) {
    char digits[24];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

void append_dims(std::string& out, const Dims& dims) {
    out += '[';
    append_list(out, dims, [&](int64_t n) { append_number(out, static_cast<uint64_t>(n)); });
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

// Numbers layouts as they come. Neighbours mostly share one.
class LayoutNumbers {
   public:
    size_t of(const Layout& layout) {
        const bool as_before = last_ != nullptr && std::ranges::equal(last_->mesh_sizes(), layout.mesh_sizes()) &&
                               std::ranges::equal(last_->placements(), layout.placements());
        if (!as_before) number_ = index_in(keys_, key_of(layout));
        last_ = &layout;
        return number_;
    }
    [[nodiscard]] const std::vector<LayoutKey>& keys() const { return keys_; }

   private:
    std::vector<LayoutKey> keys_;
    const Layout* last_ = nullptr;
    size_t number_ = 0;
};

[[noreturn]] void bad(std::string_view why) { throw Error(Code::corrupt, std::string(why)); }

std::string shown(std::string_view text) { return brief(text, max_name_bytes); }  // for a message

int small_int(JsonView json, int64_t least, int64_t most) {
    const int64_t value = json.as_int();
    if (value < least || value > most) bad(fmt::format("{} is out of range [{}, {}]", value, least, most));
    return static_cast<int>(value);
}

// The items of a list of `least` to `most` (up to 3) items; `what` is the error otherwise.
struct Items {
    std::array<std::optional<JsonView>, 3> items;
    size_t count = 0;
    Items(JsonView list, size_t least, size_t most, const char* what) {
        list.for_each_item([&](JsonView item) {
            if (count < most) items[count] = item;
            ++count;
        });
        if (count < least || count > most) bad(what);
    }
    JsonView operator[](size_t i) const { return *items[i]; }
};

Dims dims_of(JsonView json) {
    std::array<int64_t, max_ndim> numbers{};
    size_t count = 0;
    json.for_each_item([&](JsonView number) {
        if (count == numbers.size()) bad("a tensor has too many dimensions");
        numbers[count++] = number.as_int();
    });
    return Dims(std::span(numbers).first(count));
}

// The tables that precede the tensors.
struct Tables {
    std::vector<Layout> layouts;  // of a placeholder shape in which each dimension may be cut
    int64_t file_count = 0;
    int world_size = 1;
};

void take_layouts(JsonView meshes, JsonView layouts, Tables& tables) {
    std::vector<std::vector<int>> sizes;
    meshes.for_each_item([&](JsonView mesh) {
        std::vector<int>& of_mesh = sizes.emplace_back();
        mesh.at<1>({"sizes"})[0].for_each_item(
            [&](JsonView size) { of_mesh.push_back(small_int(size, 1, max_layout_ranks)); });
    });
    layouts.for_each_item([&](JsonView layout) {
        const auto [mesh, names] = layout.at<2>({"mesh", "placements"});
        std::vector<Placement> placements;
        names.for_each_item([&](JsonView name) {
            const auto placement = Placement::parse(name.as_string());
            if (!placement) bad(fmt::format("unknown placement {}", shown(name.as_string())));
            placements.push_back(*placement);
        });
        const int number = small_int(mesh, 0, static_cast<int64_t>(sizes.size()) - 1);
        tables.layouts.push_back(
            Layout::placed(Dims{0, 0, 0, 0, 0, 0, 0, 0}, sizes[static_cast<size_t>(number)], placements));
    });
}

std::vector<SavedFile> files_of(JsonView json, bool is_dcp) {
    std::vector<SavedFile> files;
    std::set<std::string_view> names;
    json.for_each_item([&](JsonView entry) {
        const Items fields(entry, 3, 3, "expected a file as [name, size, header checksum]");
        const std::string name(fields[0].as_string());
        const bool known = is_dcp ? is_dcp_file_name(name) || name == dcp_metadata_name : is_rank_file_name(name);
        if (!known) bad(fmt::format("'{}' is not the name of a rank file", shown(name)));
        if (!names.insert(fields[0].as_string()).second) bad(fmt::format("the file {} is listed twice", name));
        const auto header_crc = from_hex8(fields[2].as_string());
        if (!header_crc || fields[1].as_int() < 0) bad(fmt::format("file {} has an invalid size or checksum", name));
        files.push_back({name, fields[1].as_int(), *header_crc});
    });
    return files;
}

FileRun run_of(JsonView json, const Tables& tables) {
    const auto file_number = [&](JsonView number) { return small_int(number, 0, tables.file_count - 1); };
    FileRun run;
    if (json.is(Json::Kind::array)) {
        const Items numbers(json, 2, 3, "expected a run of files as [first, count] or [first, count, step]");
        run.first = file_number(numbers[0]);
        run.count = small_int(numbers[1], 1, INT32_MAX);
        if (numbers.count == 3) run.step = small_int(numbers[2], -max_layout_ranks, max_layout_ranks);
    } else {
        run.first = file_number(json);
    }
    const int64_t last = run.first + (int64_t{run.count} - 1) * run.step;
    if (last < 0 || last >= tables.file_count) bad("a run of files exceeds the list of files");
    return run;
}

void take_boxes(JsonView json, const Tables& tables, SavedTensor& tensor) {
    std::vector<Box> all;
    json.for_each_item([&](JsonView entry) {
        const Items parts(entry, 3, 3, "expected a box as [offsets, sizes, file]");
        SavedPiece piece{{dims_of(parts[0]), dims_of(parts[1])}, small_int(parts[2], 0, tables.file_count - 1)};
        if (!piece.box.inside(tensor.shape)) bad("a box is outside the tensor");
        all.push_back(piece.box);
        tensor.pieces.push_back(piece);
    });
    // Also checks that no two overlap; with the sum below every element is there once.
    const int count = static_cast<int>(all.size());
    (void)Layout::from_boxes(tensor.shape, all, std::span(&count, 1));
    int64_t covered = 0;
    for (const Box& box : all) {
        if (__builtin_add_overflow(covered, box.numel(), &covered)) bad("it has too many boxes");
    }
    if (covered != tensor.shape.product()) bad("its boxes do not cover it exactly once");
}

JsonView needed(const std::optional<JsonView>& view, std::string_view key) {
    if (!view) bad(fmt::format("the key \"{}\" is missing", key));
    return *view;
}

// Shares equal records: regular tensors that differ only in name are many, but few differ in more.
class Shared {
   public:
    std::shared_ptr<const SavedTensor> operator()(SavedTensor tensor, int layout) {
        key_.clear();
        const auto add = [&](int64_t number) { key_.append(reinterpret_cast<const char*>(&number), sizeof number); };
        add(static_cast<int64_t>(tensor.dtype));
        add(layout);
        add(tensor.split);
        add(tensor.shape.ndim());
        for (const int64_t size : tensor.shape) add(size);
        for (const FileRun& run : tensor.files) {
            for (const int number : {run.first, run.count, run.step}) add(number);
        }
        auto& known = known_[key_];
        if (known == nullptr) known = std::make_shared<const SavedTensor>(std::move(tensor));
        return known;
    }

   private:
    std::unordered_map<std::string, std::shared_ptr<const SavedTensor>> known_;
    std::string key_;
};

std::shared_ptr<const SavedTensor> tensor_of(JsonView json, const Tables& tables, Shared& shared) {
    const auto [dtype_name, shape, boxes, layout, split, files] =
        json.find<6>({"dtype", "shape", "boxes", "layout", "split", "files"});
    SavedTensor tensor;
    const auto dtype = dtype_from_safetensors(needed(dtype_name, "dtype").as_string());
    if (!dtype) bad(fmt::format("unknown dtype {}", shown(dtype_name->as_string())));
    tensor.dtype = *dtype;
    tensor.shape = dims_of(needed(shape, "shape"));
    check_shape(tensor.shape, tensor.dtype, "it");
    if (tables.file_count == 0) bad("the save has no file to hold it");  // even a tensor without elements is in a file
    if (boxes) {
        take_boxes(*boxes, tables, tensor);
        return std::make_shared<const SavedTensor>(std::move(tensor));
    }

    const int number = small_int(needed(layout, "layout"), 0, static_cast<int64_t>(tables.layouts.size()) - 1);
    tensor.layout = tables.layouts[static_cast<size_t>(number)].of_shape(tensor.shape);
    if (tensor.layout->world_size() != tables.world_size) bad("the size of its mesh is not the save's world size");
    if (split) tensor.split = small_int(*split, 1, max_layout_ranks);
    const int64_t pieces = int64_t{tensor.layout->shard_count()} * tensor.split;
    if (pieces > max_layout_ranks)
        bad(fmt::format("it has {} pieces; at most {} are supported", pieces, max_layout_ranks));
    if (tensor.split > 1 && tensor.shape.ndim() == 0) bad("a scalar cannot be split");
    if (files) {
        int64_t told = 0;
        files->for_each_item([&](JsonView run) {
            tensor.files.push_back(run_of(run, tables));
            told += tensor.files.back().count;
        });
        if (told != pieces) bad(fmt::format("it has {} files for {} pieces", told, pieces));
    } else if (pieces > tables.file_count && tensor.shape.product() > 0) {
        // Fewer files than pieces make sense only if the pieces beyond are empty; file_of() refuses the others.
        const int last = tensor.layout->last_shard();
        const int64_t block = last_chunk(row_count(tensor.layout->shard(last)), tensor.split);
        if (int64_t{last} * tensor.split + block >= tables.file_count) bad("it has more pieces than there are files");
    }
    return shared(std::move(tensor), number);
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
    throw Error(Code::corrupt, "a piece has no file");
}

void SavedTensor::for_each_piece(const Box& wanted, FunctionRef<void(const Box& box, int file)> visit) const {
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
    if (json.as_array().size() > static_cast<size_t>(max_ndim)) bad("a tensor has too many dimensions");
    std::vector<int64_t> numbers;
    for (const Json& number : json.as_array()) numbers.push_back(number.as_int());
    return Dims(numbers);
}

const SavedTensor* Manifest::find(std::string_view name) const {
    if (const auto alias = aliases.find(name); alias != aliases.end()) name = alias->second;
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : found->second.get();
}

void Manifest::for_each(
    FunctionRef<void(const std::string& name, const SavedTensor& tensor, const std::string* target)> visit) const {
    auto alias = aliases.begin();
    const auto visit_aliases_before = [&](const std::string* name) {
        for (; alias != aliases.end() && (name == nullptr || alias->first < *name); ++alias) {
            const auto target = tensors.find(alias->second);
            visit(alias->first, *target->second, &alias->second);
        }
    };
    for (const auto& [name, tensor] : tensors) {
        visit_aliases_before(&name);
        visit(name, *tensor, nullptr);
    }
    visit_aliases_before(nullptr);
}

const std::string& Manifest::saved_name(std::string_view name) const {
    if (const auto alias = aliases.find(name); alias != aliases.end()) return alias->second;
    const auto found = tensors.find(name);
    if (found == tensors.end()) throw Error(Code::internal, fmt::format("'{}' is neither a tensor nor an alias", name));
    return found->first;
}

int64_t Manifest::size_bytes() const {
    int64_t sum = 0;
    for (const SavedFile& file : files) sum += file.size;
    return sum;
}

namespace {

void append_layouts(std::string& out, const LayoutNumbers& layouts) {
    std::vector<std::vector<int>> meshes;
    std::string text;
    append_list(text, layouts.keys(), [&](const LayoutKey& key) {
        add(text, "{{\"mesh\":{},\"placements\":[", index_in(meshes, key.mesh));
        append_list(text, key.placements, [&](const std::string& p) { add(text, "\"{}\"", p); });
        text += "]}";
    });
    out += "\"meshes\":[";
    append_list(out, meshes, [&](const std::vector<int>& mesh) {
        out += "{\"sizes\":[";
        append_list(out, mesh, [&](int size) { add(out, "{}", size); });
        out += "]}";
    });
    add(out, "],\n\"layouts\":[{}],\n", text);
}

void append_run(std::string& out, const FileRun& run) {
    if (run.count == 1) {
        add(out, "{}", run.first);
    } else if (run.step == 1) {
        add(out, "[{},{}]", run.first, run.count);
    } else {
        add(out, "[{},{},{}]", run.first, run.count, run.step);
    }
}

void append_tensor(std::string& out, std::string_view name, const SavedTensor& tensor, LayoutNumbers& layouts) {
    out += '\n';
    append_json_string(out, name);
    out += ":{\"dtype\":\"";
    out += safetensors_name(tensor.dtype);
    out += "\",\"shape\":";
    append_dims(out, tensor.shape);
    if (tensor.layout) {
        out += ",\"layout\":";
        append_number(out, layouts.of(*tensor.layout));
        if (tensor.split > 1) add(out, ",\"split\":{}", tensor.split);
        if (!tensor.files.empty()) {
            out += ",\"files\":[";
            append_list(out, tensor.files, [&](const FileRun& run) { append_run(out, run); });
            out += ']';
        }
    } else {
        out += ",\"boxes\":[";
        append_list(out, tensor.pieces, [&](const SavedPiece& piece) {
            out += '[';
            append_dims(out, piece.box.offsets);
            out += ',';
            append_dims(out, piece.box.sizes);
            add(out, ",{}]", piece.file);
        });
        out += ']';
    }
    out += '}';
}

void append_strings(std::string& out, std::string_view key,
                    const std::map<std::string, std::string, std::less<>>& strings) {
    add(out, "\"{}\":{{", key);
    append_list(out, strings, [&](const auto& entry) {
        append_json_string(out, entry.first);
        out += ':';
        append_json_string(out, entry.second);
    });
    out += "},\n";
}

}  // namespace

std::string Manifest::dump() const {
    LayoutNumbers layouts;
    for (const auto& [name, tensor] : tensors) {
        if (tensor->layout) (void)layouts.of(*tensor->layout);
    }
    std::string out;
    out.reserve(tensors.size() * 80);
    add(out,
        "{{\"format\":\"{}\"{}{}{}{},\n\"save_id\":\"{}\",\"committed\":\"{}\",\n\"writer\":{{\"library\":", format,
        head_version, sequence, head_middle, step, save_id, committed);
    append_json_string(out, writer.library);
    out += ",\"language\":";
    append_json_string(out, writer.language);
    out += ",\"version\":";
    append_json_string(out, writer.version);
    add(out, "}},\n\"world_size\":{},\n", world_size);
    append_layouts(out, layouts);
    out += "\"files\":[";
    append_list(out, files, [&](const SavedFile& file) {
        out += "\n[";
        append_json_string(out, file.name);
        add(out, ",{},\"{}\"]", file.size, hex8(file.header_crc));
    });
    out += "],\n\"tensors\":{";
    append_list(out, tensors, [&](const auto& entry) { append_tensor(out, entry.first, *entry.second, layouts); });
    out += "},\n";
    append_strings(out, "aliases", aliases);
    if (!unreadable.empty()) append_strings(out, "unreadable", unreadable);
    append_values(out, "values", values);
    append_values(out, "metrics", metrics);
    const uint32_t crc = crc32c(out);
    add(out, "{}{}{}", crc_begin, hex8(crc), crc_end);
    return out;
}

namespace {

// That the text ends with its checksum, which matches.
void check_end(std::string_view text) {
    if (text.size() < tail_bytes || !text.ends_with(crc_end) ||
        text.substr(text.size() - tail_bytes, crc_begin.size()) != crc_begin) {
        bad("it does not end with its checksum: it was truncated or edited");
    }
    const auto crc = from_hex8(text.substr(text.size() - crc_end.size() - 8, 8));
    if (!crc || *crc != crc32c(text.substr(0, text.size() - tail_bytes))) {
        bad("its checksum does not match: it was changed after the save");
    }
}

void take_tensor(std::string_view name, JsonView tensor, const Tables& tables, Shared& shared, SavedTensors& tensors) {
    try {
        check_name(name, "a tensor's name");
        const size_t before = tensors.size();
        // This library writes them in order, and then each one's place is known without a search.
        tensors.emplace_hint(tensors.end(), name, tensor_of(tensor, tables, shared));
        if (tensors.size() == before) bad("it occurs twice");
    } catch (const Error& error) {
        bad(fmt::format("tensor '{}': {}", shown(name), error.what()));
    }
}

void take_alias(std::string_view name, JsonView target, Manifest& manifest) {
    if (!manifest.tensors.contains(target.as_string()) || manifest.tensors.contains(name)) {
        bad(fmt::format("the alias '{}' of '{}' is invalid", shown(name), shown(target.as_string())));
    }
    check_name(name, "an alias");
    manifest.aliases.emplace(name, target.as_string());
}

void take_values(JsonView members, Values& out) {
    members.for_each_member([&](std::string_view name, JsonView member) {
        check_name(name, "a value's name");
        Json value = member.tree();
        check_value(value, fmt::format("value '{}'", name));
        out.emplace(name, std::move(value));
    });
}

// `path`: of the file, for messages.
Manifest manifest_of(std::string_view text, const std::string& path) {
    check_end(text);
    // Its long part, the tensors, is parsed separately.
    const std::string_view tensors_text = object_in(text, "tensors");
    std::string short_text(text.begin(), tensors_text.empty() ? text.end() : tensors_text.begin());
    if (!tensors_text.empty()) short_text.append("{}").append(tensors_text.end(), text.end());
    const JsonText json(short_text, "it");
    const auto [format, version] = json.root().at<2>({"format", "version"});
    Manifest manifest;
    manifest.format = format.as_string();
    const bool is_dcp = manifest.format == torch_dcp_format;
    if (manifest.format != "tessera" && !is_dcp) bad("it is not a Tessera manifest");
    if (version.as_int() != manifest_version) {
        throw Error(Code::version, fmt::format("{} has format version {}; this library reads version {}", path,
                                               version.as_int(), manifest_version));
    }
    // Other versions may have other keys.
    const auto [sequence, step, save_id, committed, writer, world_size, meshes, layouts, files, tensors, aliases,
                values, metrics] =
        json.root().at<13>({"sequence", "step", "save_id", "committed", "writer", "world_size", "meshes", "layouts",
                            "files", "tensors", "aliases", "values", "metrics"});
    if (!parse_manifest_head(text)) bad("its head is malformed");
    manifest.sequence = sequence.as_int();
    manifest.step = step.as_int();
    manifest.save_id = save_id.as_string();
    manifest.committed = committed.as_string();
    const auto [library, language, writer_version] = writer.at<3>({"library", "language", "version"});
    manifest.writer = {std::string(library.as_string()), std::string(language.as_string()),
                       std::string(writer_version.as_string())};
    Tables tables;
    tables.world_size = manifest.world_size = small_int(world_size, 1, max_layout_ranks);
    take_layouts(meshes, layouts, tables);
    manifest.files = files_of(files, is_dcp);
    tables.file_count = static_cast<int64_t>(manifest.files.size());
    Shared shared;
    const auto take = [&](std::string_view name, JsonView tensor) {
        take_tensor(name, tensor, tables, shared, manifest.tensors);
    };
    if (tensors_text.empty()) {
        tensors.for_each_member(take);  // under a key with escapes
    } else {
        for_each_member_of(tensors_text, "it", take);
    }
    if (is_dcp && manifest.tensors.size() + aliases.size() > 0) bad("it lists tensors, which only .metadata may do");
    aliases.for_each_member([&](std::string_view name, JsonView target) { take_alias(name, target, manifest); });
    take_values(values, manifest.values);
    take_values(metrics, manifest.metrics);
    return manifest;
}

}  // namespace

Manifest Manifest::parse(std::string_view text, const std::string& path) {
    try {
        return manifest_of(text, path);
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

std::optional<std::string> parse_manifest_language(std::string_view head) {
    // Strings hold no bare line break, so that this can only be the key itself.
    constexpr std::string_view key = "\n\"writer\":";
    const size_t begin = head.find(key);
    if (begin == std::string_view::npos) return std::nullopt;
    head.remove_prefix(begin + key.size());
    const size_t end = head.find("},\n");
    if (end == std::string_view::npos) return std::nullopt;
    try {
        return Json::parse(head.substr(0, end + 1), "a manifest's writer").at("language").as_string();
    } catch (const Error&) {
        return std::nullopt;  // parsing the complete text reports the fault
    }
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
        return std::nullopt;  // parsing the complete text reports the fault
    }
}

}  // namespace tsr
