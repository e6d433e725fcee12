// Moves parts of saved pieces into memory: sorts what is wanted of a file by blocks of 1 MiB, reads each block once,
// checks it, and either reads straight into the destination or scatters from a buffer. A few threads, bounded memory.
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

// What the box of an entry and one in memory have in common, which is something, goes from the file to there.
struct Transfer {
    int file_number = 0;  // in the manifest
    const RankFile* file = nullptr;
    const FileEntry* entry = nullptr;
    const Box* memory_box = nullptr;  // borrowed, as the memory is
    DType memory_dtype = DType::f32;  // may differ from the entry's among floating-point types: then it is converted
    std::byte* memory = nullptr;
};

// CORRUPT names file and byte range of the first block that fails.
void read_transfers(FileSystem& files, std::vector<Transfer> transfers, const ReadOptions& options);

// Reads all data of `file` and returns a message for each block that fails its checksum; `progress`, if there is one, is
// told the bytes that were read, from several threads; `poll` is called by the calling thread meanwhile.
[[nodiscard]] std::vector<std::string> check_blocks(FileSystem& files, const RankFile& file, int threads,
                                                    const ByteProgress& progress,
                                                    const std::function<void()>& poll = {});

}  // namespace tsr
