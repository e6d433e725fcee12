#include "tensor/dtype.hpp"

namespace tsr {

bool is_in_safetensors(DType dtype) { return is_known(dtype) && dtype != DType::c128; }

std::optional<DType> dtype_from_safetensors(std::string_view name) {
    for (const DTypeTraits& traits : dtype_traits) {
        if (traits.safetensors == name) return traits.dtype;
    }
    return std::nullopt;
}

}  // namespace tsr
