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
    // Stored in checkpoints alone: they are neither reduced nor converted.
    u16 = 11,
    u32 = 12,
    u64 = 13,
    f8_e4m3 = 14,  // "fn": without infinities, as PyTorch's float8_e4m3fn
    f8_e5m2 = 15,
    f8_e8m0 = 16,  // an exponent alone: the scales of microscaling formats
    c64 = 17,
    c128 = 18,
};

[[nodiscard]] bool is_known(DType dtype);
[[nodiscard]] bool is_floating(DType dtype);  // and converted among each other
[[nodiscard]] bool can_reduce(DType dtype);
[[nodiscard]] size_t size_of(DType dtype);                     // bytes an element
[[nodiscard]] std::string_view name_of(DType dtype);           // "f32"
[[nodiscard]] std::string_view safetensors_name(DType dtype);  // "F32"; manifests use these names too
[[nodiscard]] bool is_in_safetensors(DType dtype);             // whether that format has it: c128 it has not
[[nodiscard]] std::optional<DType> dtype_from_safetensors(std::string_view name);

}  // namespace tsr
