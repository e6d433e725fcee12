#include "ckpt/slice.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/error.hpp"

namespace tsr::cli {

namespace {

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
    return text;
}

std::optional<int64_t> number(std::string_view text) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return value;
}

}  // namespace

Slice Slice::whole(const Dims& shape) {
    Slice slice{Box::whole(shape), {}};
    for (int d = 0; d < shape.ndim(); ++d) slice.kept.push_back(d);
    return slice;
}

Slice Slice::parse(std::string_view text, const Dims& shape) {
    const auto refuse = [&](std::string_view why) {
        throw Error(Code::invalid_argument,
                    fmt::format("the slice \"{}\" of a tensor of shape {}: {}", text, shape.str(), why));
    };
    Slice slice{Box::whole(shape), {}};
    std::string_view left = trimmed(text);
    if (left.size() >= 2 && left.front() == '[' && left.back() == ']') left = left.substr(1, left.size() - 2);
    int dim = 0;
    while (!trimmed(left).empty()) {
        const size_t comma = std::min(left.find(','), left.size());
        const std::string_view part = trimmed(left.substr(0, comma));
        left.remove_prefix(std::min(comma + 1, left.size()));
        if (dim == shape.ndim()) refuse("it has too many dimensions");
        const int64_t size = shape[dim];
        const size_t colon = part.find(':');
        if (colon == std::string_view::npos) {
            const auto index = number(part);
            if (!index) refuse(fmt::format("expected an index or begin:end, got \"{}\"", part));
            if (*index < -size || *index >= size)
                refuse(fmt::format("index {} is out of range for dimension {}", part, dim));
            slice.box.offsets[dim] = *index < 0 ? *index + size : *index;
            slice.box.sizes[dim] = 1;
        } else {
            const auto bound = [&](std::string_view bound_text, int64_t standing) {
                if (bound_text.empty()) return standing;
                const auto value = number(bound_text);
                if (!value) refuse(fmt::format("expected an index or begin:end, got \"{}\"", part));
                return std::clamp<int64_t>(*value < 0 ? *value + size : *value, 0, size);
            };
            const int64_t begin = bound(trimmed(part.substr(0, colon)), 0);
            const int64_t end = bound(trimmed(part.substr(colon + 1)), size);
            slice.box.offsets[dim] = begin;
            slice.box.sizes[dim] = std::max<int64_t>(end - begin, 0);
            slice.kept.push_back(dim);
        }
        ++dim;
    }
    for (; dim < shape.ndim(); ++dim) slice.kept.push_back(dim);
    return slice;
}

Dims Slice::shape() const {
    std::vector<int64_t> sizes;
    for (const int d : kept) sizes.push_back(box.sizes[d]);
    return Dims(sizes);
}

}  // namespace tsr::cli
