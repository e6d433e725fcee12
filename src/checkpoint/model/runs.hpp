// A part of a tensor on its way from a file into memory, as runs of bytes: the innermost dimensions that are contiguous
// on both sides make one run, the outer dimensions count the runs. Runs ascend in the file, whatever the storage order
// of its dimensions; elements stored later never begin before those stored earlier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/copy_streams.hpp"
#include "tensor/layout.hpp"

namespace tsr {

struct FilePlace {
    const Box* box = nullptr;       // the saved box
    const Dims* strides = nullptr;  // in elements, one per dimension; nullptr: row-major
    DType dtype = DType::f32;
    int64_t begin = 0;  // byte offset of the box's first element
};

struct MemoryPlace {
    const Box* box = nullptr;  // row-major
    DType dtype = DType::f32;  // may be another floating-point type than the file's; then elements are converted
    std::byte* data = nullptr;
    CopyStream* on = nullptr;  // the device of the memory; nullptr: the host
};

class Runs {
   public:
    // `part` is inside both boxes and not empty. UNSUPPORTED if the strides make elements overlap in the file.
    Runs(const Box& part, const FilePlace& file, const MemoryPlace& memory);

    [[nodiscard]] int64_t count() const { return count_; }
    // Whether the bytes of the file go to memory() as they are.
    [[nodiscard]] bool is_plain() const { return count_ == 1 && memory_dtype_ == file_dtype_; }
    [[nodiscard]] CopyStream* on() const { return on_; }         // the device of memory(); nullptr: the host
    [[nodiscard]] int64_t begin() const { return file_begin_; }  // bytes in the file
    [[nodiscard]] int64_t end() const { return file_end_; }
    [[nodiscard]] std::byte* memory() const { return memory_begin_; }  // of the first run

    // Copies the wanted elements among the file's bytes [begin, end), which are at `data`. No element straddles
    // `begin`. Returns when they are there, also on a device.
    void scatter(int64_t begin, int64_t end, const std::byte* data) const;

   private:
    template <class Visit>
    void for_each_part(int64_t begin, int64_t end, const std::byte* data, Visit&& visit) const;
    void move(const std::byte* from, std::byte* to, int64_t elements) const;
    void scatter_to_device(int64_t begin, int64_t end, const std::byte* data) const;
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
    CopyStream* on_ = nullptr;
};

}  // namespace tsr
