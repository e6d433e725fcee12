// Writes one rank file, its checksums computed on the way; the header goes last.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/io/stream.hpp"
#include "checkpoint/model/manifest.hpp"

namespace tsr {

// Writes `header` (whose checksums it fills in) and data into a new file. Returns what the manifest says of it; the file
// is fsynced, its directory is not. A file system that writes in order needs the checksums before the data: without
// `crcs`, which are its blocks', the stream is looked at twice.
[[nodiscard]] SavedFile write_rank_file(FileSystem& files, const std::string& directory, const std::string& name,
                                        FileHeader header, const ChunkSource& stream, std::vector<uint32_t> crcs = {},
                                        const WriteOptions& options = {});

}  // namespace tsr
