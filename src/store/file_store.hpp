// A store in a directory that all ranks can reach, for jobs without a reachable port. Every key is a file, replaced
// atomically by rename; changes happen under a lock file. Keys of a job and epoch live in a sub-directory of their
// own, so that what a former job or round left behind is not seen. Who may write the directory may use the store:
// there is no token, and a directory that everybody may write is refused.
#pragma once

#include <memory>
#include <string>

#include "store/store.hpp"

namespace tsr {

// Throws IO, PERMISSION.
[[nodiscard]] std::shared_ptr<Store> open_file_store(const std::string& directory, const StoreOptions& options);

}  // namespace tsr
