// Element types. Numbers are the TSR_DTYPE_ values of tessera/types.h; capi asserts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tsr {

enum class DType : int32_t {
    f16 = 1,
    bf16 = 2,
    f32 = 3,
    f64 = 4,
    i8 = 5,
    u8 = 6,
    i32 = 7,
    i64 = 8,
    i16 = 9,
    boolean = 10,
};

[[nodiscard]] bool is_known(DType dtype);
[[nodiscard]] bool is_floating(DType dtype);
[[nodiscard]] bool can_reduce(DType dtype);
[[nodiscard]] size_t size_of(DType dtype);                     // bytes an element
[[nodiscard]] std::string_view name_of(DType dtype);           // "f32"
[[nodiscard]] std::string_view safetensors_name(DType dtype);  // "F32"
[[nodiscard]] std::optional<DType> dtype_from_safetensors(std::string_view name);

}  // namespace tsr
