#include "metrics/inputs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "base/refuse.hpp"
#include "tensor/convert.hpp"

namespace tsr::metrics {

namespace {

constexpr size_t block_numbers = 2048;
constexpr int64_t exact_integers = int64_t{1} << 53;  // in doubles

bool holds_labels(DType dtype) {
    return dtype == DType::i64 || dtype == DType::i32 || dtype == DType::u8 || dtype == DType::boolean;
}

void check_tensor(const Tensor& tensor, const char* what, Values values) {
    if (tensor.device.type != DeviceType::cpu) {
        throw Error(Code::unsupported,
                    fmt::format("{} are on CUDA device {}; metrics take tensors on the CPU: copy them there "
                                "first",
                                what, tensor.device.index));
    }
    const bool labels = holds_labels(tensor.dtype);
    if (values == Values::labels && !labels) {
        refuse("{} are {}; labels must be i64, i32, u8 or bool{}", what, name_of(tensor.dtype),
               is_floating(tensor.dtype) ? ": make labels of scores with a threshold or the largest score" : "");
    }
    if (values == Values::numbers && !labels && !is_floating(tensor.dtype)) {
        refuse("{} are {}; numbers must be f64, f32, f16, bf16, i64, i32, u8 or bool", what, name_of(tensor.dtype));
    }
}

// The rows of a tensor with that many columns. Columns are its last dimension; without them it has any shape.
size_t rows_of(const Tensor& tensor, const char* what, size_t columns, std::string_view columns_from) {
    const int ndim = tensor.shape.ndim();
    if (columns == 1) return static_cast<size_t>(tensor.numel());
    if (ndim == 0 || tensor.shape[ndim - 1] != static_cast<int64_t>(columns)) {
        refuse("{} are of shape {}; the last dimension must be {}, since {} is {}{}", what, tensor.shape.str(), columns,
               columns_from, columns,
               ndim < 2 ? "" : fmt::format(": set {} to {}", columns_from, tensor.shape[ndim - 1]));
    }
    return static_cast<size_t>(tensor.numel()) / columns;
}

template <class From, class To>
void read_as(const Tensor& tensor, size_t begin, std::span<To> to) {
    const From* from = reinterpret_cast<const From*>(tensor.data) + begin;
    for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<To>(from[i]);
}

template <class To>
void read_into(const Tensor& tensor, size_t begin, std::span<To> to) {
    if (to.empty()) return;
    switch (tensor.dtype) {
        case DType::i64: return read_as<int64_t>(tensor, begin, to);
        case DType::i32: return read_as<int32_t>(tensor, begin, to);
        case DType::u8:
        case DType::boolean: return read_as<uint8_t>(tensor, begin, to);
        default: break;
    }
    if constexpr (std::is_same_v<To, double>) {
        convert(tensor.data + begin * size_of(tensor.dtype), tensor.dtype, reinterpret_cast<std::byte*>(to.data()),
                DType::f64, static_cast<int64_t>(to.size()));
    }
}

// Keeps the rows at `kept`, in place.
template <class T>
std::span<T> compacted(std::span<T> values, std::span<const uint32_t> kept, size_t columns) {
    for (size_t i = 0; i < kept.size(); ++i) {
        const size_t from = kept[i] * columns;
        if (i != kept[i])
            std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(from), columns,
                        values.begin() + static_cast<std::ptrdiff_t>(i * columns));
    }
    return values.first(kept.size() * columns);
}

template <class T>
std::span<T> sized(std::vector<T>& memory, size_t count) {
    if (memory.size() < count) memory.resize(count);
    return std::span(memory).first(count);
}

// Also for NaN.
size_t first_beyond(std::span<const double> values, double largest) {
    bool within = true;
    for (const double value : values) within &= std::fabs(value) <= largest;
    if (within) return values.size();
    return static_cast<size_t>(
        std::ranges::find_if(values, [&](double value) { return !(std::fabs(value) <= largest); }) - values.begin());
}

size_t first_outside(std::span<const int64_t> labels, int64_t classes) {
    bool inside = true;
    for (const int64_t label : labels) inside &= static_cast<uint64_t>(label) < static_cast<uint64_t>(classes);
    if (inside) return labels.size();
    return static_cast<size_t>(
        std::ranges::find_if(labels, [&](int64_t label) { return label < 0 || label >= classes; }) - labels.begin());
}

// What a user of a binary metric whose predictions have a score for each class has to set.
std::string advice_on_task(const Form& form, const Dims& shape, size_t rows, size_t target_rows) {
    const int ndim = shape.ndim();
    if (!form.is_binary || ndim < 2 || rows != target_rows * static_cast<size_t>(shape[ndim - 1])) return {};
    return fmt::format("; for {} scores per sample set task to multiclass or multilabel, and classes to {}",
                       shape[ndim - 1], shape[ndim - 1]);
}

}  // namespace

