// The native format: safetensors files with checksums, and a manifest that says where each tensor is.
#include "checkpoint/formats/save_writer.hpp"

#include <utility>

#include "base/json.hpp"
#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/formats/native/rank_file_writer.hpp"
#include "checkpoint/io/blocks.hpp"

namespace tsr {

namespace {

std::vector<SavedFile> files_of(std::string_view report) {
    std::vector<SavedFile> files;
    const Json list = Json::parse(report, "a rank's report");
    for (const Json& entry : list.as_array()) {
        const Json::Array& fields = entry.as_array();
        files.push_back(
            {fields.at(0).as_string(), fields.at(1).as_int(), static_cast<uint32_t>(fields.at(2).as_int())});
    }
    return files;
}

class NativeSave final : public SaveWriter {
   public:
    explicit NativeSave(const SaveContent& content) : content_(content) {}

    std::vector<ByteRuns> lay_out(const State&) override {
        std::vector<ByteRuns> data;
        for (const auto& pieces : content_.plan.files) {
            headers_.push_back(make_header(pieces, content_.save_id));
            data.emplace_back(pieces, content_.copies);
        }
        block_crcs_.resize(headers_.size());
        return data;
    }

    void compute_checksums(size_t index, const ByteRuns& data, bool in_order, int threads) override {
        if (in_order) block_crcs_[index] = block_crcs(data, threads);  // else the header goes last
    }

    void write(FileSystem& files, size_t index, const ChunkSource& data, const WriteOptions& options) override {
        const std::string name = rank_file_name(content_.rank, static_cast<int>(index));
        written_.push_back(write_rank_file(files, content_.directory, name, std::move(headers_[index]), data,
                                           std::move(block_crcs_[index]), options));
    }

    std::string report() const override {
        Json::Array list;
        for (const SavedFile& file : written_) {
            list.push_back(Json(Json::Array{Json(file.name), Json(file.size), Json(int64_t{file.header_crc})}));
        }
        return Json(std::move(list)).dump();
    }

    void finish(FileSystem&, std::span<const std::string> reports, Manifest& manifest) override {
        std::vector<std::vector<SavedFile>> of_ranks;
        for (const std::string& report : reports) of_ranks.push_back(files_of(report));
        manifest.tensors = number_files(content_.plan, of_ranks, manifest.files);
        manifest.aliases = content_.aliases;
    }

   private:
    const SaveContent content_;
    std::vector<FileHeader> headers_;
    std::vector<std::vector<uint32_t>> block_crcs_;  // of each file, if they are known before it is written
    std::vector<SavedFile> written_;
};

}  // namespace

std::unique_ptr<SaveWriter> native_save_writer(const SaveContent& content) {
    return std::make_unique<NativeSave>(content);
}

}  // namespace tsr
