// `tessera ckpt tree`: the tensors of one checkpoint as a tree of their names, and the ranks that wrote them.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/wildcard.hpp"
#include "ckpt/command.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

struct Node {
    std::map<std::string_view, Node> children;  // keys are parts of the checkpoint's names
    const SavedTensor* tensor = nullptr;
    const std::string* target = nullptr;  // of an alias: the saved name
    const Json* value = nullptr;
    const std::string* unreadable = nullptr;  // the reason

    [[nodiscard]] bool is_leaf() const { return tensor != nullptr || value != nullptr || unreadable != nullptr; }
};

// Names come in order, so a child is mostly the last one or comes after it.
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

struct Line {
    std::string label;
    const Node* node = nullptr;
    bool is_cut = false;  // the levels below are not shown
};

void flatten(const Node& node, const std::string& indent, int depth, std::vector<Line>& lines) {
    size_t left = node.children.size();
    for (const auto& [name, child] : node.children) {
        const bool last = --left == 0;
        int below = depth - 1;
        // A chain of single children is one line: "layers.0.attention".
        std::string label = printable(name);
        const Node* at = &child;
        while (!at->is_leaf() && at->children.size() == 1 && below > 0) {
            label += '.';
            label += printable(at->children.begin()->first);
            at = &at->children.begin()->second;
            --below;
        }
        const bool is_cut = below == 0 && !at->children.empty();
        lines.push_back({fmt::format("{}{}{}", indent, last ? "└── " : "├── ", label), at, is_cut});
        if (!is_cut) flatten(*at, indent + (last ? "    " : "│   "), below, lines);
    }
}

// The totals below a node.
struct Sum {
    size_t tensors = 0;
    int64_t bytes = 0;
    size_t values = 0;  // includes entries that cannot be read

    explicit Sum(const Node& node) {
        for (const auto& [name, child] : node.children) add(child);
    }
    void add(const Node& node) {
        if (node.tensor != nullptr) {
            ++tensors;
            if (node.target == nullptr) bytes += node.tensor->size_bytes();
        }
        if (node.value != nullptr || node.unreadable != nullptr) ++values;
        for (const auto& [name, child] : node.children) add(child);
    }
    [[nodiscard]] std::string text() const {
        std::string out;
        if (tensors > 0) out = fmt::format("{}, {}", count_text(tensors, "tensor"), size_text(bytes));
        if (values > 0) out += (out.empty() ? "" : ", ") + count_text(values, "value");
        return out;
    }
};

// A layout in words: "dim 0 in 2 parts, 3 copies".
std::string words_of(const SavedTensor& tensor) {
    if (!tensor.layout || tensor.layout->shard_count() == 1) return layout_text(tensor);
    std::string text;
    int64_t copies = 1;
    for (size_t m = 0; m < tensor.layout->placements().size(); ++m) {
        const Placement& placement = tensor.layout->placements()[m];
        const int64_t count = tensor.layout->mesh_sizes()[m];
        if (placement.kind == PlacementKind::replicate) {
            copies *= count;
        } else if (count > 1) {
            text += fmt::format("{}dim {} in {} parts", text.empty() ? "" : ", ", placement.dim, count);
        }
    }
    return copies > 1 ? fmt::format("{}, {} copies", text, copies) : text;
}

// How a tensor was distributed, and which ranks wrote it.
std::string held_text(const Manifest& manifest, const SavedTensor& tensor, const std::string* target) {
    if (target != nullptr) return "= " + printable(*target);
    std::vector<int> writers;
    tensor.for_each_piece(Box::whole(tensor.shape), [&](const Box&, int file) {
        writers.push_back(rank_of_file(manifest.files[static_cast<size_t>(file)].name));
    });
    if (writers.empty()) return "no elements";
    std::sort(writers.begin(), writers.end());
    writers.erase(std::unique(writers.begin(), writers.end()), writers.end());
    if (writers.front() < 0) return words_of(tensor);
    return words_of(tensor).append(", written by ").append(ranks_text(writers));
}

struct Arguments {
    int depth = 0;
    std::vector<std::string> only;
};

// Which names are shown, by `--only`.
class Shown {
   public:
    explicit Shown(const std::vector<std::string>& only) : only_(only) {}

    [[nodiscard]] bool operator()(const std::string& name) {
        const auto fit = [&](const std::string& pattern) { return fits(pattern, name); };
        const bool is_one = only_.empty() || std::ranges::any_of(only_, fit);
        is_any_ = is_any_ || is_one;
        return is_one;
    }
    [[nodiscard]] bool is_any() const { return is_any_; }

   private:
    const std::vector<std::string>& only_;
    bool is_any_ = false;
};

