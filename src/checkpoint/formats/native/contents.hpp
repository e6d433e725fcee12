// The files of a native checkpoint whose manifest was read. Headers of rank files are read when first needed.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/formats/contents.hpp"
#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/formats/native/reader.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

class NativeContents final : public Contents {
   public:
    // `manifest` must outlive this.
    NativeContents(FileSystem& files, std::string path, const Manifest& manifest)
        : files_(files), path_(std::move(path)), manifest_(manifest), rank_files_(manifest.files.size()) {}

    bool read(std::span<const Wanted> wanted, const ReadOptions& options) const override;
    // The transfers that read() makes.
    [[nodiscard]] std::vector<Transfer> transfers_of(std::span<const Wanted> wanted) const;
    [[nodiscard]] std::vector<std::string> verify(Depth depth, const ByteProgress& progress,
                                                  const std::function<void()>& poll) const override;

   private:
    [[nodiscard]] const RankFile& file(int index) const;
    void compare_headers(std::vector<std::string>& faults) const;

    FileSystem& files_;
    std::string path_;
    const Manifest& manifest_;
    mutable std::mutex mutex_;
    mutable std::vector<std::unique_ptr<const RankFile>> rank_files_;  // guarded by mutex_; filled on demand
};

}  // namespace tsr
