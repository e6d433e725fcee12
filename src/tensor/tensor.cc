#include "tensor/tensor.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace tsr {

Dims::Dims(std::initializer_list<int64_t> values) : Dims(std::span<const int64_t>(values.begin(), values.size())) {}

Dims::Dims(std::span<const int64_t> values) {
    if (values.size() > static_cast<size_t>(max_ndim)) {
        throw Error(Code::invalid_argument, "a tensor of " + std::to_string(values.size()) + " dimensions; at most " +
                                                std::to_string(max_ndim) + " are supported");
    }
    std::copy(values.begin(), values.end(), values_.begin());
    ndim_ = static_cast<int>(values.size());
}

int64_t Dims::product() const {
    uint64_t result = 1;  // of a shape without elements the other sizes may be any, and wrap before the zero comes
    for (const int64_t size : *this) result *= static_cast<uint64_t>(size);
    return static_cast<int64_t>(result);
}

std::string Dims::str() const {
    std::string text = "[";
    for (int i = 0; i < ndim_; ++i) {
        if (i > 0) text += ", ";
        text += std::to_string((*this)[i]);
    }
    return text + "]";
}

void check_shape(const Dims& shape, DType dtype, const std::string& what) {
    auto bytes = static_cast<int64_t>(size_of(dtype));
    for (const int64_t size : shape) {
        if (size < 0) throw Error(Code::invalid_argument, what + " has a negative size in its shape " + shape.str());
    }
    for (const int64_t size : shape) {
        // Also for tensors without elements: the strides would overflow, and NumPy and PyTorch have no such tensor.
        if (size > 0 && __builtin_mul_overflow(bytes, size, &bytes)) {
            throw Error(Code::invalid_argument, what + " is larger than 2^63 bytes: shape " + shape.str());
        }
    }
}

}  // namespace tsr
