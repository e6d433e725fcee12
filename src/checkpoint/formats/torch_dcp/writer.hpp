// Writes DCP checkpoints for unmodified PyTorch: one `__<rank>_0.distcp` per rank, in which every part of a tensor and
// every value is a torch.save archive, and the `.metadata` with their locations.
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

// Values under PyTorch's names: the contents of dicts, and of lists that contain dicts, are named by their path, unless
// that is not a valid name or already the name of another value, a tensor or an alias.
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

// The range of a piece in a file, and the offsets in the file of its checksum: before and after the data.
struct CrcPlace {
    int64_t begin = 0;
    int64_t end = 0;
    std::array<int64_t, 2> at{};
};

// A complete file before it is written: archives around the pieces, whose memory it points to. The checksums of the
// pieces are missing: they are computed from the data, or its copy, when it is written.
struct DcpImage {
    DcpFile file;
    ByteRuns data;
    std::deque<std::string> texts;  // between the pieces; data points to them
    std::vector<CrcPlace> crc_places;
};
// `begin` is the image's offset in the file. Offsets of parts and values count from the beginning of the file, all
// others from the image's. `copies`: needed if a piece is on a device.
[[nodiscard]] DcpImage make_dcp_image(const std::string& name, const std::vector<Piece>& pieces, const Values& values,
                                      int64_t begin = 0, CopyStreams* copies = nullptr);
// One checksum per place, computed on `threads` threads. Waits for data that is not available yet.
[[nodiscard]] std::vector<uint32_t> crcs_of(const ChunkSource& data, const std::vector<CrcPlace>& places, int threads);
// The data with the checksums in their places; the data is borrowed.
[[nodiscard]] std::unique_ptr<ChunkSource> with_crcs(const ChunkSource& data, const std::vector<CrcPlace>& places,
                                                     const std::vector<uint32_t>& crcs);
// Writes an image's data, or its copy, with the checksums in their places. The file is fsynced, its directory is not.
void write_dcp_file(FileSystem& files, const std::string& path, const ChunkSource& data,
                    const std::vector<CrcPlace>& places, const std::vector<uint32_t>& crcs,
                    const WriteOptions& options);

// The `.metadata` of all files. Aliases have their own entries, which point to the same bytes.
[[nodiscard]] std::string dcp_metadata(const SavePlan& plan, const Aliases& aliases, const std::vector<DcpFile>& files);

}  // namespace tsr
