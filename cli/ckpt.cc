// `tessera ckpt`: look at checkpoints and check them. Exit codes: 0 sound, 1 damaged, 2 wrong usage or not there.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/native/root.hpp"
#include "commands.hpp"

namespace tsr::cli {

namespace {

constexpr int exit_damaged = 1;
constexpr int exit_usage = 2;

std::string size_text(int64_t bytes) {
    constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    auto value = static_cast<double>(bytes);
    size_t unit = 0;
    while (value >= 1023.5 && unit + 1 < std::size(units)) {
        value /= 1024;
        ++unit;
    }
    if (unit == 0) return fmt::format("{} B", bytes);
    return value < 9.95 ? fmt::format("{:.1f} {}", value, units[unit]) : fmt::format("{:.0f} {}", value, units[unit]);
}

std::string count_text(size_t n, const char* one) { return fmt::format("{} {}{}", n, one, n == 1 ? "" : "s"); }

// "2026-11-21T09:02:11.123Z" as local time, to the second.
std::string local_time(const std::string& utc) {
    std::tm parts{};
    if (::strptime(utc.c_str(), "%Y-%m-%dT%H:%M:%S", &parts) == nullptr) return utc;
    const std::time_t seconds = ::timegm(&parts);
    ::localtime_r(&seconds, &parts);
    char text[32];
    return std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts) > 0 ? text : utc;
}

std::string metric_text(const Json& value) {
    try {
        return fmt::format("{:.4g}", double_of(value, "metric"));
    } catch (const Error&) {
        return value.dump();
    }
}

// Columns under a heading; numbers to the right, text to the left.
class Table {
   public:
    enum class Align { left, right };
    void column(std::string heading, Align align) {
        headings_.push_back(std::move(heading));
        aligns_.push_back(align);
    }
    void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
    void print() const {
        std::vector<size_t> widths;
        for (const std::string& heading : headings_) widths.push_back(heading.size());
        for (const auto& row : rows_) {
            for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
        }
        print_row(headings_, widths);
        for (const auto& row : rows_) print_row(row, widths);
    }

