// Writes one rank file, computing its checksums on the way; the header is written last.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/io/stream.hpp"
#include "checkpoint/model/manifest.hpp"

namespace tsr {

// Writes `header` (whose checksums it fills in) and data into a new file. Returns its entry in the manifest. The file
// is fsynced, its directory is not. A file system that writes in order needs the checksums before the data: without
// `crcs`, the checksums of the blocks, the stream is read twice.
[[nodiscard]] SavedFile write_rank_file(FileSystem& files, const std::string& directory, const std::string& name,
                                        FileHeader header, const ChunkSource& stream, std::vector<uint32_t> crcs = {},
                                        const WriteOptions& options = {});

}  // namespace tsr
