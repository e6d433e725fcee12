// A CUDA device through the driver. All objects belong to the device's primary context, which the CUDA runtime of the program
// (and of PyTorch, CuPy, NCCL) uses too, so that streams and addresses pass in both directions.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "device/cuda/driver.hpp"
#include "device/cuda/kernel_module.hpp"
#include "device/cuda/range.hpp"
#include "device/device.hpp"
#include "kernels/list.hpp"

namespace tsr {

namespace {

using namespace cuda;

Stream stream_of(StreamHandle stream) { return static_cast<Stream>(stream); }
Address address_of(const void* data) { return reinterpret_cast<Address>(data); }

// Makes a context the thread's current one while it exists.
class Current {
   public:
    Current(const Driver& functions, Context context) : functions_(functions), context_(context) {
        functions_.context_get(&before_);
        if (before_ != context_)
            check(functions_.context_set(context_), [&] { return std::string("making a CUDA context current"); });
    }
    ~Current() {
        if (before_ != context_) functions_.context_set(before_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Driver& functions_;
    const Context context_;
    Context before_ = nullptr;
};

// Lets this thread call what CUDA forbids to all threads while one of them captures a graph.
class BesideCapture {
   public:
    explicit BesideCapture(const Driver& functions) : functions_(functions) { functions_.thread_capture_mode(&mode_); }
    ~BesideCapture() { functions_.thread_capture_mode(&mode_); }
    BesideCapture(const BesideCapture&) = delete;
    BesideCapture& operator=(const BesideCapture&) = delete;

   private:
    const Driver& functions_;
    int mode_ = capture_relaxed;
};

class CudaEvent final : public DeviceEvent {
   public:
    CudaEvent(const Driver& functions, Context context, std::string device, unsigned flags)
        : functions_(functions), context_(context), device_(std::move(device)) {
        const Current current(functions_, context_);
        check(functions_.event_create(&event_, flags), [&] { return device_ + ": creating an event"; });
    }
    ~CudaEvent() override { functions_.event_destroy(event_); }  // fails only when the process ends, or after a fault
    CudaEvent(const CudaEvent&) = delete;
    CudaEvent& operator=(const CudaEvent&) = delete;

    [[nodiscard]] EventHandle handle() const { return event_; }

    [[nodiscard]] bool done() const override {
        const BesideCapture beside(functions_);
        const Result result = functions_.event_query(event_);
        if (result == not_ready) return false;
        check(result, [&] { return device_ + ": an operation on a stream failed"; });
        return true;
    }
    void wait(Deadline deadline) const override {
        if (done()) return;
        wait_until([this] { return done(); }, deadline, fmt::format("operations of {}", device_).c_str());
    }

   private:
    const Driver& functions_;
    const Context context_;
    const std::string device_;
    EventHandle event_ = nullptr;
};

class Cuda final : public DeviceApi {
   public:
    explicit Cuda(int index) : functions_(driver()), index_(index), name_(fmt::format("CUDA device {}", index)) {
        Number number = 0;
        check(functions_.device_get(&number, index), [&] { return name_; });
        check(functions_.primary_context_retain(&context_, number), [&] { return name_ + ": creating its context"; });
        number_ = number;
    }

    [[nodiscard]] std::string_view name() const override { return name_; }

    [[nodiscard]] std::shared_ptr<std::byte> allocate(size_t size) override {
        const Current current(functions_, context_);
        Address address = 0;
        check(functions_.allocate(&address, std::max(size, size_t{1})), [&] { return no_room(size, "memory"); });
        return {reinterpret_cast<std::byte*>(address), [this](std::byte* data) {  // NOLINT(performance-no-int-to-ptr)
                    const Current owner(functions_, context_);
                    functions_.free(address_of(data));
                }};
    }

    [[nodiscard]] std::shared_ptr<std::byte> allocate_zeroed(size_t size) override {
        auto memory = allocate(size);
        zero(memory.get(), size, nullptr);
        record(nullptr)->wait(Deadline::in(zero_deadline));
        return memory;
    }

    [[nodiscard]] std::shared_ptr<std::byte> allocate_host(size_t size) override {
        const Current current(functions_, context_);
        void* memory = nullptr;
        check(functions_.host_allocate(&memory, std::max(size, size_t{1}), host_portable),
              [&] { return no_room(size, "pinned memory"); });
        return {static_cast<std::byte*>(memory), [this](std::byte* data) {
                    const Current owner(functions_, context_);
                    functions_.host_free(data);
                }};
    }

    [[nodiscard]] std::shared_ptr<void> register_host(std::byte* data, size_t size) override {
        const Current current(functions_, context_);
        check(functions_.host_register(data, size, host_portable),
              [&] { return fmt::format("{}: registering {} bytes of the host", name_, size); });
        return {data, [this](void* registered) {
                    const Current owner(functions_, context_);
                    functions_.host_unregister(registered);
                }};
    }

    [[nodiscard]] std::shared_ptr<void> allocate_pages(size_t size) override {
        return make_pages(functions_, number_, size, [&] { return no_room(size, "memory"); });
    }
    [[nodiscard]] std::unique_ptr<DeviceRange> reserve(size_t size) override {
        return make_range(functions_, number_, name_, size);
    }

    [[nodiscard]] std::shared_ptr<void> new_stream() override {
        const Current current(functions_, context_);
        Stream stream = nullptr;
        check(functions_.stream_create(&stream, stream_non_blocking, 0), [&] { return name_ + ": creating a stream"; });
        return {stream, [this](void* handle) { functions_.stream_destroy(stream_of(handle)); }};
    }

    void in_use(FunctionRef<void()> body) override {
        const Current current(functions_, context_);
        body();
    }

    void check_stream(StreamHandle stream) override {
        if (stream == nullptr) return;
        const Current current(functions_, context_);
        Context context = nullptr;
        check(functions_.stream_context(stream_of(stream), &context), [&] { return name_ + ": looking at a stream"; });
        if (context == context_) return;
        throw Error(Code::invalid_argument,
                    fmt::format("a stream of another device was passed for a tensor on {}; pass a "
                                "stream of the tensor's device, or NULL",
                                name_));
    }

    // The default stream cannot be captured. Other errors are those of the next call too.
    [[nodiscard]] bool is_captured(StreamHandle stream) override {
        int status = capture_none;
        return stream != nullptr && functions_.stream_is_capturing(stream_of(stream), &status) == success &&
               status != capture_none;
    }

    void check_memory(const std::byte* data) override {
        const Current current(functions_, context_);
        unsigned type = 0;
        int index = -1;
        const Result known = functions_.pointer_attribute(&type, pointer_memory_type, address_of(data));
        if (known != invalid_value)
            check(known, [&] { return name_; });  // which is the answer for memory that the driver does not know
        if (known != success || type != memory_type_device) {
            throw Error(Code::invalid_argument, fmt::format("is memory of the host, not of {}", name_));
        }
        check(functions_.pointer_attribute(&index, pointer_device_ordinal, address_of(data)), [&] { return name_; });
        if (index == index_) return;
        throw Error(Code::invalid_argument, fmt::format("is memory of CUDA device {}, not of {}", index, name_));
    }

    void copy(std::byte* to, const std::byte* from, size_t size, StreamHandle stream) override {
        if (size == 0) return;
        const Current current(functions_, context_);
        check(functions_.copy(address_of(to), address_of(from), size, stream_of(stream)),
              [&] { return fmt::format("{}: copying {} bytes", name_, size); });
    }

    void copy_rows(ByteRows to, ConstByteRows from, size_t rows, size_t row_size, StreamHandle stream) override {
        if (rows == 0 || row_size == 0) return;
        if (to.stride == row_size && from.stride == row_size) return copy(to.data, from.data, rows * row_size, stream);
        if (std::max(to.stride, from.stride) > max_pitch) {
            for (size_t row = 0; row < rows; ++row) {
                copy(to.data + row * to.stride, from.data + row * from.stride, row_size, stream);
            }
            return;
        }
        const Current current(functions_, context_);
        Copy2D request;
        request.from_type = request.to_type = memory_type_unified;
        request.from = address_of(from.data);
        request.from_pitch = from.stride;
        request.to = address_of(to.data);
        request.to_pitch = to.stride;
        request.width = row_size;
        request.height = rows;
        check(functions_.copy_rows(&request, stream_of(stream)),
              [&] { return fmt::format("{}: copying {} rows of {} bytes", name_, rows, row_size); });
    }

    void zero(std::byte* to, size_t size, StreamHandle stream) override {
        if (size == 0) return;
        const Current current(functions_, context_);
        check(functions_.set_bytes(address_of(to), 0, size, stream_of(stream)),
              [&] { return fmt::format("{}: zeroing {} bytes", name_, size); });
    }

    [[nodiscard]] std::unique_ptr<DeviceEvent> record(StreamHandle stream) override {
        return record_with(event_disable_timing, stream);
    }
    [[nodiscard]] std::unique_ptr<DeviceEvent> record_time(StreamHandle stream) override {
        return record_with(event_default, stream);
    }

    [[nodiscard]] std::chrono::nanoseconds elapsed(const DeviceEvent& from, const DeviceEvent& to) override {
        float ms = 0;
        const Current current(functions_, context_);
        check(functions_.event_elapsed(&ms, dynamic_cast<const CudaEvent&>(from).handle(),
                                       dynamic_cast<const CudaEvent&>(to).handle()),
              [&] { return name_ + ": the time between two events"; });
        return std::chrono::nanoseconds{std::llround(static_cast<double>(ms) * 1e6)};
    }

    void record_again(DeviceEvent& event, StreamHandle stream) override {
        refuse_capture(stream);
        const Current current(functions_, context_);
        check(functions_.event_record(dynamic_cast<const CudaEvent&>(event).handle(), stream_of(stream)),
              [&] { return name_ + ": recording an event"; });
    }

    void wait(StreamHandle stream, const DeviceEvent& event) override {
        const auto* other = dynamic_cast<const CudaEvent*>(&event);
        if (other == nullptr) return;  // of the CPU: done
        const Current current(functions_, context_);
        check(functions_.stream_wait(stream_of(stream), other->handle(), 0),
              [&] { return name_ + ": waiting for an event"; });
    }

    void require_kernels() override {
        const Current current(functions_, context_);
        kernels_.load();
    }

    void launch(const Launch& launch, StreamHandle stream) override {
        refuse_capture(stream);
        const Current current(functions_, context_);
        const Function function = kernels_.function(launch.kernel);
        std::array arguments{const_cast<void*>(launch.arguments)};
        check(functions_.launch_kernel(function, launch.blocks, 1, 1, launch.threads, 1, 1, 0, stream_of(stream),
                                       arguments.data(), nullptr),
              [&] { return fmt::format("{}: launching {}", name_, kernels::info_of(launch.kernel).symbol); });
    }

   private:
    static constexpr milliseconds zero_deadline{60000};

    void refuse_capture(StreamHandle stream) {
        if (!is_captured(stream)) return;
        throw Error(
            Code::invalid_state,
            fmt::format("{}: the stream is being captured into a CUDA graph, which can have only collectives that "
                        "return no work; do this outside the capture",
                        name_));
    }

    [[nodiscard]] std::unique_ptr<DeviceEvent> record_with(unsigned flags, StreamHandle stream) {
        auto event = std::make_unique<CudaEvent>(functions_, context_, name_, flags);
        record_again(*event, stream);
        return event;
    }

    static constexpr size_t max_pitch = INT32_MAX;  // of the driver's copies of rows

    [[nodiscard]] std::string no_room(size_t size, const char* what) const {
        return fmt::format("{}: allocating {} bytes of {}", name_, size, what);
    }

    const Driver& functions_;
    const int index_;
    const std::string name_;
    Context context_ = nullptr;
    KernelModule kernels_{functions_, name_};
    Number number_ = 0;  // the driver's
};

}  // namespace

int cuda_device_count() {
    int count = 0;
    check(driver().device_count(&count), [&] { return std::string("counting CUDA devices"); });
    return count;
}

CudaFacts cuda_facts() {
    const Driver& functions = driver();
    const auto well = [](Result result) { check(result, [] { return std::string("asking about CUDA devices"); }); };
    int version = 0;
    well(functions.driver_version(&version));
    CudaFacts facts{version_text(version), {}};
    std::vector<Number> numbers(static_cast<size_t>(cuda_device_count()));
    for (size_t i = 0; i < numbers.size(); ++i) well(functions.device_get(&numbers[i], static_cast<int>(i)));
    for (const Number device : numbers) {
        CudaFacts::OfDevice one;
        std::array<char, 256> name{};
        well(functions.device_name(name.data(), static_cast<int>(name.size()), device));
        one.name = name.data();
        well(functions.device_total_memory(&one.memory, device));
        int major = 0;
        int minor = 0;
        well(functions.device_attribute(&major, capability_major, device));
        well(functions.device_attribute(&minor, capability_minor, device));
        one.capability = fmt::format("{}.{}", major, minor);
        for (size_t i = 0; i < numbers.size(); ++i) {
            int reaches = 0;
            if (numbers[i] != device) well(functions.device_reaches(&reaches, device, numbers[i]));
            if (reaches == 0) continue;
            CudaFacts::Link link{.device = static_cast<int>(i)};
            int atomics = 0;
            well(functions.link_attribute(&link.rank, link_rank, device, numbers[i]));
            well(functions.link_attribute(&atomics, link_atomics, device, numbers[i]));
            link.atomics = atomics != 0;
            one.links.push_back(link);
        }
        facts.devices.push_back(std::move(one));
    }
    return facts;
}

// Devices are never destroyed: the driver may end before the library's objects do.
DeviceApi& cuda_device(int index) {
    static std::mutex& mutex = *new std::mutex;
    static auto& devices = *new std::vector<std::unique_ptr<Cuda>>;
    const int count = cuda_device_count();
    if (index < 0 || index >= count) {
        throw Error(Code::invalid_argument,
                    fmt::format("CUDA device {} does not exist: this process has {}, numbered from 0", index, count));
    }
    const std::lock_guard lock(mutex);
    devices.resize(std::max(devices.size(), static_cast<size_t>(count)));
    auto& device = devices[static_cast<size_t>(index)];
    if (!device) device = std::make_unique<Cuda>(index);
    return *device;
}

}  // namespace tsr