   private:
    void print_row(const std::vector<std::string>& cells, const std::vector<size_t>& widths) const {
        std::string line;
        for (size_t i = 0; i < cells.size(); ++i) {
            if (i > 0) line += "  ";
            line += aligns_[i] == Align::right ? fmt::format("{:>{}}", cells[i], widths[i])
                                               : fmt::format("{:<{}}", cells[i], widths[i]);
        }
        while (!line.empty() && line.back() == ' ') line.pop_back();
        fmt::print("{}\n", line);
    }
    std::vector<std::string> headings_;
    std::vector<Align> aligns_;
    std::vector<std::vector<std::string>> rows_;
};

Json dims_json(const Dims& dims) {
    Json::Array list;
    for (const int64_t n : dims) list.emplace_back(n);
    return Json(std::move(list));
}

Json values_json(const Values& values) {
    Json::Object members;
    for (const auto& [name, value] : values) members.push_back({name, value});
    return Json(std::move(members));
}

// The rank that wrote a file, from its name.
int rank_of_file(const std::string& name) {
    int rank = 0;
    std::from_chars(name.data() + 5, name.data() + name.size(), rank);
    return rank;
}

Json summary_json(const Checkpoint& checkpoint) {
    const Manifest& manifest = checkpoint.manifest();
    Json json;
    json.set("path", checkpoint.path());
    json.set("step", manifest.step);
    json.set("sequence", manifest.sequence);
    json.set("save_id", manifest.save_id);
    json.set("committed", manifest.committed);
    Json writer;
    writer.set("library", manifest.writer.library);
    writer.set("language", manifest.writer.language);
    writer.set("version", manifest.writer.version);
    json.set("writer", std::move(writer));
    json.set("world_size", manifest.world_size);
    json.set("tensor_count", static_cast<int64_t>(checkpoint.names().size()));
    json.set("size_bytes", manifest.size_bytes());
    json.set("metrics", values_json(manifest.metrics));
    return json;
}

void print_json(const Json& json) { fmt::print("{}\n", json.dump()); }

// --- ls ---

int list_saves(const std::string& root, bool as_json) {
    FileSystem& files = posix_file_system();
    FileStatus status;
    if (files.status(root, status) < 0 || status.kind != FileStatus::Kind::directory) {
        throw Error(Code::not_found, fmt::format("there is no directory {}", root));
    }
    const std::vector<SavedStep> saves = scan_root(files, root);
    struct Line {
        SavedStep save;
        std::shared_ptr<const Checkpoint> checkpoint;  // nullptr: not committed, or damaged
        std::string fault;
    };
    std::vector<Line> lines;
    std::set<std::string> metrics;
    int exit_code = 0;
    std::string newest;
    for (const SavedStep& save : saves) {
        Line line{save, nullptr, ""};
        if (save.committed) {
            try {
                line.checkpoint = Checkpoint::open(join(root, save.directory));
                for (const auto& [name, value] : line.checkpoint->manifest().metrics) metrics.insert(name);
                newest = save.directory;
            } catch (const Error& error) {
                line.fault = error.what();
                exit_code = exit_damaged;
            }
        }
        lines.push_back(std::move(line));
    }
    if (as_json) {
        Json::Array list;
        for (const Line& line : lines) {
            Json json;
            if (line.checkpoint) {
                json = summary_json(*line.checkpoint);
            } else {
                json.set("path", join(root, line.save.directory));
            }
            json.set("state", line.checkpoint ? "committed" : line.save.committed ? "damaged" : "not committed");
            json.set("latest", line.checkpoint && line.save.directory == newest);
            if (!line.fault.empty()) json.set("fault", line.fault);
            list.push_back(std::move(json));
        }
        print_json(Json(std::move(list)));
        return exit_code;
    }
    if (lines.empty()) {
        fmt::print("{} holds no checkpoint\n", root);
        return exit_code;
    }
    Table table;
    table.column("step", Table::Align::right);
    table.column("committed", Table::Align::left);
    table.column("ranks", Table::Align::right);
    table.column("size", Table::Align::right);
    for (const std::string& name : metrics) table.column(name, Table::Align::right);
    table.column("path", Table::Align::left);
    table.column("", Table::Align::left);
    for (const Line& line : lines) {
        std::vector<std::string> cells;
        if (line.checkpoint) {
            const Manifest& manifest = line.checkpoint->manifest();
            cells = {std::to_string(manifest.step), local_time(manifest.committed), std::to_string(manifest.world_size),
                     size_text(manifest.size_bytes())};
            for (const std::string& name : metrics) {
                const auto found = manifest.metrics.find(name);
                cells.push_back(found == manifest.metrics.end() ? "-" : metric_text(found->second));
            }
        } else {
            cells = {"-", line.save.committed ? "damaged" : "not committed", "-", "-"};
            cells.resize(4 + metrics.size(), "-");
        }
        cells.push_back(join(root, line.save.directory));
        cells.emplace_back(line.save.directory == newest ? "latest" : "");
        table.row(std::move(cells));
    }
    table.print();
    for (const Line& line : lines) {
        if (!line.fault.empty()) fmt::print(stderr, "tessera ckpt: {}\n", line.fault);
    }
    return exit_code;
}

// --- info ---

int show_info(const std::string& path, bool as_json) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    int64_t elements = 0;
    for (const auto& [name, tensor] : manifest.tensors) elements += tensor.shape.product();
    if (as_json) {
        Json json = summary_json(*checkpoint);
        json.set("element_count", elements);
        Json::Array files;
        for (const SavedFile& file : manifest.files) {
            Json one;
            one.set("name", file.name);
            one.set("size_bytes", file.size);
            files.push_back(std::move(one));
        }
        json.set("files", Json(std::move(files)));
        json.set("values", values_json(manifest.values));
        print_json(json);
        return 0;
    }
    const auto line = [](const char* name, const std::string& value) { fmt::print("{:<11}{}\n", name, value); };
    line("path", checkpoint->path());
    line("step", std::to_string(manifest.step));
    line("committed", local_time(manifest.committed));
    line("save id", manifest.save_id);
    const Writer& writer = manifest.writer;
    line("written by", fmt::format("{} from {}{}{}", writer.library, writer.language, writer.version.empty() ? "" : " ",
                                   writer.version));
    line("ranks", std::to_string(manifest.world_size));
    line("tensors", fmt::format("{}, {} elements{}", manifest.tensors.size(), elements,
                                manifest.aliases.empty() ? "" : ", " + count_text(manifest.aliases.size(), "alias")));
    line("files", fmt::format("{}, {}", manifest.files.size(), size_text(manifest.size_bytes())));
    for (const auto& [name, value] : manifest.metrics) line("metric", fmt::format("{} = {}", name, metric_text(value)));
    for (const auto& [name, value] : manifest.values) line("value", fmt::format("{} = {}", name, value.dump()));
    return 0;
}

// --- tree ---

struct Node {
    std::map<std::string, Node> children;
    std::vector<std::string> cells;  // of a leaf
};

