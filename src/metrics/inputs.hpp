// The tensors of an update, checked and read block by block. A first pass checks every value, a second one adds: so an update
// that is refused has changed nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.hpp"
#include "tensor/tensor.hpp"

namespace tsr::metrics {

// On the CPU. `targets`, `weights` and `valid` are nullptr if there are none.
struct Inputs {
    const Tensor* predictions = nullptr;
    const Tensor* targets = nullptr;
    const Tensor* weights = nullptr;
    const Tensor* valid = nullptr;
};

enum class Values { none, numbers, labels };

// Of weights, and of numbers whose squares or products with weights are summed, so that none is infinite.
inline constexpr double largest_number = 0x1p256;

// What a metric takes: a row, which is a sample, has so many of each.
struct Form {
    Values predictions = Values::numbers;
    size_t prediction_columns = 1;
    Values targets = Values::none;
    size_t target_columns = 1;
    int64_t classes = 0;             // labels are 0 to classes - 1
    std::optional<int64_t> ignored;  // rows with this target are left out
    bool arithmetic = false;         // numbers are multiplied: they are at most largest_number
    std::string_view columns_from;   // the option that sets the number of columns; empty: it is always 1
    bool is_binary = false;          // other tasks have several columns
    std::string_view metric = {};    // its name, for messages
};

// Consecutive rows without those that are not valid. Labels of predictions and targets are int64, numbers double.
struct Block {
    size_t begin = 0;  // in the input
    size_t rows = 0;
    std::span<const double> predictions;
    std::span<const int64_t> predicted;
    std::span<const double> numbers;  // targets
    std::span<const int64_t> labels;  // targets
    std::span<const double> weights;  // empty: 1 each
};

// Memory that updates use again.
struct Scratch {
    std::vector<double> predictions, numbers, weights;
    std::vector<int64_t> predicted, labels;
    std::vector<uint32_t> kept;
};

class Batch {
   public:
    // Throws INVALID_ARGUMENT or UNSUPPORTED unless shapes and dtypes fit the form.
    Batch(const Inputs& inputs, const Form& form, Scratch& scratch);

    [[nodiscard]] size_t rows() const { return rows_; }
    // Calls body(block) for all rows.
    void for_each_block(FunctionRef<void(const Block&)> body) const;
    // Throws INVALID_ARGUMENT, which names the tensor, the row and the value, unless all values of valid rows are what the
    // form says: finite numbers, labels in range, finite weights that are not negative.
    void check_values() const;
    // Where row `row` of the last block is in the input, for messages: "[4]", or with a column "[4, 0]".
    [[nodiscard]] std::string place(const Block& block, size_t row, size_t column = 0, size_t columns = 1) const;
    // The predictions are f32, f16 or bf16, whose values f32 has.
    [[nodiscard]] bool is_single() const;
    // The distance from 1 to the next number of the predictions' dtype.
    [[nodiscard]] double epsilon() const;

   private:
    void read(size_t begin, size_t rows, Block& block) const;
    void check_block(const Block& block) const;
    // Where row `row` of the last block is in the input.
    [[nodiscard]] size_t source_row(const Block& block, size_t row) const;

    Inputs inputs_;
    Form form_;
    Scratch& scratch_;
    size_t rows_ = 0;
    size_t block_rows_ = 1;
};

}  // namespace tsr::metrics
