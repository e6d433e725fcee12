// A store in a directory that all ranks can reach, for jobs without a reachable port. Every key is a file, replaced
// atomically by rename; changes are made under a lock file. The keys of each job and epoch have their own subdirectory,
// so that leftovers of an earlier job or round are not seen. Whoever can write to the directory can use the store:
// there is no token, and a world-writable directory is refused.
#pragma once

#include <memory>
#include <string>

#include "store/store.hpp"

namespace tsr {

// Throws IO, PERMISSION.
[[nodiscard]] std::shared_ptr<Store> open_file_store(const std::string& directory, const StoreOptions& options);

}  // namespace tsr
