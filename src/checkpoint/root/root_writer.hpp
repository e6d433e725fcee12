// Rank 0's side of a root: it owns the root by a lease, makes a save's directory, commits it by the manifest, keeps
// `latest` and `best`, and removes what retention does not keep and what dead writers left.
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
    // Makes `root`; INVALID_STATE if another live job saves there, INVALID_ARGUMENT if it is a checkpoint itself, lies in
    // one, or is laid out otherwise than a writer in `language` does it (none: whatever there is goes on).
    RootWriter(FileSystem& files, const std::string& root, const LeaseTimes& lease, Retention retention,
               std::string_view language);

    // Makes `directory`, a path in the root, and marks it as being written. Root and directory are held from here on, until
    // commit() has returned, or abandon(), one of which comes next.
    void begin(const std::string& directory);
    // Of the directory that was begun.
    [[nodiscard]] FileSystem& files() const { return save_->files(); }
    // Gives `manifest` its place in the order and writes it into `directory`: then the save exists. What follows, such as
    // retention, is convenience, and its failure a warning.
    void commit(const std::string& directory, Manifest manifest);
    // After a vote of no: what was written is of no use, and a full disk wants the room.
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
