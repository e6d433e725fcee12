// `tessera ckpt tree`: the tensors of one checkpoint by the parts of their names, and who wrote which piece.
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/brief.hpp"
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

// "ranks 0-2,5", of numbers in order.
std::string ranks_text(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size();) {
        const size_t begin = i;
        while (++i < ranks.size() && ranks[i] == ranks[i - 1] + 1) {
        }
        if (begin > 0) text += ',';
        text += std::to_string(ranks[begin]);
        if (i - begin > 1) text.append("-").append(std::to_string(ranks[i - 1]));
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

void add_piece(ObjectText& text, const Box& box) {
    text.begin_item();
    text.member("offsets", box.offsets);
    text.member("sizes", box.sizes);
}

void add_tensor(ObjectText& text, const Manifest& manifest, const SavedTensor& tensor, const std::string* target) {
    text.member("dtype", name_of(tensor.dtype));
    text.member("shape", tensor.shape);
    text.member("size_bytes", tensor.size_bytes());
    text.member("layout", layout_text(tensor));
    if (target != nullptr) text.member("alias_of", *target);
    if (tensor.layout) {
        text.begin_list("held_by");
        for (int rank = 0; rank < tensor.layout->world_size(); ++rank) {
            for (const Box& box : tensor.layout->boxes_of(rank)) {
                add_piece(text, box);
                text.member("rank", int64_t{rank});
                text.end();
            }
        }
        text.end();
    }
    text.begin_list("written_by");
    tensor.for_each_piece(Box::whole(tensor.shape), [&](const Box& box, int file) {
        const std::string& name = manifest.files[static_cast<size_t>(file)].name;
        const int rank = rank_of_file(name);
        add_piece(text, box);
        text.member("file", name);
        text.member("rank", rank < 0 ? Json() : Json(rank));
        text.end();
    });
    text.end();
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
    std::vector<int> writers;
    tensor.for_each_piece(Box::whole(tensor.shape), [&](const Box&, int file) {
        writers.push_back(rank_of_file(manifest.files[static_cast<size_t>(file)].name));
    });
    if (writers.empty()) return "no elements";
    std::sort(writers.begin(), writers.end());
    writers.erase(std::unique(writers.begin(), writers.end()), writers.end());
    if (writers.front() < 0) return layout_text(tensor);
    return layout_text(tensor).append(", written by ").append(ranks_text(writers));
}

int show_tree(const std::string& path, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    if (output == Output::json) {
        ObjectText text(summary_json(*checkpoint));
        text.begin("tensors");
        manifest.for_each([&](const std::string& name, const SavedTensor& tensor, const std::string* target) {
            text.begin(name);
            add_tensor(text, manifest, tensor, target);
            text.end();
            fmt::print("{}", text.take());  // of many ranks it is long
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
    constexpr size_t size_width = 8;
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
            const std::string_view dtype = name_of(tensor.dtype);
            const std::string size = size_text(tensor.size_bytes());
            out.append("  ").append(dtype).append(dtype_width - dtype.size() + 2, ' ');
            out.append(shapes[i]).append(shape_width - shapes[i].size() + 2, ' ');
            out.append(size_width - std::min(size.size(), size_width), ' ').append(size).append("  ");
            out.append(held_text(manifest, tensor, node->target));
        } else if (node->value != nullptr) {
            const std::string text = node->value->dump();
            out += "  " + printable(brief(text, 60));
        } else if (node->unreadable != nullptr) {
            out += fmt::format("  (not read: {})", printable(*node->unreadable));
        }
        out += '\n';
    }
    fmt::print("{}", out);
    return exit_sound;
}

}  // namespace

void add_tree(Command& ckpt) {
    add_command(ckpt, "tree", "The tensors by name: dtype, shape, size, who held and who wrote which part",
                checkpoint_path_what, show_tree);
}

}  // namespace tsr::cli
