// Tensors and values as one file of torch.save: a dict from their names.
#include <memory>

#include "checkpoint/export/archive.hpp"
#include "checkpoint/formats/torch_dcp/archive_writer.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

// The dict. Tied names have a tensor each, all of the same storage.
std::string object_of(const ExportSelection& selection) {
    std::map<std::string_view, size_t> storages;
    for (size_t i = 0; i < selection.entries.size(); ++i) storages.emplace(selection.entries[i].name, i);
    for (const auto& [name, target] : selection.tied) storages.emplace(name, storages.at(target));
    pickle::PickleWriter out;
    out.empty_dict();
    out.mark();
    for (const auto& [name, storage] : storages) {
        const TypedBox& box = selection.entries[storage].box;
        out.text(name);
        put_tensor(out, box.dtype, box.box.sizes, storage);
    }
    for (const auto& [name, value] : selection.values) {
        out.text(name);
        out.typed(value);
    }
    out.setitems();
    return out.finish();
}

}  // namespace

std::unique_ptr<ExportWriter> torch_save_export(const Checkpoint& source, const ExportSelection& selection,
                                                const std::string& directory, FileSystem& files) {
    ArchiveForm form;
    form.file_name = torch_save_file_name;
    form.folder = archive_folder;
    form.begin = [object = object_of(selection)](ZipWriter& zip) { begin_archive(zip, object); };
    form.entry_name = storage_entry;
    form.end = end_archive;
    return archive_export(source, selection, directory, files, std::move(form));
}

}  // namespace tsr
