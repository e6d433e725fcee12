// The bytes of safetensors files that are not a native checkpoint. The format has no checksums: checks cover only that
// the headers are sound and that every byte can be read.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/formats/contents.hpp"
#include "checkpoint/formats/safetensors/header.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

class SafetensorsContents final : public Contents {
   public:
    struct Source {
        std::string path;
        SafetensorsHeader header;
    };
    // In the order of the manifest's files.
    SafetensorsContents(FileSystem& files, std::vector<Source> sources) : files_(files), sources_(std::move(sources)) {}

    bool read(std::span<const Wanted> wanted, const ReadOptions& options) const override;
    [[nodiscard]] std::vector<std::string> verify(Depth depth, const ByteProgress& progress,
                                                  const std::function<void()>& poll) const override;
    [[nodiscard]] bool has_checksums() const override { return false; }

   private:
    [[nodiscard]] std::unique_ptr<File> open_unchanged(const Source& source, OpenMode mode) const;

    FileSystem& files_;
    std::vector<Source> sources_;
};

}  // namespace tsr
