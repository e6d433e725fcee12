// Moves parts of saved pieces into memory: sorts the wanted parts of a file by blocks of 1 MiB, reads each block once,
// checks it, and either reads directly into the destination or scatters from a buffer. A few threads, bounded memory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/formats/contents.hpp"
#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/io/progress.hpp"
#include "tensor/layout.hpp"

namespace tsr {

// Copies the intersection of an entry's box and a box in memory, which must not be empty, from the file to memory.
struct Transfer {
    int file_number = 0;  // in the manifest
    const RankFile* file = nullptr;
    const FileEntry* entry = nullptr;
    const Box* memory_box = nullptr;  // borrowed, as the memory is
    DType memory_dtype =
        DType::f32;  // may be another floating-point type than the entry's; then elements are converted
    std::byte* memory = nullptr;
    CopyStream* on = nullptr;  // the device of the memory
};

// CORRUPT names file and byte range of the first block that fails.
void read_transfers(FileSystem& files, std::vector<Transfer> transfers, const ReadOptions& options);

// Reads all data of `file` and returns a message for each block with a wrong checksum. `progress`, if given, is called
// with the number of bytes read, from several threads; `poll` is called on the calling thread meanwhile.
[[nodiscard]] std::vector<std::string> check_blocks(FileSystem& files, const RankFile& file, int threads,
                                                    const ByteProgress& progress,
                                                    const std::function<void()>& poll = {});

}  // namespace tsr