void print_json(const Checkpoint& checkpoint, Shown& is_shown) {
    const Manifest& manifest = checkpoint.manifest();
    ObjectText text(summary_json(checkpoint));
    text.begin("tensors");
    manifest.for_each([&](const std::string& name, const SavedTensor& tensor, const std::string* target) {
        if (!is_shown(name)) return;
        text.begin(name);
        add_tensor(text, manifest, tensor, target);
        text.end();
        fmt::print("{}", text.take());  // of many ranks it is long
    });
    text.end();
    const auto shown = [&](auto named) {
        std::erase_if(named, [&](const auto& one) { return !is_shown(one.first); });
        return named;
    };
    text.member("values", values_json(shown(shown_values(manifest))));
    const auto unreadable = shown(manifest.unreadable);
    if (!unreadable.empty()) text.member("unreadable", unreadable_json(unreadable));
    fmt::print("{}", text.finish());
}

// By the parts of the names. It points into the manifest and `values`.
Node tree_of(const Manifest& manifest, const Values& values, Shown& is_shown) {
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
        if (!is_shown(name)) return;
        Node& node = leaf(name);
        node.target = target;
        node.tensor = &tensor;
    });
    for (const auto& [name, value] : values) {
        if (is_shown(name)) leaf(name).value = &value;
    }
    for (const auto& [name, why] : manifest.unreadable) {
        if (is_shown(name)) leaf(name).unreadable = &why;
    }
    return root;
}

// In columns: names, dtypes, shapes, sizes, layouts.
std::string text_of(const std::vector<Line>& lines, const Manifest& manifest) {
    size_t name_width = 0;
    size_t dtype_width = 4;
    size_t shape_width = 0;
    constexpr size_t size_width = 8;
    std::vector<std::string> shapes(lines.size());
    for (size_t i = 0; i < lines.size(); ++i) {
        const auto& [label, node, is_cut] = lines[i];
        if (node->is_leaf() || is_cut) name_width = std::max(name_width, width_of(label));
        if (node->tensor == nullptr) continue;
        shapes[i] = node->tensor->shape.str();
        dtype_width = std::max(dtype_width, name_of(node->tensor->dtype).size());
        shape_width = std::max(shape_width, shapes[i].size());
    }
    std::string out;
    for (size_t i = 0; i < lines.size(); ++i) {
        const auto& [label, node, is_cut] = lines[i];
        out += label;
        if (node->is_leaf() || is_cut) out.append(name_width - width_of(label), ' ');
        if (node->tensor != nullptr) {
            const SavedTensor& tensor = *node->tensor;
            const std::string_view dtype = name_of(tensor.dtype);
            const std::string size = size_text(tensor.size_bytes());
            out.append("  ").append(dtype).append(dtype_width - dtype.size() + 2, ' ');
            out.append(shapes[i]).append(shape_width - shapes[i].size() + 2, ' ');
            out.append(size_width - std::min(size.size(), size_width), ' ').append(size).append("  ");
            out.append(held_text(manifest, tensor, node->target));
        } else if (node->value != nullptr) {
            out += "  " + value_text(*node->value);
        } else if (node->unreadable != nullptr) {
            out += fmt::format("  (cannot be read: {})", printable(*node->unreadable));
        }
        if (is_cut) out += fmt::format("  ({}{})", node->is_leaf() ? "and " : "", Sum(*node).text());
        out += '\n';
    }
    return out;
}

int show_tree(const std::string& path, const Arguments& arguments, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    Shown is_shown(arguments.only);
    if (output == Output::json) {
        print_json(*checkpoint, is_shown);
        return exit_sound;
    }
    const Values values = shown_values(manifest);
    const Node root = tree_of(manifest, values, is_shown);
    if (!is_shown.is_any() && !arguments.only.empty()) {
        throw Error(Code::not_found, fmt::format("{} has no name that matches {}", checkpoint->path(),
                                                 fmt::join(arguments.only, " or ")));
    }
    std::vector<Line> lines;
    flatten(root, "", arguments.depth > 0 ? arguments.depth : std::numeric_limits<int>::max(), lines);
    const std::string head = manifest.step < 0 ? manifest.format : fmt::format("step {}", manifest.step);
    fmt::print("{}   {}, {}, {}, {}\n{}", checkpoint->path(), head,
               count_text(static_cast<size_t>(manifest.world_size), "rank"),
               count_text(checkpoint->names().size(), "tensor"), size_text(manifest.size_bytes()),
               text_of(lines, manifest));
    return exit_sound;
}

}  // namespace

void add_tree(Command& ckpt) {
    const auto arguments = std::make_shared<Arguments>();
    Command command = add_command(
        ckpt, "tree", "Show the tensors by name: dtype, shape, size, layout and the ranks that wrote them",
        checkpoint_path_what,
        [arguments](const std::string& path, Output output) { return show_tree(path, *arguments, output); });
    command.add_option("--depth", arguments->depth, "Show this many parts of the names, and totals of the levels below")
        .in_range(1, 1024);
    command
        .add_option("--only", arguments->only,
                    "Show only names that match the pattern: '*' matches any characters, including dots, '?' one "
                    "character, [a-c] one of a set; can be given several times")
        .one_value_each();
}

}  // namespace tsr::cli
