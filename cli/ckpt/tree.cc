// `tessera ckpt tree`: the tensors of one checkpoint by the parts of their names, and who wrote which piece.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "ckpt/command.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

struct Node {
    std::map<std::string_view, Node> children;  // keys are parts of the checkpoint's names
    const SavedTensor* tensor = nullptr;
    const std::string* target = nullptr;  // of a tensor that is an alias: the name that is saved
    const Json* value = nullptr;
    const std::string* unreadable = nullptr;  // why

    [[nodiscard]] bool is_leaf() const { return tensor != nullptr || value != nullptr || unreadable != nullptr; }
};

// Names come in order, so that a child is mostly the last one, or comes after it.
Node& child_of(Node& node, std::string_view key) {
    if (!node.children.empty() && node.children.rbegin()->first == key) return node.children.rbegin()->second;
    return node.children.try_emplace(node.children.end(), key)->second;
}

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
    if (!tensor.layout && tensor.pieces.size() <= 1) return "whole";
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

Json tensor_json(const Manifest& manifest, const SavedTensor& tensor, const std::string* target) {
    Json json;
    json.set("dtype", name_of(tensor.dtype));
    json.set("shape", dims_json(tensor.shape));
    json.set("size_bytes", tensor.size_bytes());
    json.set("layout", layout_text(tensor));
    if (target != nullptr) json.set("alias_of", *target);
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
        const int rank = rank_of_file(manifest.files[static_cast<size_t>(file)].name);
        piece.set("rank", rank < 0 ? Json() : Json(rank));
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
        while (!at->is_leaf() && at->children.size() == 1) {
            label += '.';
            label += printable(at->children.begin()->first);
            at = &at->children.begin()->second;
        }
        lines.emplace_back(fmt::format("{}{}{}", indent, last ? "└── " : "├── ", label), at);
        flatten(*at, indent + (last ? "    " : "│   "), lines);
    }
}

// Who held a tensor and who wrote it.
std::string held_text(const Manifest& manifest, const SavedTensor& tensor, const std::string* target) {
    if (target != nullptr) return "= " + printable(*target);
    std::set<int> writers;
    tensor.for_each_piece(Box::whole(tensor.shape), [&](const Box&, int file) {
        writers.insert(rank_of_file(manifest.files[static_cast<size_t>(file)].name));
    });
    if (writers.empty()) return "no elements";
    if (*writers.begin() < 0) return layout_text(tensor);
    return fmt::format("{}, written by {}", layout_text(tensor), ranks_text(writers));
}

int show_tree(const std::string& path, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    if (output == Output::json) {
        ObjectText text(summary_json(*checkpoint));
        text.begin("tensors");
        manifest.for_each([&](const std::string& name, const SavedTensor& tensor, const std::string* target) {
            text.member(name, tensor_json(manifest, tensor, target));
        });
        text.end();
        text.member("values", values_json(manifest.values));
        if (!manifest.unreadable.empty()) text.member("unreadable", unreadable_json(manifest));
        fmt::print("{}", text.finish());
        return exit_sound;
    }
    Node root;
    const auto leaf = [&](std::string_view name) -> Node& {
        Node* node = &root;
        for (size_t begin = 0; begin <= name.size();) {
            const size_t dot = std::min(name.find('.', begin), name.size());
            node = &child_of(*node, name.substr(begin, dot - begin));
            begin = dot + 1;
        }
        return *node;
    };
    manifest.for_each([&](const std::string& name, const SavedTensor& tensor, const std::string* target) {
        Node& node = leaf(name);
        node.target = target;
        node.tensor = &tensor;
    });
    for (const auto& [name, value] : manifest.values) leaf(name).value = &value;
    for (const auto& [name, why] : manifest.unreadable) leaf(name).unreadable = &why;
    std::vector<std::pair<std::string, const Node*>> lines;
    flatten(root, "", lines);
    size_t name_width = 0;
    size_t dtype_width = 4;
    size_t shape_width = 0;
    std::vector<std::string> shapes(lines.size());
    for (size_t i = 0; i < lines.size(); ++i) {
        const auto& [label, node] = lines[i];
        if (node->is_leaf()) name_width = std::max(name_width, width_of(label));
        if (node->tensor == nullptr) continue;
        shapes[i] = node->tensor->shape.str();
        dtype_width = std::max(dtype_width, name_of(node->tensor->dtype).size());
        shape_width = std::max(shape_width, shapes[i].size());
    }
    const std::string head = manifest.step < 0 ? manifest.format : fmt::format("step {}", manifest.step);
    std::string out = fmt::format("{}   {}, {}, {}, {}\n", checkpoint->path(), head,
                                  count_text(static_cast<size_t>(manifest.world_size), "rank"),
                                  count_text(checkpoint->names().size(), "tensor"), size_text(manifest.size_bytes()));
    for (size_t i = 0; i < lines.size(); ++i) {
        const auto& [label, node] = lines[i];
        out += label;
        if (node->is_leaf()) out.append(name_width - width_of(label), ' ');
        if (node->tensor != nullptr) {
            const SavedTensor& tensor = *node->tensor;
            fmt::format_to(std::back_inserter(out), "  {:<{}}  {:<{}}  {:>8}  {}", name_of(tensor.dtype), dtype_width,
                           shapes[i], shape_width, size_text(tensor.size_bytes()),
                           held_text(manifest, tensor, node->target));
        } else if (node->value != nullptr) {
            const std::string text = node->value->dump();
            out += "  " + printable(text.size() > 60 ? cut_text(text, 57) + "..." : text);
        } else if (node->unreadable != nullptr) {
            out += fmt::format("  (not read: {})", printable(*node->unreadable));
        }
        out += '\n';
    }
    fmt::print("{}", out);
    return exit_sound;
}

}  // namespace

void add_tree(CLI::App& ckpt, int& exit_code) {
    add_command(ckpt, "tree", "The tensors by name: dtype, shape, size, who held and who wrote which part",
                checkpoint_path_what, exit_code, show_tree);
}

}  // namespace tsr::cli
