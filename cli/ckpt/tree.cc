// `tessera ckpt tree`: the tensors of one checkpoint by the parts of their names, and who wrote which piece.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "ckpt/command.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

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
        std::string label = printable(name);
        const Node* at = &child;
        while (at->cells.empty() && at->children.size() == 1) {
            label += '.';
            label += printable(at->children.begin()->first);
            at = &at->children.begin()->second;
        }
        lines.emplace_back(fmt::format("{}{}{}", indent, last ? "└── " : "├── ", label), at);
        flatten(*at, indent + (last ? "    " : "│   "), lines);
    }
}

int show_tree(const std::string& path, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    if (output == Output::json) {
        Json json = summary_json(*checkpoint);
        Json::Object tensors;
        for (const std::string& name : checkpoint->names()) tensors.push_back({name, tensor_json(manifest, name)});
        json.set("tensors", Json(std::move(tensors)));
        json.set("values", values_json(manifest.values));
        print_json(json);
        return exit_sound;
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
        std::string held = manifest.saved_name(name) != name ? "= " + printable(manifest.saved_name(name))
                           : writers.empty()
                               ? "no elements"
                               : fmt::format("{}, written by {}", layout_text(tensor), ranks_text(writers));
        leaf(name).cells = {std::string(name_of(tensor.dtype)), tensor.shape.str(), size_text(tensor.size_bytes()),
                            std::move(held)};
    }
    for (const auto& [name, value] : manifest.values) {
        std::string text = value.dump();
        if (text.size() > 60) text = cut_text(text, 57) + "...";
        leaf(name).cells = {"value", printable(text)};
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
    return exit_sound;
}

}  // namespace

void add_tree(CLI::App& ckpt, int& exit_code) {
    add_command(ckpt, "tree", "The tensors by name: dtype, shape, size, who held and who wrote which part",
                checkpoint_path_what, exit_code, show_tree);
}

}  // namespace tsr::cli
