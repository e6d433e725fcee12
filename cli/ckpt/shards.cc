// `tessera ckpt shards`: which rank's file holds which box of each tensor, as text, JSON or a drawing.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/wildcard.hpp"
#include "ckpt/command.hpp"
#include "ckpt/drawing.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

struct Arguments {
    std::vector<std::string> names;
    std::string svg;
    std::string html;
};

// The requested names; each request is a name or a shell pattern. All names without requests.
std::vector<std::string> chosen(const Checkpoint& checkpoint, const std::vector<std::string>& asked) {
    if (asked.empty()) return checkpoint.names();
    std::vector<bool> found(asked.size(), false);
    std::vector<std::string> names;
    for (const std::string& name : checkpoint.names()) {
        bool is_chosen = false;
        for (size_t i = 0; i < asked.size(); ++i) {
            if (asked[i] != name && !fits(asked[i], name)) continue;
            found[i] = true;
            is_chosen = true;
        }
        if (is_chosen) names.push_back(name);
    }
    for (size_t i = 0; i < asked.size(); ++i) {
        if (found[i]) continue;
        throw Error(Code::invalid_argument, fmt::format("{} has no tensor '{}'; run `tessera ckpt tree` to list all",
                                                        checkpoint.path(), asked[i]));
    }
    return names;
}

ShardedTensor sharded(const Manifest& manifest, const std::string& name) {
    const std::string& saved_name = manifest.saved_name(name);
    const SavedTensor& saved = *manifest.tensors.find(saved_name)->second;
    ShardedTensor tensor{name, "", saved.dtype, saved.shape, {}};
    if (saved_name != name) tensor.alias_of = saved_name;
    saved.for_each_piece(Box::whole(saved.shape), [&](const Box& box, int index) {
        const std::string& file = manifest.files[static_cast<size_t>(index)].name;
        const int rank = rank_of_file(file);  // -1: a torch.save file has no rank in its name
        tensor.shards.push_back({rank < 0 ? index : rank, file, box});
    });
    return tensor;
}

// As text, tensor by tensor: with many tensors a complete document takes long to build and to free.
void print_shards_json(const Checkpoint& checkpoint, const std::vector<std::string>& names) {
    Json json;
    json.set("path", checkpoint.path());
    json.set("world_size", checkpoint.manifest().world_size);
    ObjectText text(json);
    text.begin("tensors");
    for (const std::string& name : names) {
        const ShardedTensor tensor = sharded(checkpoint.manifest(), name);
        text.begin(tensor.name);
        text.member("dtype", name_of(tensor.dtype));
        text.member("shape", tensor.shape);
        if (!tensor.alias_of.empty()) text.member("alias_of", tensor.alias_of);
        text.begin_list("pieces");
        for (const Shard& shard : tensor.shards) {
            text.begin_item();
            text.member("rank", int64_t{shard.rank});
            text.member("file", shard.file);
            text.member("offsets", shard.box.offsets);
            text.member("sizes", shard.box.sizes);
            text.member("size_bytes", shard.box.numel() * static_cast<int64_t>(size_of(tensor.dtype)));
            text.end();
        }
        text.end();
        text.end();
        fmt::print("{}", text.take());
    }
    text.end();
    fmt::print("{}", text.finish());
}

void print_shards(const Checkpoint& checkpoint, const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) {
        const ShardedTensor tensor = sharded(checkpoint.manifest(), name);
        fmt::format_to(std::back_inserter(text), "{}  {} {}{}\n", printable(tensor.name), name_of(tensor.dtype),
                       tensor.shape.str(), tensor.alias_of.empty() ? "" : "  = " + printable(tensor.alias_of));
        size_t width = 0;
        for (const Shard& shard : tensor.shards) width = std::max(width, width_of(printable(shard.file)));
        for (const Shard& shard : tensor.shards) {
            const std::string file = printable(shard.file);
            text.append("  ").append(file).append(width - width_of(file) + 2, ' ');
            text.append(shard.box.str()).append("  ");
            text.append(size_text(shard.box.numel() * static_cast<int64_t>(size_of(tensor.dtype)))).append("\n");
        }
    }
    fmt::print("{}", text);
}

int show_shards(const std::string& path, const Arguments& arguments, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    const std::vector<std::string> names = chosen(*checkpoint, arguments.names);
    const bool draws = !arguments.svg.empty() || !arguments.html.empty();
    if (draws) {
        std::vector<ShardedTensor> tensors;
        for (const std::string& name : names) tensors.push_back(sharded(checkpoint->manifest(), name));
        if (!arguments.svg.empty()) write_drawing(arguments.svg, svg_of(*checkpoint, tensors));
        if (!arguments.html.empty()) write_drawing(arguments.html, html_of(*checkpoint, tensors));
    }
    if (output == Output::json) {
        print_shards_json(*checkpoint, names);
    } else if (!draws) {
        print_shards(*checkpoint, names);
    }
    return exit_sound;
}

}  // namespace

void add_shards(Command& ckpt) {
    const auto arguments = std::make_shared<Arguments>();
    Command command = add_command(
        ckpt, "shards", "Show which rank's file holds which part of each tensor", checkpoint_path_what,
        [arguments](const std::string& path, Output output) { return show_shards(path, *arguments, output); });
    command.add_option("names", arguments->names, "Tensors, or patterns such as 'model.*'; default: all");
    command.add_option("--svg", arguments->svg, "Draw the tensors and their parts by rank into this SVG file");
    command.add_option("--html", arguments->html, "The same as an HTML page");
}

}  // namespace tsr::cli
