// Writes what an unmodified PyTorch reads as a DCP checkpoint: one `__<rank>_0.distcp` a rank, in which every part of a
// tensor and every value is a torch.save archive, and the `.metadata` that tells where each is.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/formats/torch_dcp/metadata.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/io/stream.hpp"
#include "checkpoint/model/byte_runs.hpp"
#include "checkpoint/model/plan.hpp"
#include "checkpoint/model/value.hpp"

namespace tsr {

// Values as PyTorch names them: what is in dicts, and in lists that hold dicts, is named by its path, unless that can be no
// name, or is that of something else: of another value, or of a tensor or alias.
using NameTaken = std::function<bool(const std::string& name)>;
[[nodiscard]] Values flattened(const Values& values, const NameTaken& is_tensor);

// A file's part of the metadata, on its way to rank 0.
struct DcpFile {
    SavedFile file;
    struct Part {
        std::string name;
        Box box;
        int64_t offset = 0;
        int64_t length = 0;
    };
    std::vector<Part> parts;
    std::vector<Part> values;  // without boxes

    [[nodiscard]] std::string dump() const;
    [[nodiscard]] static DcpFile parse(std::string_view text);
};

// A piece's range in a file, and where in the file its checksum stands: before the data and behind it.
struct CrcPlace {
    int64_t begin = 0;
    int64_t end = 0;
    std::array<int64_t, 2> at{};
};

// A whole file before it is written: archives around the pieces, whose memory it points to. The checksums of the pieces
// are not in it: they are computed of the data, or of its copy, when it is written.
struct DcpImage {
    DcpFile file;
    ByteRuns data;
    std::deque<std::string> texts;  // between the pieces; data points to them
    std::vector<CrcPlace> crc_places;
};
// `begin` is where it will stand in the file, if that has something before it; the image's offsets of parts and values count
// from the file's begin, all else from its own.
[[nodiscard]] DcpImage make_dcp_image(const std::string& name, const std::vector<Piece>& pieces, const Values& values,
                                      int64_t begin = 0);
// One checksum a place, on `threads` threads. Waits for what of the data is not there yet.
[[nodiscard]] std::vector<uint32_t> crcs_of(const ChunkSource& data, const std::vector<CrcPlace>& places, int threads);
// The data with the checksums in their places; the data is borrowed.
[[nodiscard]] std::unique_ptr<ChunkSource> with_crcs(const ChunkSource& data, const std::vector<CrcPlace>& places,
                                                     const std::vector<uint32_t>& crcs);
// Writes an image's data, or its copy, with the checksums in their places, and fsyncs the file; its directory is not.
void write_dcp_file(FileSystem& files, const std::string& path, const ChunkSource& data,
                    const std::vector<CrcPlace>& places, const std::vector<uint32_t>& crcs,
                    const WriteOptions& options);

// The `.metadata` of all files. Aliases stand for themselves and point to the same bytes.
[[nodiscard]] std::string dcp_metadata(const SavePlan& plan, const Aliases& aliases, const std::vector<DcpFile>& files);

}  // namespace tsr
