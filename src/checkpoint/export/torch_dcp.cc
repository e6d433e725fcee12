// Tensors as PyTorch's Distributed Checkpoint: each rank writes one file, in which every part of a batch is an archive,
// and rank 0 writes the `.metadata`. A tensor larger than a batch has several parts.
#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"
#include "checkpoint/export/export_writer.hpp"
#include "checkpoint/formats/torch_dcp/writer.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

constexpr int checksum_threads = 2;

// Appends images to one file, which is created with the first.
class DcpAppender {
   public:
    DcpAppender(FileSystem& files, const std::string& directory, std::string name) : files_(files) {
        out_.file.name = std::move(name);
        path_ = join(directory, out_.file.name);
    }

    void add(const std::vector<Piece>& pieces, const Values& values) {
        if (file_ == nullptr) file_ = open_file(files_, path_, OpenMode::create);
        const DcpImage image = make_dcp_image(out_.file.name, pieces, values, out_.file.size);
        const auto crcs = crcs_of(image.data, image.crc_places, checksum_threads);
        const auto data_with_crcs = with_crcs(image.data, image.crc_places, crcs);
        const int64_t size = image.data.size();
        std::vector<std::byte> copy;
        for (int64_t begin = 0; begin < size; begin += chunk_bytes) {
            const int64_t end = std::min(begin + chunk_bytes, size);
            const auto bytes = static_cast<size_t>(end - begin);
            const std::byte* data = data_with_crcs->contiguous(begin, end);
            if (data == nullptr) {
                copy.resize(static_cast<size_t>(chunk_bytes));
                data_with_crcs->copy(begin, end, copy.data());
                data = copy.data();
            }
            write_all(*file_, path_, std::span(data, bytes), out_.file.size + begin);
        }
        file_->start_writeback(out_.file.size, size);
        out_.file.size += size;
        out_.parts.insert(out_.parts.end(), image.file.parts.begin(), image.file.parts.end());
        out_.values.insert(out_.values.end(), image.file.values.begin(), image.file.values.end());
    }

    [[nodiscard]] std::string finish() {
        if (file_ == nullptr) return "";
        sync_file(*file_, path_);
        return out_.dump();
    }

   private:
    FileSystem& files_;
    std::string path_;
    std::unique_ptr<File> file_;
    DcpFile out_;
};

class TorchDcpExport final : public ExportWriter {
   public:
    TorchDcpExport(const Checkpoint& source, const ExportSelection& selection, std::string directory, FileSystem& files)
        : source_(source), selection_(selection), directory_(std::move(directory)), files_(files) {
        for (const ExportEntry& entry : selection.entries) boxes_.push_back(entry.box);
    }

    void begin() override {}

    std::string write(const Share& share) override {
        DcpAppender file(files_, directory_, dcp_file_name(share.rank));
        if (share.rank == 0) {
            // Tensors without bytes are in no batch.
            std::vector<Piece> empty;
            for (const ExportEntry& entry : selection_.entries) {
                if (!entry.box.box.empty()) continue;
                empty.push_back({entry.name, entry.box.dtype, std::make_shared<const Box>(entry.box.box), nullptr});
            }
            if (!empty.empty() || !selection_.values.empty()) file.add(empty, selection_.values);
        }
        int64_t batch = 0;
        AlignedBuffer memory;
        for_each_own_batch(boxes_, share, batch, [&](std::span<const BatchPart> parts, int64_t bytes) {
            if (memory.size() < static_cast<size_t>(bytes)) memory = AlignedBuffer(static_cast<size_t>(bytes));
            read_batch(source_, selection_.entries, parts, memory.data());
            std::vector<Piece> pieces;
            for (const BatchPart& part : parts) {
                const ExportEntry& entry = selection_.entries[part.index];
                pieces.push_back(
                    {entry.name, entry.box.dtype, std::make_shared<const Box>(part.box), memory.data() + part.begin});
            }
            file.add(pieces, {});
        });
        return file.finish();
    }

    std::vector<std::string> finish(std::span<const std::string> reports) override {
        DcpMetadata metadata;
        for (const ExportEntry& entry : selection_.entries) {
            metadata.tensors[entry.name] = {entry.box.dtype, entry.box.box.sizes, {}};
        }
        for (const std::string& report : reports) {
            if (report.empty()) continue;
            const DcpFile file = DcpFile::parse(report);
            const int number = static_cast<int>(metadata.files.size());
            metadata.files.push_back(file.file.name);
            for (const DcpFile::Part& part : file.parts) {
                metadata.tensors.at(part.name).chunks.push_back({part.box, {number, part.offset, part.length}});
            }
            for (const DcpFile::Part& part : file.values) {
                metadata.values[part.name] = {number, part.offset, part.length};
            }
        }
        for (const auto& [name, target] : selection_.tied) metadata.tensors[name] = metadata.tensors.at(target);
        write_new_text(files_, join(directory_, dcp_metadata_name), metadata.dump());
        std::vector<std::string> names = metadata.files;
        names.emplace_back(dcp_metadata_name);
        return names;
    }

   private:
    const Checkpoint& source_;
    const ExportSelection& selection_;
    std::string directory_;
    FileSystem& files_;
    std::vector<TypedBox> boxes_;
};

}  // namespace

std::unique_ptr<ExportWriter> torch_dcp_export(const Checkpoint& source, const ExportSelection& selection,
                                               const std::string& directory, FileSystem& files) {
    return std::make_unique<TorchDcpExport>(source, selection, directory, files);
}

}  // namespace tsr
