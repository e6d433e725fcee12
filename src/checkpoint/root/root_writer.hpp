// Rank 0's side of a root: owns the root by a lease, creates the directory of a save, commits it with the manifest,
// updates `latest` and `best`, and removes saves that retention does not keep and leftovers of dead writers.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/io/file_system.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/root/lease.hpp"
#include "checkpoint/root/retention.hpp"

namespace tsr {

class RootWriter {
   public:
    // Creates `root`. INVALID_STATE if another live job saves there; INVALID_ARGUMENT if it is a checkpoint itself, is
    // inside one, or has another layout than writers in `language` use (empty: any layout).
    RootWriter(FileSystem& files, const std::string& root, const LeaseTimes& lease, Retention retention,
               std::string_view language);

    // Creates `directory`, a path in the root, and marks it as being written. Root and directory are held until
    // commit() or abandon() returns; call one of them next.
    void begin(const std::string& directory);
    // The file system of the directory passed to begin().
    [[nodiscard]] FileSystem& files() const { return save_->files(); }
    // Gives `manifest` the next sequence number and writes it into `directory`: from then on the save exists. What
    // follows, such as retention, only logs a warning if it fails.
    void commit(const std::string& directory, Manifest manifest);
    // After a failed vote: removes what was written.
    void abandon(const std::string& directory) noexcept;

   private:
    void tidy(FileSystem& files, const std::string& newest);

    FileSystem& files_;
    std::string root_;
    std::string id_;
    LeaseTimes times_;
    Retention retention_;
    Lease lease_;
    std::optional<HeldDirectory> held_root_;  // while a save runs
    std::optional<HeldDirectory> save_;       // below it
};

}  // namespace tsr
