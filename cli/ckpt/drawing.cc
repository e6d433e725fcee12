#include "ckpt/drawing.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "checkpoint/root/lease.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

// All lengths are in SVG's units, about a pixel each.
constexpr int columns = 4;
constexpr double cell_width = 264;
constexpr double cell_height = 166;
constexpr double most_width = 240;
constexpr double most_height = 96;
constexpr double margin = 20;
constexpr double heading = 62;
constexpr double legend_row = 20;
constexpr int legend_columns = 8;
constexpr size_t most_in_legend = 64;

template <class... Args>
void add(std::string& out, fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
}

std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : printable(text)) {
        switch (c) {
            case '&': out += "&amp;"; break;
            case '<': out += "&lt;"; break;
            case '>': out += "&gt;"; break;
            case '"': out += "&quot;"; break;
            default: out += c;
        }
    }
    return out;
}

// Gives neighbouring ranks distant hues.
std::string colour_of(int rank) {
    constexpr double golden_angle = 137.508;
    return fmt::format("hsl({:.0f},62%,{}%)", std::fmod(205 + rank * golden_angle, 360.0), rank % 2 == 0 ? 62 : 72);
}

// Keeps the end of a name, which says more than its beginning.
std::string shortened(const std::string& name) {
    constexpr size_t most = 36;
    if (name.size() <= most) return name;
    size_t begin = name.size() - most + 1;
    while (begin < name.size() && (name[begin] & 0xc0) == 0x80) ++begin;
    return "…" + name.substr(begin);
}

// The two dimensions to draw, down and across: cut dimensions first, then the first ones. -1: none.
std::pair<int, int> drawn_dims(const ShardedTensor& tensor) {
    std::vector<int> dims;
    for (const bool want_cut : {true, false}) {
        for (int d = 0; d < tensor.shape.ndim(); ++d) {
            const bool is_cut = std::any_of(tensor.shards.begin(), tensor.shards.end(),
                                            [&](const Shard& shard) { return shard.box.sizes[d] != tensor.shape[d]; });
            if (is_cut == want_cut && dims.size() < 2) dims.push_back(d);
        }
    }
    std::sort(dims.begin(), dims.end());
    if (dims.empty()) return {-1, -1};
    if (dims.size() == 1) return {-1, dims[0]};
    return {dims[0], dims[1]};
}

void draw_tensor(std::string& out, const ShardedTensor& tensor, double x, double y) {
    add(out, "<g transform=\"translate({:.1f},{:.1f})\">", x, y);
    add(out, "<title>{}</title><text class=\"n\" y=\"12\">{}</text>", escaped(tensor.name),
        escaped(shortened(tensor.name)));
    const int64_t bytes = tensor.shape.product() * static_cast<int64_t>(size_of(tensor.dtype));
    add(out, "<text class=\"d\" y=\"27\">{} {}, {}{}</text>", name_of(tensor.dtype), tensor.shape.str(),
        size_text(bytes), tensor.alias_of.empty() ? "" : escaped(", tied to " + shortened(tensor.alias_of)));
    const auto [down, across] = drawn_dims(tensor);
    const double rows = down < 0 ? 1 : static_cast<double>(tensor.shape[down]);
    const double columns_of = across < 0 ? 1 : static_cast<double>(tensor.shape[across]);
    // Very long tensors are drawn shorter, so that everything is visible.
    double aspect = std::clamp(columns_of / std::max(rows, 1.0), 0.4, 4.0);
    if (down < 0) aspect = across < 0 ? 1 : 8;
    const double width = std::min({most_width, most_height * aspect, across < 0 ? 24.0 : most_width});
    const double height = width / aspect;
    const double top = 36;
    for (const Shard& shard : tensor.shards) {
        const auto part = [&](int dim, double length) {
            if (dim < 0) return std::pair(0.0, length);
            const auto whole = static_cast<double>(tensor.shape[dim]);
            return std::pair(static_cast<double>(shard.box.offsets[dim]) / whole * length,
                             static_cast<double>(shard.box.sizes[dim]) / whole * length);
        };
        const auto [left, wide] = part(across, width);
        const auto [above, high] = part(down, height);
        add(out,
            "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"><title>{}\nrank {}: {}\n"
            "{}</title></rect>",
            left, top + above, wide, high, colour_of(shard.rank), escaped(tensor.name), shard.rank, shard.box.str(),
            escaped(shard.file));
        if (wide >= 18 && high >= 13) {
            add(out, "<text class=\"r\" x=\"{:.2f}\" y=\"{:.2f}\">{}</text>", left + wide / 2,
                top + above + high / 2 + 4, shard.rank);
        }
    }
    if (tensor.shards.empty()) add(out, "<text class=\"d\" y=\"{}\">no elements</text>", top + 12);
    out += "</g>\n";
}

}  // namespace

