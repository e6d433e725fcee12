// A cache of open files for a read: each is opened on first use, and the least recently used ones are closed, as a
// checkpoint may have more files than a process may open. Thread-safe.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

class OpenFiles {
   public:
    static constexpr size_t max_kept = 64;  // besides those that callers hold

    // Opens the file with this number, or throws.
    using Opener = std::function<std::unique_ptr<File>(int number)>;
    explicit OpenFiles(Opener open) : open_(std::move(open)) {}

    // The file stays open as long as it is held.
    [[nodiscard]] std::shared_ptr<File> get(int number);

   private:
    const Opener open_;
    std::mutex mutex_;
    std::list<std::pair<int, std::shared_ptr<File>>> kept_;  // guarded by mutex_; most recently used first
};

}  // namespace tsr