Batch::Batch(const Inputs& inputs, const Form& form, Scratch& scratch)
    : inputs_(inputs), form_(form), scratch_(scratch) {
    const auto required = [&](const Tensor* tensor, const char* what) -> const Tensor& {
        if (tensor == nullptr) refuse("the metric {} needs {}", form.metric, what);
        return *tensor;
    };
    const Tensor& predictions = required(inputs.predictions, "predictions");
    check_tensor(predictions, "predictions", form.predictions);
    rows_ = rows_of(predictions, "predictions", form.prediction_columns, form.columns_from);
    const auto same_rows = [&](const Tensor& tensor, const char* what, size_t columns) {
        const size_t rows = rows_of(tensor, what, columns, form.columns_from);
        if (rows == rows_) return;
        refuse("predictions are of shape {} and {} of shape {}: {} and {} samples{}", predictions.shape.str(), what,
               tensor.shape.str(), rows_, rows, advice_on_task(form, predictions.shape, rows_, rows));
    };
    if (form.targets != Values::none) {
        const Tensor& targets = required(inputs.targets, "targets");
        check_tensor(targets, "targets", form.targets);
        same_rows(targets, "targets", form.target_columns);
    } else if (inputs.targets != nullptr) {
        refuse("the metric {} takes no targets", form.metric);
    }
    if (inputs.weights != nullptr) {
        check_tensor(*inputs.weights, "weights", Values::numbers);
        same_rows(*inputs.weights, "weights", 1);
    }
    if (inputs.valid != nullptr) {
        if (inputs.valid->dtype != DType::u8 && inputs.valid->dtype != DType::boolean) {
            refuse("valid is {}; it must be u8 or bool", name_of(inputs.valid->dtype));
        }
        check_tensor(*inputs.valid, "valid", Values::labels);
        same_rows(*inputs.valid, "valid", 1);
    }
    block_rows_ = std::max<size_t>(1, block_numbers / std::max(form.prediction_columns, form.target_columns));
}

