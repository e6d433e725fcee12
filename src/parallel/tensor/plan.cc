#include "parallel/tensor/plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "base/error.hpp"
#include "base/wildcard.hpp"

namespace tsr {

namespace {

std::vector<std::string_view> parts_of(std::string_view name) {
    std::vector<std::string_view> parts;
    for (size_t begin = 0;;) {
        const size_t end = name.find('.', begin);
        parts.push_back(name.substr(begin, end - begin));
        if (end == std::string_view::npos) return parts;
        begin = end + 1;
    }
}

// Whether the pattern matches the name or, without the last part, the module that it belongs to.
bool matches(const std::vector<std::string_view>& pattern, const std::vector<std::string_view>& name) {
    if (pattern.size() != name.size() && pattern.size() + 1 != name.size()) return false;
    return std::ranges::equal(pattern, std::span(name).first(pattern.size()), fits);
}

Error wrong(const TpParam& param, const std::string& pattern, const std::string& why) {
    return Error(Code::invalid_argument, fmt::format("parameter \"{}\" {} cannot be cut as \"{}\" ({}): {}", param.name,
                                                     param.shape.str(), pattern, name_of(param.style), why));
}

// The dimension in which the boxes of a layout differ from the whole tensor; -1 if every box is the whole tensor.
int cut_of(const TpParam& param, const Layout& layout, const std::string& pattern) {
    int cut = -1;
    for (int rank = 0; rank < layout.world_size(); ++rank) {
        for (const Box& box : layout.boxes_of(rank)) {
            for (int dim = 0; dim < param.shape.ndim(); ++dim) {
                if (box.sizes[dim] == param.shape[dim] || dim == cut) continue;
                if (cut >= 0) throw wrong(param, pattern, "its layout cuts more than one dimension");
                cut = dim;
            }
        }
    }
    return cut;
}

int64_t length_of(std::span<const Range> ranges) {
    int64_t sum = 0;
    for (const Range& range : ranges) sum += range.end - range.begin;
    return sum;
}

void cut_as(TpParam& param, const Layout& layout, const std::string& pattern) {
    if (layout.world_size() != param.ranks || layout.shape() != param.shape) {
        throw wrong(param, pattern,
                    fmt::format("its layout is one of {} over {} ranks; it must be one of this parameter over the {} "
                                "ranks of the group",
                                layout.shape().str(), layout.world_size(), param.ranks));
    }
    param.cut = cut_of(param, layout, pattern);
    param.layout = layout;
    int64_t held = 0;
    for (int rank = 0; rank < param.ranks; ++rank) {
        const size_t boxes = layout.boxes_of(rank).size();
        if (param.cut > 0 && boxes > 1) {
            throw wrong(param, pattern,
                        fmt::format("rank {} has {} boxes along dimension {}; several boxes are supported "
                                    "along dimension 0 only",
                                    rank, boxes, param.cut));
        }
        if (param.cut < 0 && boxes != 1) throw wrong(param, pattern, fmt::format("rank {} has {} boxes", rank, boxes));
        if (param.cut >= 0 && param.replica(rank) == 0) held += length_of(param.ranges(rank));
    }
    if (param.cut >= 0 && held < param.shape[param.cut]) {
        throw wrong(param, pattern,
                    fmt::format("its layout leaves out {} of {} along dimension {}", param.shape[param.cut] - held,
                                param.shape[param.cut], param.cut));
    }
}

void need_dims(const TpParam& param, int least, int most, const std::string& pattern) {
    const int ndim = param.shape.ndim();
    if (ndim >= least && ndim <= most) return;
    const std::string need = least == most ? fmt::format("{}", least) : fmt::format("at least {}", least);
    throw wrong(param, pattern, fmt::format("it has {} dimensions; the style needs {}", ndim, need));
}

void apply(const TpRule& rule, TpParam& param, bool sums_row_bias) {
    param.style = rule.style;
    switch (rule.style) {
        case TpStyle::replicate: return;
        case TpStyle::column:
            need_dims(param, 1, max_ndim, rule.pattern);
            param.cut = 0;
            return;
        case TpStyle::row:
            need_dims(param, 1, max_ndim, rule.pattern);
            if (param.shape.ndim() > 1) {
                param.cut = 1;
            } else {
                param.sums_grad = sums_row_bias;
            }
            return;
        case TpStyle::vocabulary:
            need_dims(param, 2, 2, rule.pattern);
            param.cut = 0;
            return;
        case TpStyle::sequence: param.sums_grad = true; return;
        case TpStyle::shard:
            if (rule.dim < 0 || rule.dim >= param.shape.ndim()) {
                throw wrong(param, rule.pattern, fmt::format("it has no dimension {}", rule.dim));
            }
            param.cut = rule.dim;
            return;
        case TpStyle::layout:
            if (!rule.layout) throw wrong(param, rule.pattern, "the rule has no layout");
            return cut_as(param, *rule.layout, rule.pattern);
    }
    throw Error(Code::invalid_argument,
                fmt::format("rule \"{}\" has the style {}; see tessera/tp.h for those there are", rule.pattern,
                            static_cast<int>(rule.style)));
}

// Each rank gets the same number of complete heads.
void check_heads(const TpParam& param, const TpRule& rule) {
    if (rule.heads == 0 || param.cut < 0) return;
    const int64_t size = param.shape[param.cut];
    if (size % rule.heads != 0) {
        throw wrong(param, rule.pattern,
                    fmt::format("dimension {} has {} elements, which do not divide into {} heads", param.cut, size,
                                rule.heads));
    }
    if (rule.heads % param.ranks != 0) {
        throw wrong(param, rule.pattern,
                    fmt::format("{} heads do not divide over {} ranks; use a number of ranks that divides them, or a "
                                "layout in which ranks share heads",
                                rule.heads, param.ranks));
    }
}

// At most a few of the model's names, for an error about patterns.
std::string some_names(std::span<const TpParam> params) {
    constexpr size_t most = 8;
    std::vector<std::string> names;
    for (const TpParam& param : params.first(std::min(most, params.size()))) names.push_back('"' + param.name + '"');
    if (params.size() > most) names.push_back(fmt::format("and {} more", params.size() - most));
    return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::string_view name_of(TpStyle style) {
    switch (style) {
        case TpStyle::replicate: return "replicate";
        case TpStyle::column: return "column";
        case TpStyle::row: return "row";
        case TpStyle::vocabulary: return "vocabulary";
        case TpStyle::sequence: return "sequence";
        case TpStyle::shard: return "shard";
        case TpStyle::layout: return "layout";
    }
    return "unknown";
}

std::vector<Range> TpParam::ranges(int rank) const {
    if (!layout) return {chunk(shape[cut], ranks, rank)};
    std::vector<Range> ranges;
    for (const Box& box : layout->boxes_of(rank))
        ranges.push_back({box.offsets[cut], box.offsets[cut] + box.sizes[cut]});
    return ranges;
}

Dims TpParam::slice_shape(int rank) const {
    Dims slice = shape;
    if (cut >= 0) slice[cut] = length_of(ranges(rank));
    return slice;
}

std::vector<Box> TpParam::boxes(int rank) const {
    if (layout) return layout->boxes_of(rank);
    Box box = Box::whole(shape);
    if (cut >= 0) {
        const Range range = chunk(shape[cut], ranks, rank);
        box.offsets[cut] = range.begin;
        box.sizes[cut] = range.end - range.begin;
        if (box.sizes[cut] == 0) return {};
    }
    return {box};
}

void TpParam::append_whole(std::vector<Box>& boxes, int rank, const Box& part) const {
    if (part.empty()) return;
    if (cut < 0) return boxes.push_back(part);
    int64_t at = 0;  // of a range in the slice
    for (const Range& range : ranges(rank)) {
        const int64_t size = range.end - range.begin;
        const int64_t begin = std::max(part.offsets[cut], at);
        const int64_t end = std::min(part.offsets[cut] + part.sizes[cut], at + size);
        if (begin < end) {
            Box box = part;
            box.offsets[cut] = range.begin + begin - at;
            box.sizes[cut] = end - begin;
            boxes.push_back(box);
        }
        at += size;
    }
}

int TpParam::replica(int rank) const {
    if (cut < 0) return rank;
    if (!layout) return 0;
    const std::vector<Box> own = layout->boxes_of(rank);
    int replica = 0;
    for (int other = 0; other < rank; ++other) replica += layout->boxes_of(other) == own ? 1 : 0;
    return replica;
}

std::vector<TpParam> plan_slices(std::span<const NamedTensor> params, std::span<const TpRule> rules, int ranks,
                                 bool sums_row_bias) {
    std::vector<std::vector<std::string_view>> patterns;
    for (const TpRule& rule : rules) patterns.push_back(parts_of(rule.pattern));
    std::vector<bool> used(rules.size());
    std::vector<std::string> twice;
    std::vector<TpParam> plan;
    for (const auto& [name, tensor] : params) {
        TpParam& param = plan.emplace_back();
        param.name = name;
        param.shape = tensor.shape;
        param.dtype = tensor.dtype;
        param.ranks = ranks;
        const std::vector<std::string_view> parts = parts_of(name);
        std::optional<size_t> found;
        for (size_t i = 0; i < rules.size(); ++i) {
            if (!matches(patterns[i], parts)) continue;
            used[i] = true;
            if (found) {
                twice.push_back(
                    fmt::format("\"{}\" by \"{}\" and \"{}\"", name, rules[*found].pattern, rules[i].pattern));
                break;
            }
            found = i;
        }
        if (!found) continue;
        apply(rules[*found], param, sums_row_bias);
        check_heads(param, rules[*found]);
    }
    std::vector<std::string> unused;
    for (size_t i = 0; i < rules.size(); ++i) {
        if (!used[i]) unused.push_back('"' + rules[i].pattern + '"');
    }
    if (!unused.empty()) {
        throw Error(
            Code::invalid_argument,
            fmt::format("{} of the tensor-parallel plan match{} no parameter or module: {}; the parameters are {}",
                        unused.size() == 1 ? "a pattern" : fmt::format("{} patterns", unused.size()),
                        unused.size() == 1 ? "es" : "", fmt::join(unused, ", "), some_names(plan)));
    }
    if (!twice.empty()) {
        throw Error(Code::invalid_argument,
                    fmt::format("several patterns of the tensor-parallel plan match a parameter: {}; only one may",
                                fmt::join(twice, ", ")));
    }
    return plan;
}

std::vector<std::string> description(std::span<const TpParam> params) {
    std::vector<std::string> lines;
    for (size_t i = 0; i < params.size(); ++i) {
        const TpParam& param = params[i];
        std::string line = fmt::format("parameter {} \"{}\" {} {} ({})", i, param.name, name_of(param.dtype),
                                       param.shape.str(), name_of(param.style));
        if (param.cut >= 0) line += fmt::format(", cut along dimension {}", param.cut);
        if (param.layout) line += ": " + param.layout->str();
        if (param.sums_grad) line += ", gradient summed";
        lines.push_back(std::move(line));
    }
    return lines;
}

}  // namespace tsr
