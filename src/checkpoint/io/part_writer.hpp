// Collects writes to an object, by several threads and at any offsets, into the parts that a storage takes. The thread
// that completes a part sends it, so memory holds only incomplete parts: one per thread, and those that wait for a
// header which is written last. An object that fits into one part is put at once.
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

    // The maximum size; if called at all, then before the first write.
    void expect(int64_t size);
    void write(std::span<const std::byte> from, int64_t offset);
    // Makes the object appear. False if not everything up to `size` was written (EINVAL).
    [[nodiscard]] bool finish(int64_t size);
    [[nodiscard]] int64_t end() const;  // of the data written so far

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
