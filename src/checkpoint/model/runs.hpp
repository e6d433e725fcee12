// A part of a tensor on its way from a file into memory, as runs of bytes: the innermost dimensions that follow each
// other on both sides make one run, the outer ones count runs. Runs ascend in the file, whatever order its dimensions
// are stored in; elements stored later never begin before those stored earlier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor/layout.hpp"

namespace tsr {

struct FilePlace {
    const Box* box = nullptr;       // what is saved there
    const Dims* strides = nullptr;  // in elements, one a dimension; nullptr: row-major
    DType dtype = DType::f32;
    int64_t begin = 0;  // the byte of the box's first element
};

struct MemoryPlace {
    const Box* box = nullptr;  // row-major
    DType dtype = DType::f32;  // may differ from the file's among floating-point types: then it is converted
    std::byte* data = nullptr;
};

class Runs {
   public:
    // `part` lies in both boxes and is not empty. UNSUPPORTED if strides make elements overlap in the file.
    Runs(const Box& part, const FilePlace& file, const MemoryPlace& memory);

    [[nodiscard]] int64_t count() const { return count_; }
    [[nodiscard]] bool converts() const { return memory_dtype_ != file_dtype_; }
    [[nodiscard]] int64_t begin() const { return file_begin_; }  // bytes in the file
    [[nodiscard]] int64_t end() const { return file_end_; }
    [[nodiscard]] std::byte* memory() const { return memory_begin_; }  // of the first run

    // Copies what is wanted of the file's bytes [begin, end), which stand at `data`. Elements do not straddle `begin`.
    void scatter(int64_t begin, int64_t end, const std::byte* data) const;

   private:
    struct Outer {
        int64_t size;
        int64_t file_stride;  // bytes
        int64_t memory_stride;
    };
    [[nodiscard]] int64_t file_offset(int64_t run) const;

    std::vector<Outer> outer_;  // innermost first; mostly none
    int64_t count_ = 1;
    int64_t run_bytes_ = 0;  // in the file
    int64_t file_begin_ = 0;
    int64_t file_end_ = 0;
    std::byte* memory_begin_ = nullptr;
    int64_t file_item_ = 1;
    int64_t memory_item_ = 1;
    DType file_dtype_;
    DType memory_dtype_;
};

}  // namespace tsr