std::string svg_of(const Checkpoint& checkpoint, const std::vector<ShardedTensor>& tensors) {
    std::map<int, int64_t> bytes_of_rank;
    for (const ShardedTensor& tensor : tensors) {
        if (!tensor.alias_of.empty()) continue;
        for (const Shard& shard : tensor.shards) {
            bytes_of_rank[shard.rank] += shard.box.numel() * static_cast<int64_t>(size_of(tensor.dtype));
        }
    }
    std::vector<size_t> drawn(tensors.size());
    std::iota(drawn.begin(), drawn.end(), size_t{0});
    if (drawn.size() > most_drawn) {
        std::stable_sort(drawn.begin(), drawn.end(), [&](size_t a, size_t b) {
            return tensors[a].shape.product() * static_cast<int64_t>(size_of(tensors[a].dtype)) >
                   tensors[b].shape.product() * static_cast<int64_t>(size_of(tensors[b].dtype));
        });
        drawn.resize(most_drawn);
        std::sort(drawn.begin(), drawn.end());
    }
    const size_t in_legend = std::min(bytes_of_rank.size(), most_in_legend);
    const size_t legend_rows = (in_legend + legend_columns - 1) / legend_columns;
    const double first = heading + static_cast<double>(legend_rows) * legend_row + margin;
    const size_t rows = (drawn.size() + columns - 1) / columns;
    const double width = columns * cell_width + 2 * margin;
    const double height = first + static_cast<double>(rows) * cell_height;

    std::string out;
    add(out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
        "{1:.0f}\" "
        "role=\"img\">\n",
        width, height);
    out +=
        "<style>text{font:12px ui-monospace,monospace;fill:#1d2330}.t{font:600 17px system-ui,sans-serif}"
        ".d{fill:#5b6475;font-size:11px}.n{font-weight:600}.r{text-anchor:middle;font-size:11px}"
        "rect{stroke:#fff;stroke-width:1}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
    const Manifest& manifest = checkpoint.manifest();
    add(out, "<text class=\"t\" x=\"{}\" y=\"32\">{}</text>\n", margin, escaped(name_in_path(checkpoint.path())));
    add(out, "<text class=\"d\" x=\"{}\" y=\"52\">step {}, written by {}, {}{}</text>\n", margin, manifest.step,
        count_text(static_cast<size_t>(manifest.world_size), "rank"), count_text(tensors.size(), "tensor"),
        drawn.size() < tensors.size() ? fmt::format("; the {} largest are drawn", drawn.size()) : "");
    size_t place = 0;
    for (const auto& [rank, bytes] : bytes_of_rank) {
        if (place == in_legend) break;
        const double x = margin + static_cast<double>(place % legend_columns) * (columns * cell_width / legend_columns);
        const double y = heading + static_cast<double>(place / legend_columns) * legend_row;
        add(out,
            "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"13\" height=\"13\" fill=\"{}\"/>"
            "<text class=\"d\" x=\"{:.1f}\" y=\"{:.1f}\">rank {}: {}</text>\n",
            x, y, colour_of(rank), x + 18, y + 10.5, rank, size_text(bytes));
        ++place;
    }
    for (size_t i = 0; i < drawn.size(); ++i) {
        draw_tensor(out, tensors[drawn[i]], margin + static_cast<double>(i % columns) * cell_width,
                    first + static_cast<double>(i / columns) * cell_height);
    }
    out += "</svg>\n";
    return out;
}

std::string html_of(const Checkpoint& checkpoint, const std::vector<ShardedTensor>& tensors) {
    return fmt::format(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{}</title>\n"
        "<style>body{{margin:0;background:#fff}}svg{{display:block;margin:0 auto;max-width:100%;height:auto}}"
        "</style>\n</head>\n<body>\n{}</body>\n</html>\n",
        escaped(checkpoint.path()), svg_of(checkpoint, tensors));
}

void write_drawing(const std::string& path, const std::string& text) {
    if (!exists(posix_file_system(), parent_of(path))) {
        throw Error(Code::invalid_argument,
                    fmt::format("cannot write {}: directory {} does not exist", path, parent_of(path)));
    }
    const HeldDirectory held(posix_file_system(), parent_of(path));
    replace_text(held.files(), path, text, random_id().substr(0, 8));
}

}  // namespace tsr::cli
