// Tensors as NumPy's npz: a zip archive of arrays, each in a .npy entry of its own.
#include <fmt/core.h>

#include <array>

#include "checkpoint/export/archive.hpp"

namespace tsr {

namespace {

constexpr size_t npy_alignment = 64;  // of an array's data within its entry

// NumPy's name; empty if it has no such dtype.
std::string_view numpy_name(DType dtype) {
    switch (dtype) {
        case DType::f16: return "<f2";
        case DType::f32: return "<f4";
        case DType::f64: return "<f8";
        case DType::i8: return "|i1";
        case DType::i16: return "<i2";
        case DType::i32: return "<i4";
        case DType::i64: return "<i8";
        case DType::u8: return "|u1";
        case DType::u16: return "<u2";
        case DType::u32: return "<u4";
        case DType::u64: return "<u8";
        case DType::boolean: return "|b1";
        case DType::c64: return "<c8";
        case DType::c128: return "<c16";
        case DType::bf16:
        case DType::f8_e4m3:
        case DType::f8_e5m2:
        case DType::f8_e8m0: return "";
    }
    return "";
}

// Version 1.0 of the header in numpy.lib.format.
std::string npy_header(const TypedBox& tensor) {
    const Dims& shape = tensor.box.sizes;
    std::string dims;
    for (int d = 0; d < shape.ndim(); ++d) dims += fmt::format("{}{}", d > 0 ? ", " : "", shape[d]);
    std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                   numpy_name(tensor.dtype), dims, shape.ndim() == 1 ? "," : "");
    constexpr std::string_view magic("\x93NUMPY\x01\x00", 8);
    const size_t used = magic.size() + 2 + text.size() + 1;
    text.append((npy_alignment - used % npy_alignment) % npy_alignment, ' ');
    text += '\n';
    std::string header(magic);
    header += static_cast<char>(text.size() & 0xff);
    header += static_cast<char>(text.size() >> 8);
    return header + text;
}

}  // namespace

void check_npz_entry(const std::string& name, DType dtype) {
    if (numpy_name(dtype).empty()) {
        throw Error(Code::unsupported,
                    fmt::format("tensor '{}' is {}, which NumPy does not support", name, name_of(dtype)));
    }
    // numpy.load() also finds 'x' under the key 'x.npy'.
    if (name.ends_with(".npy")) {
        throw Error(Code::unsupported,
                    fmt::format("tensor '{}' is named like a file: NumPy cannot distinguish it from '{}'", name,
                                name.substr(0, name.size() - 4)));
    }
}

std::unique_ptr<ExportWriter> npz_export(const Checkpoint& source, const ExportSelection& selection,
                                         const std::string& directory, FileSystem& files) {
    ArchiveForm form;
    form.file_name = "model.npz";
    form.entry_name = [&selection](size_t i) { return selection.entries[i].name + ".npy"; };
    form.entry_head = [&selection](size_t i) { return npy_header(selection.entries[i].box); };
    return archive_export(source, selection, directory, files, std::move(form));
}

}  // namespace tsr
