// PyTorch's Distributed Checkpoint: one file per rank, and a `.metadata` that says what is where.
#include "checkpoint/formats/save_writer.hpp"

#include <deque>
#include <utility>

#include "base/crc32c.hpp"
#include "checkpoint/formats/torch_dcp/writer.hpp"

namespace tsr {

namespace {

class TorchDcpSave final : public SaveWriter {
   public:
    explicit TorchDcpSave(const SaveContent& content) : content_(content) {}

    std::vector<ByteRuns> lay_out(const State& state) override {
        std::vector<Piece> pieces;
        for (const auto& of_file : content_.plan.files) pieces.insert(pieces.end(), of_file.begin(), of_file.end());
        const auto is_tensor = [&](const std::string& name) { return state.tensors().contains(name); };
        const Values values = content_.rank == 0 ? flattened(content_.values, is_tensor) : Values();
        DcpImage image = make_dcp_image(dcp_file_name(content_.rank), pieces, values, 0, content_.copies);
        file_ = std::move(image.file);
        texts_ = std::move(image.texts);
        crc_places_ = std::move(image.crc_places);
        return {std::move(image.data)};
    }

    void compute_checksums(size_t, const ByteRuns& data, bool, int threads) override {
        crcs_ = crcs_of(data, crc_places_, threads);
    }

    void write(FileSystem& files, size_t, const ChunkSource& data, const WriteOptions& options) override {
        if (crcs_.empty()) crcs_ = crcs_of(data, crc_places_, options.threads);
        write_dcp_file(files, join(content_.directory, file_.file.name), data, crc_places_, crcs_, options);
    }

    std::string report() const override { return file_.dump(); }

    void finish(FileSystem& files, std::span<const std::string> reports, Manifest& manifest) override {
        std::vector<DcpFile> of_ranks;
        for (const std::string& report : reports) of_ranks.push_back(DcpFile::parse(report));
        for (const DcpFile& file : of_ranks) manifest.files.push_back(file.file);
        // From here on PyTorch sees the directory as a checkpoint, and it is one: all data is durable.
        const std::string metadata = dcp_metadata(content_.plan, content_.aliases, of_ranks);
        replace_text(files, join(content_.directory, dcp_metadata_name), metadata, content_.save_id.substr(0, 8));
        manifest.format = torch_dcp_format;
        manifest.files.push_back(
            {std::string(dcp_metadata_name), static_cast<int64_t>(metadata.size()), crc32c(metadata)});
    }

   private:
    const SaveContent content_;
    DcpFile file_;
    std::deque<std::string> texts_;  // the bytes between the tensors; the file's data points to them
    std::vector<CrcPlace> crc_places_;
    std::vector<uint32_t> crcs_;
};

}  // namespace

std::unique_ptr<SaveWriter> torch_dcp_save_writer(const SaveContent& content) {
    return std::make_unique<TorchDcpSave>(content);
}

}  // namespace tsr
