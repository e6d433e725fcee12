// Writes torch.save archives: the object's description of a tensor, and the entries around the data.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/formats/torch_dcp/pickle_writer.hpp"
#include "checkpoint/formats/torch_dcp/zip.hpp"
#include "tensor/dtype.hpp"
#include "tensor/layout.hpp"

namespace tsr {

inline constexpr std::string_view archive_folder = "archive";

// The entry that holds the data of a storage.
[[nodiscard]] std::string storage_entry(size_t storage);
// A contiguous tensor that spans a whole storage.
void put_tensor(pickle::PickleWriter& out, DType dtype, const Dims& shape, size_t storage);
// The entries before and after those of the data.
void begin_archive(ZipWriter& zip, std::string_view object);
void end_archive(ZipWriter& zip);

}  // namespace tsr
