// The files that a read touches, each opened when it is first asked for and kept while others are not asked for more
// recently: a checkpoint may have more files than a process may have open. Any thread may ask.
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
    static constexpr size_t max_kept = 64;  // besides those that someone holds

    // What opens the file of a number; it throws if it cannot.
    using Opener = std::function<std::unique_ptr<File>(int number)>;
    explicit OpenFiles(Opener open) : open_(std::move(open)) {}

    // The file stays open as long as it is held.
    [[nodiscard]] std::shared_ptr<File> get(int number);

   private:
    const Opener open_;
    std::mutex mutex_;
    std::list<std::pair<int, std::shared_ptr<File>>> kept_;  // guarded by mutex_; the last asked for first
};

}  // namespace tsr
