// A device: its memory, streams, events and copies. Code above this interface is the same for every device and never
// touches device memory itself, except kernels, which each device has its own of.
//
// A stream is the device's own handle of a queue whose operations run in order, as in the C API: nullptr is the default
// stream, and the only one of the CPU, where an operation is done when its call returns. Calls on one stream come from
// one thread at a time; everything else is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/function_ref.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

namespace kernels {
enum class KernelId : unsigned;  // kernels/list.hpp
}

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
    // NOLINTNEXTLINE(google-explicit-constructor): as a pointer becomes one to const
    ConstByteRows(const ByteRows& rows) : data(rows.data), stride(rows.stride) {}
};

// A grid of threads that run a kernel. device/launch.hpp makes one.
struct Launch {
    kernels::KernelId kernel{};
    unsigned blocks = 0;
    unsigned threads = 0;             // of a block
    const void* arguments = nullptr;  // the kernel's struct, copied by the call
};

// Addresses of a device that stay reserved for the object's life, and show one piece of pages after another. Pages may be shown
// in several ranges. The device must be done with a range when it shows other pages, and when it ends.
class DeviceRange {
   public:
    virtual ~DeviceRange() = default;
    [[nodiscard]] virtual std::byte* data() const = 0;
    // Pages of the same device, all of them, from the beginning of the range on. They are at most of its size, and live as
    // long as they are shown.
    virtual void show(std::shared_ptr<void> pages) = 0;
};

class DeviceApi {
   public:
    virtual ~DeviceApi() = default;
    [[nodiscard]] virtual std::string_view name() const = 0;  // "CPU", "CUDA device 0"

    // Memory with undefined content, aligned to 4096 bytes, whose pages are resident. Freed with its last reference.
    // Throws NO_MEMORY with the size.
    [[nodiscard]] virtual std::shared_ptr<std::byte> allocate(size_t size) = 0;

    // The same, zeroed, but pages become resident only when they are written.
    [[nodiscard]] virtual std::shared_ptr<std::byte> allocate_zeroed(size_t size) = 0;

    // Memory of the host that copies to and from this device reach directly, so that they run beside the host. Aligned to 4096
    // bytes, undefined content. Throws NO_MEMORY with the size.
    [[nodiscard]] virtual std::shared_ptr<std::byte> allocate_host(size_t size) = 0;
    // The same for memory that is already there, until the last reference is gone; that memory must live longer.
    [[nodiscard]] virtual std::shared_ptr<void> register_host(std::byte* data, size_t size) = 0;

    // Memory for ranges to show, which has no address until one does, and undefined content. Both throw NO_MEMORY with the
    // size; UNSUPPORTED on the CPU, which has no ranges.
    [[nodiscard]] virtual std::shared_ptr<void> allocate_pages(size_t size);
    [[nodiscard]] virtual std::unique_ptr<DeviceRange> reserve(size_t size);

    // A queue of the device, destroyed with its last reference. nullptr on the CPU.
    [[nodiscard]] virtual std::shared_ptr<void> new_stream() = 0;
    // Runs `body` with this device as the thread's current one, for libraries that expect it there.
    virtual void in_use(FunctionRef<void()> body) = 0;
    // Throws INVALID_ARGUMENT for a stream of another device, or on a device that has none.
    virtual void check_stream(StreamHandle stream) = 0;
    // Whether a graph is being captured from the stream: what is enqueued there runs later, any number of times or never.
    [[nodiscard]] virtual bool is_captured(StreamHandle stream) = 0;
    // Throws INVALID_ARGUMENT if `data` cannot be memory of this device: "is memory of the host, not of CUDA device 0".
    virtual void check_memory(const std::byte* data) = 0;

    // To and from this device, or within it. The ranges must not overlap. Memory of the host that is not allocated or registered
    // above may make the call wait for the stream.
    virtual void copy(std::byte* to, const std::byte* from, size_t size, StreamHandle stream) = 0;
    virtual void copy_rows(ByteRows to, ConstByteRows from, size_t rows, size_t row_size, StreamHandle stream) = 0;
    virtual void zero(std::byte* to, size_t size, StreamHandle stream) = 0;

    // Throws INVALID_STATE for a captured stream, as do all calls that record an event: when it is done is not known.
    [[nodiscard]] virtual std::unique_ptr<DeviceEvent> record(StreamHandle stream) = 0;
    // The same, and when the stream gets there.
    [[nodiscard]] virtual std::unique_ptr<DeviceEvent> record_time(StreamHandle stream) = 0;
    // Between two such events that are done.
    [[nodiscard]] virtual std::chrono::nanoseconds elapsed(const DeviceEvent& from, const DeviceEvent& to) = 0;
    // Moves an event of this device, which nobody waits for, to where the stream is now.
    virtual void record_again(DeviceEvent& event, StreamHandle stream) = 0;
    // Makes the stream wait for an event of another.
    virtual void wait(StreamHandle stream, const DeviceEvent& event) = 0;

    // Throws UNSUPPORTED where this device has no kernels: the plug-in is not there or not for it. The CPU has none.
    virtual void require_kernels() = 0;
    // Throws INVALID_STATE for a captured stream: arguments, such as the number of a step, would stay as they are now.
    virtual void launch(const Launch& launch, StreamHandle stream) = 0;
};

[[nodiscard]] DeviceApi& cpu_device();
// Lives as long as the process. Throws UNSUPPORTED where CUDA cannot be used (no driver, too old a driver), INVALID_ARGUMENT
// for a number that no device has.
[[nodiscard]] DeviceApi& cuda_device(int index);
[[nodiscard]] int cuda_device_count();  // throws UNSUPPORTED
// What the driver knows of the devices, without occupying them. Throws UNSUPPORTED.
struct CudaFacts {
    // To a device whose memory this one reaches itself.
    struct Link {
        int device = 0;
        int rank = 0;          // among all pairs; 0: the fastest
        bool atomics = false;  // atomic operations too, as over NVLink
    };
    struct OfDevice {
        std::string name;
        std::string capability;  // "9.0"
        size_t memory = 0;       // bytes
        std::vector<Link> links;
    };
    std::string driver;  // "13.0": the newest CUDA that it supports
    std::vector<OfDevice> devices;
};
[[nodiscard]] CudaFacts cuda_facts();
// Of the library of kernels for CUDA devices. Throws UNSUPPORTED if there is none.
struct CudaKernels {
    std::string path;
    uint64_t fingerprint = 0;  // of its list of kernels
    std::string devices;       // "compute capability 8.0, 9.0, 10.0 and later ones"
};
[[nodiscard]] CudaKernels cuda_kernels();
[[nodiscard]] DeviceApi& device_api(Device device);

}  // namespace tsr