std::string ranks_text(const std::set<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    bool first = true;
    for (auto it = ranks.begin(); it != ranks.end();) {
        const int begin = *it;
        int end = begin;
        while (++it != ranks.end() && *it == end + 1) ++end;
        text += first ? "" : ",";
        text += begin == end ? std::to_string(begin) : fmt::format("{}-{}", begin, end);
        first = false;
    }
    return text;
}

std::string layout_text(const SavedTensor& tensor) {
    if (!tensor.layout) return fmt::format("{} boxes", tensor.pieces.size());
    const Layout& layout = *tensor.layout;
    if (layout.shard_count() == 1) return layout.world_size() == 1 ? "whole" : "replicated";
    std::string text;
    for (size_t m = 0; m < layout.placements().size(); ++m) {
        text += fmt::format("{}{}/{}", m > 0 ? " " : "", layout.placements()[m].str(), layout.mesh_sizes()[m]);
    }
    return text;
}

Json box_json(const Box& box) {
    Json json;
    json.set("offsets", dims_json(box.offsets));
    json.set("sizes", dims_json(box.sizes));
    return json;
}

Json tensor_json(const Manifest& manifest, const std::string& name) {
    const SavedTensor& tensor = *manifest.find(name);
    Json json;
    json.set("dtype", name_of(tensor.dtype));
    json.set("shape", dims_json(tensor.shape));
    json.set("size_bytes", tensor.size_bytes());
    json.set("layout", layout_text(tensor));
    if (manifest.saved_name(name) != name) json.set("alias_of", manifest.saved_name(name));
    if (tensor.layout) {
        Json::Array holders;
        for (int rank = 0; rank < tensor.layout->world_size(); ++rank) {
            for (const Box& box : tensor.layout->boxes_of(rank)) {
                Json holder = box_json(box);
                holder.set("rank", rank);
                holders.push_back(std::move(holder));
            }
        }
        json.set("held_by", Json(std::move(holders)));
    }
    Json::Array pieces;
    tensor.for_each_piece(Box::whole(tensor.shape), [&](const Box& box, int file) {
        Json piece = box_json(box);
        piece.set("file", manifest.files[static_cast<size_t>(file)].name);
        piece.set("rank", rank_of_file(manifest.files[static_cast<size_t>(file)].name));
        pieces.push_back(std::move(piece));
    });
    json.set("written_by", Json(std::move(pieces)));
    return json;
}

void flatten(const Node& node, const std::string& indent, std::vector<std::pair<std::string, const Node*>>& lines) {
    size_t left = node.children.size();
    for (const auto& [name, child] : node.children) {
        const bool last = --left == 0;
        // A chain of single children is one line: "layers.0.attention".
        std::string label = name;
        const Node* at = &child;
        while (at->cells.empty() && at->children.size() == 1) {
            label += "." + at->children.begin()->first;
            at = &at->children.begin()->second;
        }
        lines.emplace_back(indent + (last ? "└── " : "├── ") + label, at);
        flatten(*at, indent + (last ? "    " : "│   "), lines);
    }
}

// Columns a text takes on a terminal: UTF-8 continuation bytes take none.
size_t width_of(const std::string& text) {
    return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

int show_tree(const std::string& path, bool as_json) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    if (as_json) {
        Json json = summary_json(*checkpoint);
        Json::Object tensors;
        for (const std::string& name : checkpoint->names()) tensors.push_back({name, tensor_json(manifest, name)});
        json.set("tensors", Json(std::move(tensors)));
        json.set("values", values_json(manifest.values));
        print_json(json);
        return 0;
    }
    Node root;
    const auto leaf = [&](const std::string& name) -> Node& {
        Node* node = &root;
        for (size_t begin = 0; begin <= name.size();) {
            const size_t dot = std::min(name.find('.', begin), name.size());
            node = &node->children[name.substr(begin, dot - begin)];
            begin = dot + 1;
        }
        return *node;
    };
    for (const std::string& name : checkpoint->names()) {
        const SavedTensor& tensor = *manifest.find(name);
        std::set<int> writers;
        tensor.for_each_piece(Box::whole(tensor.shape), [&](const Box&, int file) {
            writers.insert(rank_of_file(manifest.files[static_cast<size_t>(file)].name));
        });
        std::string held = manifest.saved_name(name) != name ? "= " + manifest.saved_name(name)
                           : writers.empty()
                               ? "no elements"
                               : fmt::format("{}, written by {}", layout_text(tensor), ranks_text(writers));
        leaf(name).cells = {std::string(name_of(tensor.dtype)), tensor.shape.str(), size_text(tensor.size_bytes()),
                            std::move(held)};
    }
    for (const auto& [name, value] : manifest.values) {
        std::string text = value.dump();
        if (text.size() > 60) text = text.substr(0, 57) + "...";
        leaf(name).cells = {"value", is_utf8(text) ? text : value.dump()};
    }
    std::vector<std::pair<std::string, const Node*>> lines;
    flatten(root, "", lines);
    size_t name_width = 0;
    size_t shape_width = 0;
    for (const auto& [label, node] : lines) {
        if (node->cells.empty()) continue;
        name_width = std::max(name_width, width_of(label));
        if (node->cells.size() == 4) shape_width = std::max(shape_width, node->cells[1].size());
    }
    fmt::print("{}   step {}, {}, {}, {}\n", checkpoint->path(), manifest.step,
               count_text(static_cast<size_t>(manifest.world_size), "rank"),
               count_text(checkpoint->names().size(), "tensor"), size_text(manifest.size_bytes()));
    for (const auto& [label, node] : lines) {
        if (node->cells.empty()) {
            fmt::print("{}\n", label);
            continue;
        }
        const std::string padding(name_width - width_of(label), ' ');
        if (node->cells.size() == 4) {
            fmt::print("{}{}  {:<4}  {:<{}}  {:>8}  {}\n", label, padding, node->cells[0], node->cells[1], shape_width,
                       node->cells[2], node->cells[3]);
        } else {
            fmt::print("{}{}  {}\n", label, padding, node->cells[1]);
        }
    }
    return 0;
}

