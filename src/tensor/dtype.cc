#include "tensor/dtype.hpp"

#include <array>

namespace tsr {

namespace {

struct Row {
    DType dtype;
    size_t size;
    bool floating;
    bool reduces;
    std::string_view name;
    std::string_view safetensors;
};

constexpr std::array<Row, 18> rows{{
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

const Row* find(DType dtype) {
    const auto index = static_cast<size_t>(static_cast<int32_t>(dtype)) - 1;
    return index < rows.size() ? &rows[index] : nullptr;
}

}  // namespace

bool is_known(DType dtype) { return find(dtype) != nullptr; }

bool is_floating(DType dtype) {
    const Row* row = find(dtype);
    return row != nullptr && row->floating;
}

bool can_reduce(DType dtype) {
    const Row* row = find(dtype);
    return row != nullptr && row->reduces;
}

size_t size_of(DType dtype) {
    const Row* row = find(dtype);
    return row != nullptr ? row->size : 0;
}

std::string_view name_of(DType dtype) {
    const Row* row = find(dtype);
    return row != nullptr ? row->name : "unknown";
}

std::string_view safetensors_name(DType dtype) {
    const Row* row = find(dtype);
    return row != nullptr ? row->safetensors : "";
}

bool is_in_safetensors(DType dtype) { return is_known(dtype) && dtype != DType::c128; }

std::optional<DType> dtype_from_safetensors(std::string_view name) {
    for (const Row& row : rows) {
        if (row.safetensors == name) return row.dtype;
    }
    return std::nullopt;
}

}  // namespace tsr