bool Batch::is_single() const {
    const DType dtype = inputs_.predictions->dtype;
    return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

double Batch::epsilon() const {
    switch (inputs_.predictions->dtype) {
        case DType::f32: return 0x1p-23;
        case DType::f16: return 0x1p-10;
        case DType::bf16: return 0x1p-7;
        default: return 0x1p-52;
    }
}

void Batch::read(size_t begin, size_t rows, Block& block) const {
    block = {.begin = begin, .rows = rows};
    std::span<double> predictions, numbers, weights;
    std::span<int64_t> predicted, labels;
    const size_t columns = form_.prediction_columns;
    if (form_.predictions == Values::numbers) {
        read_into(*inputs_.predictions, begin * columns, predictions = sized(scratch_.predictions, rows * columns));
    } else {
        read_into(*inputs_.predictions, begin * columns, predicted = sized(scratch_.predicted, rows * columns));
    }
    const size_t target_columns = form_.target_columns;
    if (form_.targets == Values::numbers) {
        read_into(*inputs_.targets, begin * target_columns, numbers = sized(scratch_.numbers, rows * target_columns));
    } else if (form_.targets == Values::labels) {
        read_into(*inputs_.targets, begin * target_columns, labels = sized(scratch_.labels, rows * target_columns));
    }
    if (inputs_.weights != nullptr) read_into(*inputs_.weights, begin, weights = sized(scratch_.weights, rows));

    const auto* valid =
        inputs_.valid != nullptr ? reinterpret_cast<const uint8_t*>(inputs_.valid->data) + begin : nullptr;
    scratch_.kept.clear();
    if (valid != nullptr || form_.ignored) {
        for (size_t i = 0; i < rows; ++i) {
            const bool left_out = (valid != nullptr && valid[i] == 0) || (form_.ignored && labels[i] == *form_.ignored);
            if (!left_out) scratch_.kept.push_back(static_cast<uint32_t>(i));
        }
        const std::span<const uint32_t> kept = scratch_.kept;
        block.rows = kept.size();
        if (!predictions.empty()) predictions = compacted(predictions, kept, columns);
        if (!predicted.empty()) predicted = compacted(predicted, kept, columns);
        if (!numbers.empty()) numbers = compacted(numbers, kept, target_columns);
        if (!labels.empty()) labels = compacted(labels, kept, target_columns);
        if (!weights.empty()) weights = compacted(weights, kept, 1);
    }
    block.predictions = predictions;
    block.predicted = predicted;
    block.numbers = numbers;
    block.labels = labels;
    block.weights = weights;
}

void Batch::for_each_block(FunctionRef<void(const Block&)> body) const {
    Block block;
    for (size_t begin = 0; begin < rows_; begin += block_rows_) {
        read(begin, std::min(block_rows_, rows_ - begin), block);
        if (block.rows > 0) body(block);
    }
}

size_t Batch::source_row(const Block& block, size_t row) const {
    return block.begin + (scratch_.kept.empty() ? row : scratch_.kept[row]);
}

std::string Batch::place(const Block& block, size_t row, size_t column, size_t columns) const {
    const size_t source = source_row(block, row);
    return columns == 1 ? fmt::format("[{}]", source) : fmt::format("[{}, {}]", source, column);
}

void Batch::check_block(const Block& block) const {
    const auto finite = [&](std::span<const double> values, const char* what, size_t columns, double largest) {
        const size_t at = first_beyond(values, largest);
        if (at == values.size()) return;
        refuse("{}{} is {}; it must be finite{}", what, place(block, at / columns, at % columns, columns), values[at],
               std::isfinite(values[at]) ? " and at most 2^256 in magnitude" : "");
    };
    const auto inside = [&](std::span<const int64_t> labels, const char* what, size_t columns) {
        const size_t at = first_outside(labels, form_.classes);
        if (at == labels.size()) return;
        refuse("{}{} is {}; labels must be 0 to {}, since classes is {}", what,
               place(block, at / columns, at % columns, columns), labels[at], form_.classes - 1, form_.classes);
    };
    const double largest = form_.arithmetic ? largest_number : std::numeric_limits<double>::max();
    finite(block.predictions, "predictions", form_.prediction_columns, largest);
    finite(block.numbers, "targets", form_.target_columns, largest);
    finite(block.weights, "weights", 1, largest_number);
    inside(block.predicted, "predictions", form_.prediction_columns);
    inside(block.labels, "targets", form_.target_columns);
    const auto negative = std::ranges::find_if(block.weights, [](double weight) { return weight < 0; });
    if (negative != block.weights.end()) {
        refuse("weights{} is {}; it must not be negative",
               place(block, static_cast<size_t>(negative - block.weights.begin())), *negative);
    }
    const auto exact = [&](const Tensor* tensor, std::span<const double> values, const char* what, size_t columns) {
        if (tensor == nullptr || tensor->dtype != DType::i64 || values.empty()) return;
        const int64_t* integers = reinterpret_cast<const int64_t*>(tensor->data);
        // As doubles, 2^53 + 1 is 2^53: what is as large is compared as the integer that it was.
        constexpr auto below = static_cast<double>(exact_integers - 1);
        for (size_t at = 0; (at += first_beyond(values.subspan(at), below)) < values.size(); ++at) {
            const int64_t value = integers[source_row(block, at / columns) * columns + at % columns];
            if (value >= -exact_integers && value <= exact_integers) continue;
            refuse("{}{} is {}; integers must be within 2^53: convert {} to f64", what,
                   place(block, at / columns, at % columns, columns), value, what);
        }
    };
    exact(inputs_.predictions, block.predictions, "predictions", form_.prediction_columns);
    exact(inputs_.targets, block.numbers, "targets", form_.target_columns);
    exact(inputs_.weights, block.weights, "weights", 1);
}

void Batch::check_values() const {
    Block block;
    for (size_t begin = 0; begin < rows_; begin += block_rows_) {
        read(begin, std::min(block_rows_, rows_ - begin), block);
        if (block.rows > 0) check_block(block);
    }
}

}  // namespace tsr::metrics
