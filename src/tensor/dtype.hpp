// Element types. Numbers are the TSR_DTYPE_ values of tessera/types.h; capi asserts it.
#pragma once

#include <algorithm>
#include <array>
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
    // For storage in checkpoints only: neither reduced nor converted.
    u16 = 11,
    u32 = 12,
    u64 = 13,
    f8_e4m3 = 14,  // "fn": without infinities, as PyTorch's float8_e4m3fn
    f8_e5m2 = 15,
    f8_e8m0 = 16,  // exponent only: the scales of microscaling formats
    c64 = 17,
    c128 = 18,
};

// The properties of an element type.
struct DTypeTraits {
    DType dtype;
    size_t size;    // bytes per element
    bool floating;  // floating point; these can be converted to each other
    bool reduces;
    std::string_view name;         // "f32"
    std::string_view safetensors;  // "F32"; manifests use these names too
};

inline constexpr std::array<DTypeTraits, 18> dtype_traits{{
    {DType::f16, 2, true, true, "f16", "F16"},
    {DType::bf16, 2, true, true, "bf16", "BF16"},
    {DType::f32, 4, true, true, "f32", "F32"},
    {DType::f64, 8, true, true, "f64", "F64"},
    {DType::i8, 1, false, true, "i8", "I8"},
    {DType::u8, 1, false, true, "u8", "U8"},
    {DType::i32, 4, false, true, "i32", "I32"},
    {DType::i64, 8, false, true, "i64", "I64"},
    {DType::i16, 2, false, false, "i16", "I16"},
    {DType::boolean, 1, false, false, "bool", "BOOL"},
    {DType::u16, 2, false, false, "u16", "U16"},
    {DType::u32, 4, false, false, "u32", "U32"},
    {DType::u64, 8, false, false, "u64", "U64"},
    {DType::f8_e4m3, 1, false, false, "f8_e4m3", "F8_E4M3"},
    {DType::f8_e5m2, 1, false, false, "f8_e5m2", "F8_E5M2"},
    {DType::f8_e8m0, 1, false, false, "f8_e8m0", "F8_E8M0"},
    {DType::c64, 8, false, false, "c64", "C64"},
    {DType::c128, 16, false, false, "c128", "C128"},
}};
static_assert(std::ranges::is_sorted(dtype_traits, {}, &DTypeTraits::dtype) && dtype_traits.front().dtype == DType{1} &&
              dtype_traits.back().dtype == DType{dtype_traits.size()});

// For an unknown dtype: size 0, name "unknown". Inline, since every collective calls it several times.
[[nodiscard]] constexpr DTypeTraits traits_of(DType dtype) {
    const auto index = static_cast<size_t>(static_cast<int32_t>(dtype)) - 1;
    return index < dtype_traits.size() ? dtype_traits[index] : DTypeTraits{dtype, 0, false, false, "unknown", ""};
}
[[nodiscard]] constexpr bool is_known(DType dtype) { return traits_of(dtype).size > 0; }
[[nodiscard]] constexpr bool is_floating(DType dtype) { return traits_of(dtype).floating; }
[[nodiscard]] constexpr bool can_reduce(DType dtype) { return traits_of(dtype).reduces; }
[[nodiscard]] constexpr size_t size_of(DType dtype) { return traits_of(dtype).size; }
[[nodiscard]] constexpr std::string_view name_of(DType dtype) { return traits_of(dtype).name; }
[[nodiscard]] constexpr std::string_view safetensors_name(DType dtype) { return traits_of(dtype).safetensors; }
[[nodiscard]] bool is_in_safetensors(DType dtype);  // all but c128
[[nodiscard]] std::optional<DType> dtype_from_safetensors(std::string_view name);

}  // namespace tsr
