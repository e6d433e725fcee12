// The offset of each tensor's data follows from names, shapes and the texts around it, so the ranks write the data of
// their batches in place. Rank 0 writes the texts in between last, since they contain the checksums.
#include "checkpoint/export/archive.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/crc32.hpp"
#include "base/error.hpp"
#include "checkpoint/formats/torch_dcp/writer.hpp"

namespace tsr {

namespace {

constexpr int checksum_threads = 2;

// Of a part of a tensor, on its way to rank 0.
struct PartCrc {
    uint64_t tensor = 0;
    int64_t begin = 0;  // bytes of the tensor that come before it
    int64_t bytes = 0;
    uint64_t crc = 0;
};

class ArchiveExport final : public ExportWriter {
   public:
    ArchiveExport(const Checkpoint& source, const ExportSelection& selection, const std::string& directory,
                  FileSystem& files, ArchiveForm form)
        : source_(source),
          selection_(selection),
          path_(join(directory, form.file_name)),
          files_(files),
          form_(std::move(form)) {
        for (const ExportEntry& entry : selection.entries) boxes_.push_back(entry.box);
        for_each_text(std::vector<uint32_t>(boxes_.size(), 0), [&](const std::string& text, int64_t begin) {
            begins_.push_back(begin + static_cast<int64_t>(text.size()));
        });
    }

    void begin() override {
        const auto file = open_file(files_, path_, OpenMode::create);
        reserve_file(*file, path_, begins_.back());
    }

    std::string write(const Share& share) override {
        std::vector<PartCrc> done;
        std::unique_ptr<File> file;
        AlignedBuffer memory;
        int64_t batch = 0;
        for_each_own_batch(boxes_, share, batch, [&](std::span<const BatchPart> parts, int64_t bytes) {
            if (file == nullptr) file = open_file(files_, path_, OpenMode::write);
            if (memory.size() < static_cast<size_t>(bytes)) memory = AlignedBuffer(static_cast<size_t>(bytes));
            read_batch(source_, selection_.entries, parts, memory.data());
            const std::span<const std::byte> data = memory.first(static_cast<size_t>(bytes));
            const ByteRuns::Part whole{data};
            std::vector<CrcPlace> places;
            for (const BatchPart& part : parts) {
                places.push_back({part.begin, part.begin + TypedBox{part.box, boxes_[part.index].dtype}.size_bytes()});
            }
            const auto crcs = crcs_of(ByteRuns(std::span(&whole, 1)), places, checksum_threads);
            int64_t end = 0;
            for (size_t i = 0; i < parts.size(); ++i) {
                const int64_t begin = begin_of(parts[i]);
                const int64_t size = places[i].end - places[i].begin;
                write_all(*file, path_, data.subspan(static_cast<size_t>(places[i].begin), static_cast<size_t>(size)),
                          begin);
                done.push_back({parts[i].index, begin - begins_[parts[i].index], size, crcs[i]});
                end = begin + size;
            }
            const int64_t begin = begin_of(parts.front());
            file->start_writeback(begin, end - begin);
        });
        if (file != nullptr) sync_file(*file, path_);
        return {reinterpret_cast<const char*>(done.data()), done.size() * sizeof(PartCrc)};
    }

    std::vector<std::string> finish(std::span<const std::string> reports) override {
        const std::vector<uint32_t> crcs = joined(reports);
        const auto file = open_file(files_, path_, OpenMode::write);
        for_each_text(crcs, [&](const std::string& text, int64_t begin) {
            write_all(*file, path_, std::as_bytes(std::span(text)), begin);
        });
        sync_file(*file, path_);
        return {form_.file_name};
    }

   private:
    // Calls visit(text, begin) for the text before each tensor's data, and last for the text after all data.
    void for_each_text(std::span<const uint32_t> crcs,
                       const std::function<void(const std::string& text, int64_t begin)>& visit) const {
        ZipWriter zip(form_.folder, 0);
        int64_t begin = 0;
        if (form_.begin) form_.begin(zip);
        for (size_t i = 0; i < boxes_.size(); ++i) {
            (void)zip.add_data(form_.entry_name(i), boxes_[i].size_bytes(), crcs[i],
                               form_.entry_head ? form_.entry_head(i) : "");
            visit(zip.take_text(), begin);
            begin = zip.size_bytes();
        }
        if (form_.end) form_.end(zip);
        zip.finish();
        visit(zip.take_text(), begin);
    }

    int64_t begin_of(const BatchPart& part) const {
        return begins_[part.index] + part.first * static_cast<int64_t>(size_of(boxes_[part.index].dtype));
    }

    // The checksum of each tensor.
    std::vector<uint32_t> joined(std::span<const std::string> reports) const {
        std::vector<PartCrc> parts;
        for (const std::string& report : reports) {
            const size_t count = report.size() / sizeof(PartCrc);
            parts.resize(parts.size() + count);
            if (count > 0) std::memcpy(&parts[parts.size() - count], report.data(), report.size());
        }
        std::sort(parts.begin(), parts.end(), [](const PartCrc& a, const PartCrc& b) {
            return std::tie(a.tensor, a.begin) < std::tie(b.tensor, b.begin);
        });
        std::vector<uint32_t> crcs(boxes_.size(), 0);
        auto part = parts.begin();
        for (size_t i = 0; i < boxes_.size(); ++i) {
            int64_t bytes = 0;
            for (; part != parts.end() && part->tensor == i && part->begin == bytes; ++part) {
                crcs[i] = crc32_joined(crcs[i], static_cast<uint32_t>(part->crc), part->bytes);
                bytes += part->bytes;
            }
            if (bytes == boxes_[i].size_bytes()) continue;
            throw Error(Code::internal, fmt::format("the ranks wrote {} bytes of tensor '{}', expected {}", bytes,
                                                    selection_.entries[i].name, boxes_[i].size_bytes()));
        }
        return crcs;
    }

    const Checkpoint& source_;
    const ExportSelection& selection_;
    std::string path_;
    FileSystem& files_;
    ArchiveForm form_;
    std::vector<TypedBox> boxes_;
    std::vector<int64_t> begins_;  // of each tensor's data in the file, and at last the file's end
};

}  // namespace

std::unique_ptr<ExportWriter> archive_export(const Checkpoint& source, const ExportSelection& selection,
                                             const std::string& directory, FileSystem& files, ArchiveForm form) {
    return std::make_unique<ArchiveExport>(source, selection, directory, files, std::move(form));
}

}  // namespace tsr
