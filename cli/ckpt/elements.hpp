// Elements of tensors as numbers, as text and as JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/json.hpp"
#include "tensor/dtype.hpp"

namespace tsr::cli {

inline constexpr size_t elements_at_once = 4096;  // widened in one go, on the stack

[[nodiscard]] bool is_integer(DType dtype);  // booleans too
[[nodiscard]] bool is_complex(DType dtype);

// The integer element at `from`, which need not be aligned. For u64, the element minus 2^63, so that all fit in order.
[[nodiscard]] int64_t integer_at(const std::byte* from, DType dtype);
// `to.size()` elements as doubles; integers beyond 2^53 are rounded, complex numbers are their absolute values.
void widen(const std::byte* from, DType dtype, std::span<double> to);

// The absolute difference of two elements.
[[nodiscard]] double gap_between(const std::byte* a, const std::byte* b, DType dtype);

// Typed JSON: exact, NaN and infinities tagged; a complex number is a list of two.
[[nodiscard]] Json element_json(const std::byte* from, DType dtype);
[[nodiscard]] std::string element_text(const std::byte* from, DType dtype);
// The fewest digits that read back as the same element.
[[nodiscard]] std::string exact_text(const std::byte* from, DType dtype);
// The text of a floating-point number, with ".0" if it looks like an integer.
[[nodiscard]] std::string with_point(std::string text);
[[nodiscard]] std::string number_text(double value);

// Statistics of all elements of a tensor, added piece by piece. Minimum, maximum, mean and norm cover the finite
// elements, for complex numbers their absolute values; minimum and maximum of integers are exact.
class Statistics {
   public:
    explicit Statistics(DType dtype) : dtype_(dtype) {}
    void add(const std::byte* data, int64_t count);

    [[nodiscard]] int64_t count() const { return count_; }
    [[nodiscard]] int64_t finite() const { return count_ - nan_ - infinite_; }
    [[nodiscard]] int64_t nan() const { return nan_; }
    [[nodiscard]] int64_t infinite() const { return infinite_; }
    [[nodiscard]] int64_t zero() const { return zero_; }
    // null if no element is finite.
    [[nodiscard]] Json min() const;
    [[nodiscard]] Json max() const;
    [[nodiscard]] Json mean() const;
    [[nodiscard]] Json norm() const;

   private:
    [[nodiscard]] Json extreme(double value, int64_t integer) const;

    DType dtype_;
    int64_t count_ = 0;
    int64_t nan_ = 0;
    int64_t infinite_ = 0;
    int64_t zero_ = 0;
    double min_ = 0;  // these four cover finite elements and are set with the first
    double max_ = 0;
    int64_t least_ = 0;
    int64_t greatest_ = 0;
    long double sum_ = 0;  // squares of doubles leave the range of a double
    long double squares_ = 0;
};

}  // namespace tsr::cli
