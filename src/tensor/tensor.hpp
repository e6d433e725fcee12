// A view of contiguous CPU or device memory with a dtype and a shape. A small value: copying it copies no data and
// allocates nothing, and it never owns its memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "tensor/dtype.hpp"

namespace tsr {

inline constexpr int max_ndim = 8;

// Sizes (or offsets) of up to max_ndim dimensions. Unused entries are zero.
class Dims {
   public:
    Dims() = default;
    Dims(std::initializer_list<int64_t> values);
    explicit Dims(std::span<const int64_t> values);  // throws INVALID_ARGUMENT beyond max_ndim

    [[nodiscard]] int ndim() const { return ndim_; }
    [[nodiscard]] int64_t operator[](int i) const { return values_[static_cast<size_t>(i)]; }
    [[nodiscard]] int64_t& operator[](int i) { return values_[static_cast<size_t>(i)]; }
    [[nodiscard]] const int64_t* data() const { return values_.data(); }
    [[nodiscard]] const int64_t* begin() const { return values_.data(); }
    [[nodiscard]] const int64_t* end() const { return values_.data() + ndim_; }
    [[nodiscard]] int64_t product() const;  // 1 for ndim 0; check_shape has excluded overflow
    [[nodiscard]] std::string str() const;  // "[128, 64]"

    friend bool operator==(const Dims&, const Dims&) = default;

   private:
    std::array<int64_t, max_ndim> values_{};
    int ndim_ = 0;
};

// Throws INVALID_ARGUMENT if a size is negative or the byte count overflows int64.
void check_shape(const Dims& shape, DType dtype, const std::string& what);

enum class DeviceType : int32_t { cpu = 1, cuda = 2 };

struct Device {
    DeviceType type = DeviceType::cpu;
    int index = 0;
    friend bool operator==(const Device&, const Device&) = default;
};

struct Tensor {
    std::byte* data = nullptr;
    Dims shape;
    DType dtype = DType::f32;
    Device device;

    [[nodiscard]] int64_t numel() const { return shape.product(); }
    [[nodiscard]] size_t size_bytes() const { return static_cast<size_t>(numel()) * size_of(dtype); }
    template <class T>
    [[nodiscard]] std::span<T> as() const {
        return {reinterpret_cast<T*>(data), static_cast<size_t>(numel())};
    }
};

// A 1-d CPU tensor over `elements`.
template <class T>
[[nodiscard]] Tensor tensor_of(std::span<T> elements, DType dtype) {
    return {reinterpret_cast<std::byte*>(elements.data()), Dims{static_cast<int64_t>(elements.size())}, dtype, {}};
}

}  // namespace tsr
