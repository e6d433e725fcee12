#include "checkpoint/export/rewrite.hpp"

#include <fmt/core.h>

#include <map>
#include <optional>
#include <vector>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/root/root.hpp"
#include "checkpoint/root/root_writer.hpp"

namespace tsr {

namespace {

// A save's directory while one process writes it; removed again unless it is committed.
class NewSave {
   public:
    NewSave(FileSystem& files, std::string root, int64_t step)
        : files_(files), root_(std::move(root)), save_id_(random_uuid()), made_root_(!exists(files_, root_)) {
        writer_.emplace(files_, root_, LeaseTimes{}, Retention{}, std::string_view());
        directory_ = join(root_, step_directory_name(step, save_id_));
        writer_->begin(directory_);
        begun_ = true;
    }
    ~NewSave() {
        if (begun_ && !committed_) writer_->abandon(directory_);
        writer_.reset();
        if (made_root_ && !committed_) (void)files_.remove_directory(root_);
    }
    NewSave(const NewSave&) = delete;
    NewSave& operator=(const NewSave&) = delete;

    [[nodiscard]] FileSystem& files() const { return writer_->files(); }
    [[nodiscard]] const std::string& directory() const { return directory_; }
    [[nodiscard]] const std::string& save_id() const { return save_id_; }

    void commit(Manifest manifest) {
        manifest.save_id = save_id_;
        writer_->commit(directory_, std::move(manifest));
        committed_ = true;
    }

   private:
    FileSystem& files_;
    std::string root_;
    std::string save_id_;
    bool made_root_;
    std::optional<RootWriter> writer_;
    std::string directory_;
    bool begun_ = false;
    bool committed_ = false;
};

// What one new file holds: pieces under their new names, and where each comes from.
struct NewFile {
    std::vector<Piece> pieces;
    std::map<std::string_view, std::string_view> old_names;
};

std::string renamed(const std::function<std::string(const std::string&)>& rename, const std::string& name) {
    if (!rename) return name;
    std::string to = rename(name);
    check_name(to, fmt::format("the new name of '{}'", name));
    return to;
}

void refuse_second(const std::string& name, const std::string& from) {
    throw Error(Code::invalid_argument,
                fmt::format("two entries would be named '{}'; one of them is '{}'", name, from));
}

}  // namespace

std::string rewrite_checkpoint(const Checkpoint& source, const std::string& root, const RewriteOptions& options,
                               FileSystem& files) {
    const Manifest& from = source.manifest();
    const bool together = options.files == RewriteOptions::Files::together;
    Manifest manifest;
    manifest.step = std::max<int64_t>(from.step, 0);
    manifest.writer = from.writer;
    manifest.metrics = from.metrics;
    manifest.world_size = together ? 1 : from.world_size;
    std::map<std::string, std::string> old_name;  // of each new one
    for (const auto& [name, tensor] : from.tensors) {
        const std::string to = renamed(options.rename_tensor, name);
        auto saved = tensor;
        if (together) {
            saved = std::make_shared<const SavedTensor>(
                SavedTensor{tensor->dtype, Layout::replicated(tensor->shape, 1), tensor->shape, 1, {}, {}});
        }
        if (!old_name.emplace(to, name).second) refuse_second(to, name);
        manifest.tensors.emplace(to, std::move(saved));
    }
    for (const auto& [name, target] : from.aliases) {
        const std::string to = renamed(options.rename_tensor, name);
        if (old_name.contains(to)) refuse_second(to, name);
        if (!manifest.aliases.emplace(to, renamed(options.rename_tensor, target)).second) refuse_second(to, name);
    }
    for (const auto& [name, value] : from.values) {
        const std::string to = private_rank(name) ? name : renamed(options.rename_value, name);
        if (manifest.find(to) != nullptr) refuse_second(to, name);  // no state has a tensor and a value of one name
        if (!manifest.values.emplace(to, value).second) refuse_second(to, name);
    }
    if (together) {
        if (!manifest.tensors.empty()) manifest.files.push_back({rank_file_name(0, 0), 0, 0});
    } else {
        for (const SavedFile& file : from.files) {
            if (is_rank_file_name(file.name)) {
                manifest.files.push_back({file.name, 0, 0});
                continue;
            }
            throw Error(Code::unsupported,
                        fmt::format("{} is not a native checkpoint; convert it to one first", source.path()));
        }
    }

    std::vector<NewFile> contents(manifest.files.size());
    for (const auto& [name, tensor] : manifest.tensors) {
        const auto add = [&, &name = name, &tensor = *tensor](const Box& box, int index) {
            NewFile& file = contents[static_cast<size_t>(index)];
            file.pieces.push_back({name, tensor.dtype, std::make_shared<const Box>(box), nullptr});
            file.old_names.emplace(name, old_name.at(name));
        };
        // A tensor without elements is in some file, which the manifest does not name.
        if (tensor->shape.product() == 0) {
            add(Box::whole(tensor->shape), 0);
        } else {
            tensor->for_each_piece(Box::whole(tensor->shape), add);
        }
    }

    NewSave save(files, root, manifest.step);
    for (size_t index = 0; index < contents.size(); ++index) {
        NewFile& content = contents[index];
        SavedFile& file = manifest.files[index];
        order_pieces(content.pieces);
        FileHeader header = make_header(content.pieces, save.save_id());
        std::vector<StreamedPart> parts;
        for (const Piece& piece : content.pieces) {
            parts.push_back({std::string(content.old_names.at(piece.name)), {*piece.box, piece.dtype}});
        }
        StreamedFile out(save.files(), join(save.directory(), file.name), static_cast<int64_t>(header.text.size()),
                         header.data_bytes);
        out.append(source, parts, options.progress);
        header.set_crcs(out.crcs());
        out.finish(header.text);
        file.size = header.file_bytes();
        file.header_crc = crc32c(header.text);
    }
    save.commit(std::move(manifest));
    return save.directory();
}

}  // namespace tsr
