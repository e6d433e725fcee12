// Tensors as entries of one zip archive, which all ranks of an export write together.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "checkpoint/export/export_writer.hpp"
#include "checkpoint/formats/torch_dcp/zip.hpp"

namespace tsr {

// The texts around the tensors' data. Each function is called twice, before and after the data, and must return the
// same.
struct ArchiveForm {
    std::string file_name;
    std::string folder;                                   // of all entries; may be empty
    std::function<void(ZipWriter& zip)> begin;            // adds the first entries; may be empty, like the two below
    std::function<std::string(size_t entry)> entry_name;  // of a tensor, by its index in the selection
    std::function<std::string(size_t entry)> entry_head;  // text in its entry before its data
    std::function<void(ZipWriter& zip)> end;
};

[[nodiscard]] std::unique_ptr<ExportWriter> archive_export(const Checkpoint& source, const ExportSelection& selection,
                                                           const std::string& directory, FileSystem& files,
                                                           ArchiveForm form);

}  // namespace tsr
