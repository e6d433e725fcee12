// A device: its memory, streams, events and copies. Code above this interface is the same for every device and never
// touches device memory itself, except kernels, which each device has its own of.
//
// A stream is the device's own handle of a queue whose operations run in order, as in the C API: nullptr is the default
// stream, and the only one of the CPU, where an operation is done when its call returns. Calls on one stream come from
// one thread at a time; everything else is thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "base/clock.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

using StreamHandle = void*;

// A point in a stream: done when all operations that the stream had before it are.
class DeviceEvent {
   public:
    virtual ~DeviceEvent() = default;
    [[nodiscard]] virtual bool done() const = 0;
    // Returns when done. Throws TIMEOUT, INTERRUPTED or the device's error.
    virtual void wait(Deadline deadline) const = 0;
};

// Rows of bytes at equal distances.
struct ByteRows {
    std::byte* data = nullptr;
    size_t stride = 0;  // from one row to the next, in bytes
};
struct ConstByteRows {
    const std::byte* data = nullptr;
    size_t stride = 0;

    ConstByteRows(const std::byte* first, size_t distance) : data(first), stride(distance) {}
    ConstByteRows(const ByteRows& rows) : data(rows.data), stride(rows.stride) {}
};

class DeviceApi {
   public:
    virtual ~DeviceApi() = default;
    [[nodiscard]] virtual std::string_view name() const = 0;  // "CPU"

    // Memory with undefined content, aligned to 4096 bytes, whose pages are resident. Freed with its last reference.
    // Throws NO_MEMORY with the size.
    [[nodiscard]] virtual std::shared_ptr<std::byte> allocate(size_t size) = 0;

    // The same, zeroed, but pages become resident only when they are written.
    [[nodiscard]] virtual std::shared_ptr<std::byte> allocate_zeroed(size_t size) = 0;

    // The ranges must not overlap.
    virtual void copy(std::byte* to, const std::byte* from, size_t size, StreamHandle stream) = 0;
    virtual void copy_rows(ByteRows to, ConstByteRows from, size_t rows, size_t row_size, StreamHandle stream) = 0;
    virtual void zero(std::byte* to, size_t size, StreamHandle stream) = 0;

    [[nodiscard]] virtual std::unique_ptr<DeviceEvent> record(StreamHandle stream) = 0;
    // Makes the stream wait for an event of another.
    virtual void wait(StreamHandle stream, const DeviceEvent& event) = 0;

   protected:
    // Throws INVALID_ARGUMENT for a stream on a device that has none.
    static void refuse_stream(StreamHandle stream, std::string_view device);
};

[[nodiscard]] DeviceApi& cpu_device();
// Throws UNSUPPORTED for a device without an implementation in this library.
[[nodiscard]] DeviceApi& device_api(Device device);

}  // namespace tsr
