// Copies between the host and devices, for code that needs the bytes of tensors on the host, such as checkpoints. Each device
// has one stream for them, which runs beside the program's own. They go through pinned slices, which are reused. Thread-safe,
// but for follow() and lead() of one device.
//
// A slice is not used again, and nothing is freed, while a copy from or into it may run: a wait that fails leaves copies
// behind, which are awaited before the next slice is taken, and at the end.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "device/device.hpp"

namespace tsr {

class CopyStreams;

// The copies of one device.
class CopyStream {
   public:
    CopyStream(CopyStreams& all, DeviceApi& device);

    // What is put here from now on waits for what `program`, a stream of the program, has now.
    void follow(StreamHandle program);
    void follow(const DeviceEvent& event);
    // What the stream that was followed last gets from now on waits for what has been put here. Neither waits on the host.
    void lead();

    // Puts a copy to or from the device.
    void copy(std::byte* to, const std::byte* from, size_t size);
    void copy_rows(ByteRows to, ConstByteRows from, size_t rows, size_t row_size);
    // Done when all that has been put here is.
    [[nodiscard]] std::shared_ptr<const DeviceEvent> record();
    void wait();  // for it, on the host
    // Waits for crc32c() of each range of the device's memory, up to 4 GiB long, after what has been put here. Needs kernels.
    [[nodiscard]] std::vector<uint32_t> checksums(std::span<const std::span<const std::byte>> ranges);
    // Pinned memory of slice_bytes, from the pool of `all`.
    [[nodiscard]] std::shared_ptr<std::byte> slice();

    [[nodiscard]] DeviceApi& device() const { return device_; }

   private:
    template <class Body>
    auto put(Body&& body);

    CopyStreams& all_;
    DeviceApi& device_;
    const std::shared_ptr<void> stream_;
    std::mutex mutex_;  // calls on a stream come from one thread at a time
    StreamHandle program_ = nullptr;
};

class CopyStreams {
   public:
    static constexpr size_t slice_bytes = size_t{4} << 20;

    // `timeout`: of each wait for copies.
    explicit CopyStreams(milliseconds timeout) : timeout_(timeout) {}
    ~CopyStreams();
    CopyStreams(const CopyStreams&) = delete;
    CopyStreams& operator=(const CopyStreams&) = delete;

    // nullptr for the CPU. Throws what device_api() throws.
    [[nodiscard]] CopyStream* of(Device device);

   private:
    friend class CopyStream;
    struct Pool {
        std::mutex mutex;
        std::vector<std::shared_ptr<std::byte>> free;  // guarded by mutex
    };

    [[nodiscard]] std::shared_ptr<std::byte> slice(DeviceApi& device);
    void settle();  // waits for the copies that failures left behind

    const milliseconds timeout_;
    std::mutex mutex_;
    std::map<int, std::unique_ptr<CopyStream>> streams_;  // guarded by mutex_; by the devices' numbers
    std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();
    std::atomic<unsigned> failures_{0};  // each may have left copies that still run;
    std::atomic<unsigned> settled_{0};   // those of the first so many do not
};

}  // namespace tsr
