#include "parallel/pipeline/microbatches.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace tsr::pipeline {

int64_t rows_of(std::span<const Tensor> tensors, int microbatches, std::string_view what) {
    if (tensors.empty()) return 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Dims& shape = tensors[i].shape;
        if (shape.ndim() == 0) {
            throw Error(Code::invalid_argument,
                        fmt::format("tensor {} of the {} has no dimension to cut into micro-batches", i, what));
        }
        if (shape[0] != tensors[0].shape[0]) {
            throw Error(Code::invalid_argument, fmt::format("tensor {} of the {} has {} rows, tensor 0 has {}", i, what,
                                                            shape[0], tensors[0].shape[0]));
        }
    }
    const int64_t rows = tensors[0].shape[0];
    if (rows < microbatches) {
        throw Error(Code::invalid_argument, fmt::format("tensor 0 of the {} has {} rows, too few for {} micro-batches",
                                                        what, rows, microbatches));
    }
    return rows;
}

Rows rows_of_part(int64_t rows, int microbatches, int part) {
    const int64_t least = rows / microbatches;
    const int64_t more = rows % microbatches;
    return {part * least + std::min<int64_t>(part, more), least + (part < more ? 1 : 0)};
}

std::vector<Tensor> part_of(std::span<const Tensor> tensors, int microbatches, int part) {
    std::vector<Tensor> parts;
    parts.reserve(tensors.size());
    for (const Tensor& whole : tensors) {
        const auto [begin, count] = rows_of_part(whole.shape[0], microbatches, part);
        const size_t row_bytes = whole.size_bytes() / static_cast<size_t>(whole.shape[0]);
        Tensor& view = parts.emplace_back(whole);
        if (row_bytes > 0) view.data += static_cast<size_t>(begin) * row_bytes;
        view.shape[0] = count;
    }
    return parts;
}

std::vector<double> weights_of(std::span<const double> given, int64_t rows, int microbatches) {
    for (size_t i = 0; i < given.size(); ++i) {
        if (std::isfinite(given[i])) continue;
        throw Error(Code::invalid_argument,
                    fmt::format("the weight of micro-batch {} is {}; it must be finite", i, given[i]));
    }
    if (!given.empty()) return {given.begin(), given.end()};
    std::vector<double> weights(static_cast<size_t>(microbatches), 1.0 / microbatches);
    for (int i = 0; rows > 0 && i < microbatches; ++i) {
        weights[static_cast<size_t>(i)] =
            static_cast<double>(rows_of_part(rows, microbatches, i).count) / static_cast<double>(rows);
    }
    return weights;
}

}  // namespace tsr::pipeline