// --- verify ---

int verify(const std::string& path, bool fast, bool as_json) {
    const auto checkpoint = Checkpoint::open(path);
    const std::vector<std::string> faults =
        checkpoint->verify(fast ? Checkpoint::Depth::headers : Checkpoint::Depth::everything);
    const Manifest& manifest = checkpoint->manifest();
    if (as_json) {
        Json json;
        json.set("path", checkpoint->path());
        json.set("sound", faults.empty());
        json.set("checked", fast ? "headers" : "everything");
        json.set("file_count", static_cast<int64_t>(manifest.files.size()));
        json.set("size_bytes", manifest.size_bytes());
        Json::Array list;
        for (const std::string& fault : faults) list.emplace_back(fault);
        json.set("faults", Json(std::move(list)));
        print_json(json);
    } else if (faults.empty()) {
        fmt::print("{} is sound: {}, {}, {}\n", checkpoint->path(), count_text(manifest.files.size(), "file"),
                   size_text(manifest.size_bytes()), fast ? "sizes and headers checked" : "every byte checked");
    } else {
        for (const std::string& fault : faults) fmt::print("{}\n", fault);
        fmt::print("{} is damaged: {}\n", checkpoint->path(), count_text(faults.size(), "fault"));
    }
    return faults.empty() ? 0 : exit_damaged;
}

struct Arguments {
    std::string path;
    bool json = false;
    bool fast = false;
};

}  // namespace

void add_ckpt(CLI::App& app, int& exit_code) {
    CLI::App* ckpt = app.add_subcommand("ckpt", "Look at checkpoints and check them");
    ckpt->require_subcommand(1);
    const auto arguments = std::make_shared<Arguments>();
    const auto add = [&](const char* name, const char* what, const char* path_what, auto run) {
        CLI::App* command = ckpt->add_subcommand(name, what);
        command->add_option("path", arguments->path, path_what)->required();
        command->add_flag("--json", arguments->json, "Print JSON");
        command->callback([arguments, &exit_code, run] {
            try {
                exit_code = run(*arguments);
            } catch (const Error& error) {
                fmt::print(stderr, "tessera ckpt: {}\n", error.what());
                const bool damaged = error.code() == Code::corrupt || error.code() == Code::version;
                exit_code = damaged ? exit_damaged : exit_usage;
            }
        });
        return command;
    };
    constexpr const char* checkpoint = "A checkpoint's directory, or a root or its 'latest' for the newest one";
    add("ls", "List the checkpoints under a root, oldest first", "The root directory",
        [](const Arguments& a) { return list_saves(a.path, a.json); });
    add("info", "What a checkpoint is: step, writer, sizes, values", checkpoint,
        [](const Arguments& a) { return show_info(a.path, a.json); });
    add("tree", "The tensors by name: dtype, shape, size, who held and who wrote which part", checkpoint,
        [](const Arguments& a) { return show_tree(a.path, a.json); });
    add("verify", "Check every byte; exit code 1 if anything is wrong", checkpoint, [](const Arguments& a) {
        return verify(a.path, a.fast, a.json);
    })->add_flag("--fast", arguments->fast, "Sizes and headers alone, no data");
}

}  // namespace tsr::cli
