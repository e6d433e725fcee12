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

// The element at `from`, which need not be aligned; of integers. Of u64 less 2^63: all fit, in their order.
[[nodiscard]] int64_t integer_at(const std::byte* from, DType dtype);
// `to.size()` elements as doubles; integers beyond 2^53 are rounded, complex numbers are their absolute values.
void widen(const std::byte* from, DType dtype, std::span<double> to);

// How far two elements are apart.
[[nodiscard]] double gap_between(const std::byte* a, const std::byte* b, DType dtype);

// Typed JSON: exact, NaN and infinities tagged; a complex number is a list of two.
[[nodiscard]] Json element_json(const std::byte* from, DType dtype);
[[nodiscard]] std::string element_text(const std::byte* from, DType dtype);
// As few digits as read back as that element.
[[nodiscard]] std::string exact_text(const std::byte* from, DType dtype);
// Of a floating-point number, which it shows to be one.
[[nodiscard]] std::string with_point(std::string text);
[[nodiscard]] std::string number_text(double value);

// What all elements of a tensor are like, taken a piece at a time. Minimum, maximum, mean and norm are of the finite
// elements, of complex ones of their absolute values; integers' extremes are exact.
class Statistics {
   public:
    explicit Statistics(DType dtype) : dtype_(dtype) {}
    void add(const std::byte* data, int64_t count);

    [[nodiscard]] int64_t count() const { return count_; }
    [[nodiscard]] int64_t finite() const { return count_ - nan_ - infinite_; }
    [[nodiscard]] int64_t nan() const { return nan_; }
    [[nodiscard]] int64_t infinite() const { return infinite_; }
    [[nodiscard]] int64_t zero() const { return zero_; }
    // null where no element is finite.
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
    double min_ = 0;  // the four below are of finite elements, set with the first
    double max_ = 0;
    int64_t least_ = 0;
    int64_t greatest_ = 0;
    long double sum_ = 0;  // squares of doubles leave the range of a double
    long double squares_ = 0;
};

}  // namespace tsr::cli
