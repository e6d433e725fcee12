#include "checkpoint/export/streamed_file.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/clock.hpp"
#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "checkpoint/formats/native/rank_file.hpp"

namespace tsr {

StreamedFile::StreamedFile(FileSystem& files, std::string path, int64_t header_bytes, int64_t data_bytes)
    : path_(std::move(path)),
      file_(open_file(files, path_, OpenMode::create)),
      header_bytes_(header_bytes),
      data_bytes_(data_bytes) {
    reserve_file(*file_, path_, header_bytes + data_bytes);
}

void StreamedFile::add_to_crcs(std::span<const std::byte> data) {
    while (!data.empty()) {
        const int64_t within = done_ % block_bytes;
        const auto n = std::min(data.size(), static_cast<size_t>(block_bytes - within));
        if (within == 0) crcs_.push_back(0);
        crcs_.back() = crc32c(data.first(n), crcs_.back());
        data = data.subspan(n);
        done_ += static_cast<int64_t>(n);
    }
}

void StreamedFile::append(const Checkpoint& source, std::span<const StreamedPart> parts, const ByteProgress& progress) {
    std::vector<TypedBox> boxes;
    for (const StreamedPart& part : parts) boxes.push_back(part.box);
    const AlignedBuffer memory(static_cast<size_t>(largest_batch(boxes, default_batch_bytes)));
    for_each_batch(boxes, default_batch_bytes, [&](std::span<const BatchPart> batch, int64_t bytes) {
        poll_interrupt();
        std::vector<ReadPart> reads;
        for (const BatchPart& part : batch) {
            reads.push_back({parts[part.index].name, part.box, memory.data() + part.begin});
        }
        source.read(reads);
        const auto data = std::span<const std::byte>(memory.data(), static_cast<size_t>(bytes));
        const int64_t offset = header_bytes_ + done_;
        add_to_crcs(data);
        write_all(*file_, path_, data, offset);
        file_->start_writeback(offset, bytes);
        if (progress) progress(bytes);
    });
}

void StreamedFile::finish(std::string_view header) {
    if (static_cast<int64_t>(header.size()) != header_bytes_ || done_ != data_bytes_) {
        throw Error(Code::internal, fmt::format("{}: wrote {} + {} bytes instead of {} + {}", path_, header.size(),
                                                done_, header_bytes_, data_bytes_));
    }
    poll_interrupt();
    write_all(*file_, path_, std::as_bytes(std::span(header)), 0);
    sync_file(*file_, path_);
}

}  // namespace tsr
