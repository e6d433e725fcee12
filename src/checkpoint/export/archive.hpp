// Tensors as the entries of one zip archive, which all ranks of an export fill together.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "checkpoint/export/export_writer.hpp"
#include "checkpoint/formats/torch_dcp/zip.hpp"

namespace tsr {

// What stands around the tensors' data; the same at each call, since it is asked for before and behind the data.
struct ArchiveForm {
    std::string file_name;
    std::string folder;                                   // of all entries; may be empty
    std::function<void(ZipWriter& zip)> begin;            // adds what comes first; may be empty, as the two below
    std::function<std::string(size_t entry)> entry_name;  // of a tensor, as the selection counts them
    std::function<std::string(size_t entry)> entry_head;  // what its entry holds before its data
    std::function<void(ZipWriter& zip)> end;
};

[[nodiscard]] std::unique_ptr<ExportWriter> archive_export(const Checkpoint& source, const ExportSelection& selection,
                                                           const std::string& directory, FileSystem& files,
                                                           ArchiveForm form);

}  // namespace tsr
