// The bytes of PyTorch's checkpoints: every part of a tensor is an entry of a torch.save archive, or a range of one. The
// archive is a whole file or a range of a .distcp file. Archives are opened when first needed, unless they come open.
// Their data is read in pieces by a few threads, directly into the destination where possible, and checked against the
// archive's checksums: each storage completely, when it is first read.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/formats/contents.hpp"
#include "checkpoint/formats/torch_dcp/metadata.hpp"
#include "checkpoint/formats/torch_dcp/torch_archive.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/io/open_files.hpp"

namespace tsr {

// One part of a tensor: the location of its archive and, once that was opened, of its bytes.
struct TorchPiece {
    struct Place {
        int64_t begin = 0;  // of its storage, in the file
        int64_t bytes = 0;
        std::optional<uint32_t> crc;  // nullopt if the archive has no checksums
        Dims strides;
        int64_t first = 0;  // index of its first element in the storage
    };
    Box box;
    DcpItem item;
    pickle::Ref node = pickle::no_ref;  // in the tree of an open archive; no_ref: the archive holds only this tensor
    std::optional<Place> place{};
    // The index of its first element in the contiguous tensor of one dimension `node`, of which it is a range.
    std::optional<int64_t> first{};
    // An f32 scalar that is a number in the pickle, not a tensor: there is nothing to read.
    std::optional<float> number{};
};

class TorchContents final : public Contents {
   public:
    struct Tensor {
        DType dtype = DType::f32;
        std::vector<TorchPiece> pieces;
    };
    using Tensors = std::map<std::string, Tensor, std::less<>>;

    // A DCP directory.
    TorchContents(FileSystem& files, const std::string& directory, DcpMetadata metadata);
    // torch.save files whose archives were opened.
    TorchContents(FileSystem& files, std::vector<std::string> paths, std::vector<TorchArchive> archives,
                  Tensors tensors);

    bool read(std::span<const Wanted> wanted, const ReadOptions& options) const override;
    [[nodiscard]] std::vector<std::string> verify(Depth depth, const ByteProgress& progress,
                                                  const std::function<void()>& poll) const override;
    [[nodiscard]] bool has_checksums() const override { return !lacks_checksums_; }

   private:
    [[nodiscard]] const std::string& path_of(int file) const { return paths_[static_cast<size_t>(file)]; }
    [[nodiscard]] OpenFiles open_files() const;
    [[nodiscard]] TorchPiece::Place locate(File& file, const std::string& name, const Tensor& tensor,
                                           const TorchPiece& piece) const;
    void check_items(std::vector<std::string>& faults) const;
    [[nodiscard]] const TorchArchive* archive_of(int file) const;

    FileSystem& files_;
    std::vector<std::string> paths_;  // of the files
    std::map<std::string, DcpItem, std::less<>> values_;
    std::vector<TorchArchive> archives_;                // of torch.save files, one each; empty for a DCP directory
    mutable std::atomic<bool> lacks_checksums_{false};  // true if one of the archives opened so far has none
    mutable std::mutex mutex_;
    mutable Tensors tensors_;  // pieces' places are guarded by mutex_
    mutable std::set<std::pair<int, int64_t>>
        sound_;  // guarded by mutex_; storages with a verified checksum: file, begin
};

}  // namespace tsr
