// Cuts what is written into an object, by several threads and at any offsets, into the parts that a storage takes. A part
// is sent by the thread that completes it, so that memory holds only parts that are begun: one a thread, and those that
// wait for a header which comes last. What fits into one part is put whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "checkpoint/io/storage.hpp"

namespace tsr {

class PartWriter {
   public:
    PartWriter(Storage& storage, std::string key);

    // How many bytes will come at most; told before the first write, if at all.
    void expect(int64_t size);
    void write(std::span<const std::byte> from, int64_t offset);
    // The object appears: everything up to `size` was written. Else EINVAL: false.
    [[nodiscard]] bool finish(int64_t size);
    [[nodiscard]] int64_t end() const;  // of what was written

   private:
    struct Part {
        std::unique_ptr<std::byte[]> memory;
        int64_t filled = 0;  // bytes
    };

    Part& part_at(int64_t index);
    void send(int64_t index, const Part& part);
    Storage::Upload& upload();

    Storage& storage_;
    const std::string key_;
    int64_t expected_ = 0;
    int64_t part_bytes_;
    mutable std::mutex mutex_;
    std::map<int64_t, Part> parts_;            // guarded by mutex_; begun, not yet sent
    int64_t sent_ = 0;                         // guarded by mutex_; parts
    int64_t end_ = 0;                          // guarded by mutex_
    std::unique_ptr<Storage::Upload> upload_;  // guarded by mutex_ until it is made
};

}  // namespace tsr
