// Writes what an unmodified PyTorch reads as a DCP checkpoint: one `__<rank>_0.distcp` a rank, in which every part of a
// tensor and every value is a torch.save archive, and the `.metadata` that tells where each is.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/file_system.hpp"
#include "checkpoint/native/plan.hpp"
#include "checkpoint/native/rank_file.hpp"
#include "checkpoint/native/writer.hpp"
#include "checkpoint/torch_dcp/metadata.hpp"
#include "checkpoint/value.hpp"

namespace tsr {

[[nodiscard]] std::string dcp_file_name(int rank);
[[nodiscard]] bool is_dcp_file_name(std::string_view name);

// Values as PyTorch names them: what is in dicts, and in lists that hold dicts, is named by its path.
[[nodiscard]] Values flattened(const Values& values);

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

// A whole file before it is written: archives around the pieces, whose memory it points to. Checksums stand before and
// behind the data, so they are computed here.
struct DcpImage {
    DcpFile file;
    ByteRuns data;
    std::deque<std::string> texts;  // between the pieces; data points to them
};
// `begin` is where it will stand in the file, if that has something before it.
[[nodiscard]] DcpImage make_dcp_image(const std::string& name, const std::vector<Piece>& pieces, const Values& values,
                                      int threads, int64_t begin = 0);
// Writes an image's data, or its copy, and fsyncs the file; its directory is not.
void write_dcp_file(FileSystem& files, const std::string& path, const ChunkSource& data, const WriteOptions& options);

// The `.metadata` of all files. Aliases stand for themselves and point to the same bytes.
[[nodiscard]] std::string dcp_metadata(const SavePlan& plan, const Aliases& aliases, const std::vector<DcpFile>& files);

}  // namespace tsr
