// A libcuda.so.1 whose devices are simulated; control.h says how they behave.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "device/cuda/driver.hpp"
#include "simulated_cuda/control.h"
#include "simulated_cuda/kernels.hpp"

extern "C" tsr::cuda::Result cuInit(unsigned flags);

#define EXPORTED __attribute__((visibility("default")))

using std::chrono::nanoseconds;
using tsr::cuda::Access;
using tsr::cuda::Address;
using tsr::cuda::Copy2D;
using tsr::cuda::invalid_value;
using tsr::cuda::Number;
using tsr::cuda::PagesHandle;
using tsr::cuda::PagesKind;
using tsr::cuda::Result;

// The handles that the driver's functions pass around. A function is a kernel of the host's.
struct CUctx_st {
    int index = 0;
};
struct CUmod_st {};

namespace {

constexpr Result invalid_device = 101;
constexpr Result invalid_handle = 400;
constexpr Result not_found = 500;
// What the image of a module begins with, whose kernels run on the host (image.txt).
constexpr std::string_view image_text = "tessera: kernels that the simulated driver runs on the host";
constexpr Result illegal_address = 700;
constexpr Result already_registered = 712;
constexpr Result not_registered = 713;
constexpr Result not_supported = 801;
constexpr Result capture_unsupported = 900;
constexpr Result capture_invalidated = 901;
constexpr Result capture_isolation = 905;
constexpr Result captured_event = 907;
constexpr size_t region_size = size_t{1} << 35;  // of addresses, a device; only pages that are written take memory
constexpr size_t default_capacity = size_t{16} << 30;
constexpr size_t granularity = 4096;
constexpr size_t large_page = size_t{2} << 20;  // of memory that is mapped

// Set by the first of several operations that ends, and awaited by others.
class Flag {
   public:
    void set(nanoseconds simulated) {
        const std::lock_guard lock(mutex_);
        is_set_ = true;
        at_ = std::chrono::steady_clock::now();
        simulated_ = simulated;
        changed_.notify_all();
    }
    [[nodiscard]] bool is_set() const {
        const std::lock_guard lock(mutex_);
        return is_set_;
    }
    [[nodiscard]] std::chrono::steady_clock::time_point at() const {
        const std::lock_guard lock(mutex_);
        return at_;
    }
    // By the simulated clock.
    [[nodiscard]] nanoseconds simulated() const {
        const std::lock_guard lock(mutex_);
        return simulated_;
    }
    // On a stream, its clock then is at least the flag's.
    void wait() const;

   private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    bool is_set_ = false;
    std::chrono::steady_clock::time_point at_;
    nanoseconds simulated_{0};
};
using FlagPtr = std::shared_ptr<Flag>;

// The addresses of a device, and which of them are allocated.
class Memory {
   public:
    Memory() {
        const int file = ::memfd_create("simulated-cuda", MFD_CLOEXEC);
        if (file < 0 || ::ftruncate(file, region_size) != 0) std::abort();
        seen_ = map(file, PROT_NONE);
        real_ = map(file, PROT_READ | PROT_WRITE);
        ::close(file);
    }

    [[nodiscard]] bool covers(Address address) const {
        if (address >= seen_ && address - seen_ < region_size) return true;
        const std::lock_guard lock(mutex_);
        return range_at(address) != ranges_.end();
    }

    Result allocate(size_t size, size_t capacity, Address* out) {
        const size_t length = (std::max(size, size_t{1}) + granularity - 1) / granularity * granularity;
        const std::lock_guard lock(mutex_);
        if (length > capacity || used_ > capacity - length) return tsr::cuda::out_of_memory;
        Address at = seen_;
        for (const auto& [begin, taken] : pieces_) {
            if (begin - at >= length + granularity) break;  // a page between two pieces, so that overruns are found
            at = begin + rounded(taken) + granularity;
        }
        if (at + length > seen_ + region_size) return tsr::cuda::out_of_memory;
        pieces_[at] = std::max(size, size_t{1});
        used_ += length;
        *out = at;
        return tsr::cuda::success;
    }

    Result free(Address address) {
        const std::lock_guard lock(mutex_);
        const auto found = pieces_.find(address);
        if (found == pieces_.end()) return invalid_value;
        forget(found);
        return tsr::cuda::success;
    }

    // Pages are a piece whose address nobody is told, and which is their handle. They go with their last mapping.
    Result create_pages(size_t size, size_t capacity, PagesHandle* out) {
        Address at = 0;
        if (const Result error = allocate(size, capacity, &at)) return error;
        const std::lock_guard lock(mutex_);
        pages_[at] = {size, 0, false};
        *out = at;
        return tsr::cuda::success;
    }
    Result release_pages(PagesHandle handle) {
        const std::lock_guard lock(mutex_);
        const auto found = pages_.find(handle);
        if (found == pages_.end() || found->second.released) return invalid_value;
        found->second.released = true;
        forget_unused(found);
        return tsr::cuda::success;
    }

    // Pages are mapped as a whole, as drivers demand.
    Result map_pages(Address address, size_t size, PagesHandle handle) {
        const std::lock_guard lock(mutex_);
        const auto pages = pages_.find(handle);
        if (pages == pages_.end() || pages->second.released) return invalid_value;
        if (size != pages->second.size) return not_supported;
        if (!ranges_.try_emplace(address, Range{size, handle, false}).second) return invalid_value;
        ++pages->second.mappings;
        return tsr::cuda::success;
    }
    Result unmap_pages(Address address, size_t size) {
        const std::lock_guard lock(mutex_);
        const auto range = ranges_.find(address);
        if (range == ranges_.end() || range->second.size != size) return invalid_value;
        const auto pages = pages_.find(range->second.pages);
        ranges_.erase(range);
        --pages->second.mappings;
        forget_unused(pages);
        return tsr::cuda::success;
    }
    Result make_accessible(Address address, size_t size) {
        const std::lock_guard lock(mutex_);
        const auto range = ranges_.find(address);
        if (range == ranges_.end() || range->second.size != size) return invalid_value;
        range->second.accessible = true;
        return tsr::cuda::success;
    }

    // Null if not all of the range lies in one allocation.
    [[nodiscard]] void* bytes(Address address, size_t size) const {
        const std::lock_guard lock(mutex_);
        if (const auto range = range_at(address); range != ranges_.end()) {
            const size_t offset = address - range->first;
            if (!range->second.accessible || size > range->second.size - offset) return nullptr;
            return bytes_at(range->second.pages + offset);
        }
        auto next = pieces_.upper_bound(address);
        if (next == pieces_.begin()) return nullptr;
        const auto& [begin, length] = *std::prev(next);
        const size_t offset = address - begin;
        if (offset > length || size > length - offset) return nullptr;
        return bytes_at(address);
    }

    [[nodiscard]] size_t used() const {
        const std::lock_guard lock(mutex_);
        return used_;
    }
    [[nodiscard]] size_t pieces() const {
        const std::lock_guard lock(mutex_);
        return pieces_.size();
    }

   private:
    struct Pages {
        size_t size = 0;
        unsigned mappings = 0;
        bool released = false;
    };
    struct Range {
        size_t size = 0;
        PagesHandle pages = 0;
        bool accessible = false;
    };

    void forget(std::map<Address, size_t>::iterator piece) {
        const size_t length = rounded(piece->second);
        ::madvise(bytes_at(piece->first), length, MADV_REMOVE);  // its content is gone
        used_ -= length;
        pieces_.erase(piece);
    }
    void forget_unused(std::map<PagesHandle, Pages>::iterator pages) {
        if (!pages->second.released || pages->second.mappings > 0) return;
        forget(pieces_.find(pages->first));
        pages_.erase(pages);
    }
    [[nodiscard]] std::map<Address, Range>::const_iterator range_at(Address address) const {
        const auto next = ranges_.upper_bound(address);
        if (next == ranges_.begin()) return ranges_.end();
        const auto range = std::prev(next);
        return address - range->first < range->second.size ? range : ranges_.end();
    }

    static size_t rounded(size_t size) { return (size + granularity - 1) / granularity * granularity; }
    static Address map(int file, int protection) {
        void* pages = ::mmap(nullptr, region_size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
        if (pages == MAP_FAILED) std::abort();
        return reinterpret_cast<Address>(pages);
    }
    [[nodiscard]] void* bytes_at(Address address) const {
        return reinterpret_cast<void*>(real_ + (address - seen_));  // NOLINT(performance-no-int-to-ptr)
    }

    Address seen_ = 0;
    Address real_ = 0;
    mutable std::mutex mutex_;  // guards all below
    std::map<Address, size_t> pieces_;
    std::map<PagesHandle, Pages> pages_;
    std::map<Address, Range> ranges_;  // that are mapped
    size_t used_ = 0;
};

struct Device {
    CUctx_st context;
    Memory memory;
    std::atomic<Result> broken{0};
};

// An operation returns an error that breaks the device, or 0.
using Body = std::function<Result()>;

void pause_at_random();

thread_local CUstream_st* own_stream = nullptr;  // whose thread this is

}  // namespace

// Operations that were captured, in their order.
struct CUgraph_st {
    std::vector<Body> operations;
};
struct CUgraphExec_st {
    std::shared_ptr<const std::vector<Body>> operations;
};

struct CUstream_st {
    Device* device = nullptr;
    bool blocking = true;  // waits for operations of the default stream, and they for its own
    std::mutex mutex;      // guards all below but the thread
    std::condition_variable changed;
    std::deque<std::pair<Body, FlagPtr>> queue;
    FlagPtr last;
    std::unique_ptr<CUgraph_st> graph;  // while one is captured
    bool is_global = false;             // that capture forbids calls to other threads,
    bool is_broken = false;             // and was ended by one
    bool stopping = false;
    std::thread thread;
    nanoseconds now{0};  // the simulated clock, used by the thread

    // Whether the operation goes into a graph.
    bool capture(Body& body) {
        const std::lock_guard lock(mutex);
        if (!graph) return false;
        graph->operations.push_back(std::move(body));
        return true;
    }
    [[nodiscard]] bool is_captured() {
        const std::lock_guard lock(mutex);
        return graph != nullptr;
    }

    FlagPtr push(Body body) {
        auto done = std::make_shared<Flag>();
        const std::lock_guard lock(mutex);
        if (!thread.joinable()) thread = std::thread([this] { work(); });
        queue.emplace_back(std::move(body), done);
        last = done;
        changed.notify_all();
        return done;
    }
    [[nodiscard]] FlagPtr latest() {
        const std::lock_guard lock(mutex);
        return last;
    }
    void work() {
        own_stream = this;
        while (true) {
            std::pair<Body, FlagPtr> next;
            {
                std::unique_lock lock(mutex);
                changed.wait(lock, [this] { return stopping || !queue.empty(); });
                if (queue.empty()) return;
                next = std::move(queue.front());
                queue.pop_front();
            }
            if (device->broken == 0) {
                pause_at_random();
                if (const Result error = next.first(); error != 0) device->broken = error;
            }
            next.first = nullptr;
            next.second->set(now);
        }
    }
    // Ends once all that was enqueued has run.
    void stop() {
        {
            const std::lock_guard lock(mutex);
            stopping = true;
            changed.notify_all();
        }
        if (thread.joinable()) thread.join();
    }
};

struct CUevent_st {
    Device* device = nullptr;
    bool has_time = false;
    std::mutex mutex;
    FlagPtr recorded;  // null before the first record
    bool is_captured = false;

    [[nodiscard]] FlagPtr flag() {
        const std::lock_guard lock(mutex);
        return recorded;
    }
};

namespace {

void Flag::wait() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_set_; });
    if (own_stream != nullptr) own_stream->now = std::max(own_stream->now, simulated_);
}

struct Failure {
    std::string symbol;
    unsigned calls = 0;
    Result error = 0;
};

// All of the simulation. Never destroyed: streams' threads run until the process ends.
struct World {
    std::mutex mutex;  // guards all below but what devices guard themselves
    pid_t initialised_by = 0;
    std::vector<std::unique_ptr<Device>> devices;
    std::vector<CUstream_st*> streams;
    std::vector<CUstream_st*> default_streams;  // by device; null until used
    std::map<Address, size_t> reserved;         // addresses without memory of their own
    std::map<Address, size_t> pinned;
    std::map<void*, size_t> pinned_allocations;
    size_t events = 0;
    size_t capacity = default_capacity;
    Failure failure;
    std::atomic<unsigned> delay_us{0};
    std::atomic<bool> has_simulated_clock{false};
    std::mutex random_mutex;
    std::mt19937_64 random;
};

World& world() {
    static World& one = *new World;
    return one;
}

thread_local CUctx_st* current = nullptr;
thread_local int capture_mode = 0;  // global

void pause_at_random() {
    World& all = world();
    const unsigned most = all.delay_us;
    if (most == 0) return;
    uint64_t us = 0;
    {
        const std::lock_guard lock(all.random_mutex);
        us = all.random() % (most + 1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds{us});
}

// What every function begins with: an injected failure, a process that may not call.
Result entered(const char* symbol) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    if (all.failure.symbol == symbol) {
        if (all.failure.calls == 0) {
            all.failure.symbol.clear();
            return all.failure.error;
        }
        --all.failure.calls;
    }
    return all.initialised_by == ::getpid() ? tsr::cuda::success : tsr::cuda::not_initialized;
}

Device* device_of(const CUctx_st* context) {
    return context == nullptr ? nullptr : world().devices[static_cast<size_t>(context->index)].get();
}

// The device of the calling thread's context, unbroken.
Result entered(const char* symbol, Device** device) {
    if (const Result error = entered(symbol)) return error;
    *device = device_of(current);
    if (*device == nullptr) return tsr::cuda::invalid_context;
    return (*device)->broken;
}

Device* owner_of(Address address) {
    for (const auto& device : world().devices) {
        if (device->memory.covers(address)) return device.get();
    }
    return nullptr;
}

// Whether a range that is reserved begins so; of size 0: whether the address is in one.
bool is_reserved(Address address, size_t size) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    const auto next = all.reserved.upper_bound(address);
    if (next == all.reserved.begin()) return false;
    const auto& [begin, length] = *std::prev(next);
    return size == 0 ? address - begin < length : address == begin && size <= length;
}

bool is_pinned(Address address, size_t size) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    auto next = all.pinned.upper_bound(address);
    if (next == all.pinned.begin()) return false;
    const auto& [begin, length] = *std::prev(next);
    return address - begin <= length && size <= length - (address - begin);
}

CUstream_st* default_stream_of(Device* device) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    all.default_streams.resize(all.devices.size());
    CUstream_st*& stream = all.default_streams[static_cast<size_t>(device->context.index)];
    if (stream == nullptr) {
        stream = new CUstream_st;
        stream->device = device;
    }
    return stream;
}

// What calls go on with that may not be beside a capture; one of them ends it.
Result beside_captures() {
    if (capture_mode == tsr::cuda::capture_relaxed) return tsr::cuda::success;
    World& all = world();
    const std::lock_guard lock(all.mutex);
    bool is_forbidden = false;
    for (CUstream_st* stream : all.streams) {
        const std::lock_guard stream_lock(stream->mutex);
        if (!stream->graph || !stream->is_global) continue;
        stream->is_broken = true;
        is_forbidden = true;
    }
    return is_forbidden ? capture_unsupported : tsr::cuda::success;
}

// Enqueues, with the order that the default stream has with those that block. Null for what goes into a graph.
FlagPtr enqueue(Device* device, CUstream_st* stream, Body body) {
    if (stream != nullptr && stream->capture(body)) return nullptr;
    CUstream_st* const by_default = default_stream_of(device);
    if (stream == nullptr) stream = by_default;
    std::vector<FlagPtr> before;
    if (stream == by_default) {
        World& all = world();
        const std::lock_guard lock(all.mutex);
        for (CUstream_st* other : all.streams) {
            if (other->device != device || !other->blocking) continue;
            if (const FlagPtr last = other->latest()) before.push_back(last);
        }
    } else if (stream->blocking) {
        if (const FlagPtr last = by_default->latest()) before.push_back(last);
    }
    if (before.empty()) return stream->push(std::move(body));
    return stream->push([before = std::move(before), body = std::move(body)] {
        for (const FlagPtr& flag : before) flag->wait();
        return body();
    });
}

Result checked(Device* device, const CUstream_st* stream) {
    if (stream != nullptr && stream->device != device) return invalid_handle;
    return tsr::cuda::success;
}

// One side of a copy: memory of a device, or of the host.
struct Side {
    Address address = 0;
    bool on_device = false;
    bool pinned = false;
};

Side side_of(Address address, size_t size) {
    Side side{address, owner_of(address) != nullptr || is_reserved(address, 0), false};
    side.pinned = !side.on_device && is_pinned(address, size);
    return side;
}

void* bytes_of(const Side& side, size_t size) {
    if (side.on_device) {
        Device* const owner = owner_of(side.address);
        return owner == nullptr ? nullptr : owner->memory.bytes(side.address, size);
    }
    return reinterpret_cast<void*>(side.address);  // NOLINT(performance-no-int-to-ptr)
}

size_t span_of(size_t pitch, size_t width, size_t height) { return (height - 1) * pitch + width; }

// Copies rows; a single row is a plain copy.
Result copy(Device* device, CUstream_st* stream, Address to, size_t to_pitch, Address from, size_t from_pitch,
            size_t width, size_t height) {
    if (width == 0 || height == 0) return tsr::cuda::success;
    const size_t from_size = span_of(from_pitch, width, height);
    const size_t to_size = span_of(to_pitch, width, height);
    const Side source = side_of(from, from_size);
    const Side target = side_of(to, to_size);
    std::shared_ptr<std::vector<char>> staged;
    if (!source.on_device && !source.pinned) {
        const auto* begin = static_cast<const char*>(bytes_of(source, from_size));
        staged = std::make_shared<std::vector<char>>(begin, begin + from_size);
    }
    const FlagPtr done = enqueue(device, stream, [=] {
        const auto* source_bytes = staged ? staged->data() : static_cast<const char*>(bytes_of(source, from_size));
        auto* target_bytes = static_cast<char*>(bytes_of(target, to_size));
        if (source_bytes == nullptr || target_bytes == nullptr) return illegal_address;
        for (size_t row = 0; row < height; ++row) {
            std::memcpy(target_bytes + row * to_pitch, source_bytes + row * from_pitch, width);
        }
        return tsr::cuda::success;
    });
    if (!target.on_device && !target.pinned) {
        if (!done) return capture_unsupported;
        done->wait();
        return device->broken;
    }
    return tsr::cuda::success;
}

// Until all that its streams have now is done.
void wait_for(const Device* device) {
    std::vector<FlagPtr> running;
    {
        World& all = world();
        const std::lock_guard lock(all.mutex);
        for (CUstream_st* stream : all.streams) {
            if (stream->device == device) running.push_back(stream->latest());
        }
        for (CUstream_st* stream : all.default_streams) {
            if (stream != nullptr && stream->device == device) running.push_back(stream->latest());
        }
    }
    for (const FlagPtr& flag : running) {
        if (flag) flag->wait();
    }
}

struct Named {
    Result error;
    const char* name;
    const char* text;
};
constexpr std::array<Named, 25> names{{
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the memory is registered already"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the memory is not registered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
}};

const Named* named(Result error) {
    const auto found = std::ranges::find(names, error, &Named::error);
    return found == names.end() ? nullptr : &*found;
}

}  // namespace

extern "C" {

// --- control

EXPORTED void simulated_cuda_delay(unsigned us, uint64_t seed) {
    const std::lock_guard lock(world().random_mutex);
    world().random.seed(seed);
    world().delay_us = us;
}

EXPORTED void simulated_cuda_capacity(size_t bytes) {
    const std::lock_guard lock(world().mutex);
    world().capacity = bytes == 0 ? default_capacity : bytes;
}

EXPORTED void simulated_cuda_fail(const char* symbol, unsigned calls, int error) {
    const std::lock_guard lock(world().mutex);
    world().failure = {symbol == nullptr ? "" : symbol, calls, error};
}

EXPORTED void simulated_cuda_break(int device, int error) {
    if (error != 0) cuInit(0);
    const auto& devices = world().devices;
    const auto index = static_cast<size_t>(device);
    if (error == 0 && index >= devices.size()) return;  // not broken: before the first use there are no devices
    devices.at(index)->broken = error;
}

EXPORTED void simulated_cuda_used(simulated_cuda_usage* usage) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    *usage = {0, all.reserved.size(), all.streams.size(), all.events, all.pinned.size()};
    for (const auto& device : all.devices) {
        usage->bytes += device->memory.used();
        usage->allocations += device->memory.pieces();
    }
}

EXPORTED void* simulated_cuda_allocate(int device, size_t size) {
    Address address = 0;
    if (cuInit(0) != 0 ||
        world().devices[static_cast<size_t>(device)]->memory.allocate(size, default_capacity, &address) != 0) {
        return nullptr;
    }
    return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

EXPORTED void simulated_cuda_store(void* address, float value) {
    Device* const owner = owner_of(reinterpret_cast<Address>(address));
    wait_for(owner);
    std::memcpy(owner->memory.bytes(reinterpret_cast<Address>(address), sizeof value), &value, sizeof value);
}

EXPORTED float simulated_cuda_load(const void* address) {
    Device* const owner = owner_of(reinterpret_cast<Address>(address));
    wait_for(owner);
    float value = 0;
    std::memcpy(&value, owner->memory.bytes(reinterpret_cast<Address>(address), sizeof value), sizeof value);
    return value;
}

// As JNI calls a class's natives: an environment and a class come first.
EXPORTED int64_t Java_OnDevice_allocate(void* /*env*/, void* /*type*/, int32_t device, int64_t size) {
    return reinterpret_cast<int64_t>(simulated_cuda_allocate(device, static_cast<size_t>(size)));
}
EXPORTED void Java_OnDevice_store(void* /*env*/, void* /*type*/, int64_t address, float value) {
    simulated_cuda_store(reinterpret_cast<void*>(address), value);  // NOLINT(performance-no-int-to-ptr)
}
EXPORTED float Java_OnDevice_load(void* /*env*/, void* /*type*/, int64_t address) {
    return simulated_cuda_load(reinterpret_cast<const void*>(address));  // NOLINT(performance-no-int-to-ptr)
}

EXPORTED int simulated_cuda_launch(void* stream, int (*body)(void*), void* argument) {
    return simulated_cuda_launch_until(stream, body, [](void* /*argument*/) {}, argument);
}

EXPORTED int simulated_cuda_launch_until(void* stream, int (*body)(void*), void (*ended)(void*), void* argument) {
    auto* on = static_cast<CUstream_st*>(stream);
    if (const Result error = entered("simulated_cuda_launch")) return error;
    Device* device = on == nullptr ? device_of(current) : on->device;
    if (device == nullptr) return tsr::cuda::invalid_context;
    if (device->broken != 0) return device->broken;
    enqueue(device, on, [body, kept = std::shared_ptr<void>(argument, ended)] { return body(kept.get()); });
    return tsr::cuda::success;
}

EXPORTED int simulated_cuda_captures(void* stream) {
    return stream != nullptr && static_cast<CUstream_st*>(stream)->is_captured() ? 1 : 0;
}

EXPORTED void simulated_cuda_use_simulated_clock(int yes) { world().has_simulated_clock = yes != 0; }

EXPORTED uint64_t simulated_cuda_now() { return static_cast<uint64_t>(own_stream->now.count()); }

EXPORTED void simulated_cuda_take_until(uint64_t ns) { own_stream->now = std::max(own_stream->now, nanoseconds{ns}); }

EXPORTED void* simulated_cuda_bytes(const void* address, size_t size) {
    return bytes_of(side_of(reinterpret_cast<Address>(address), size), size);
}

// --- the driver

EXPORTED Result cuInit(unsigned /*flags*/) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    if (all.failure.symbol == "cuInit") {
        all.failure.symbol.clear();
        return all.failure.error;
    }
    if (all.initialised_by != 0)
        return all.initialised_by == ::getpid() ? tsr::cuda::success : tsr::cuda::not_initialized;
    const char* text = std::getenv("TESSERA_SIMULATED_CUDA_DEVICES");
    const int count = text == nullptr ? 2 : std::atoi(text);
    if (count < 1) return tsr::cuda::no_device;
    for (int i = 0; i < count; ++i) {
        all.devices.push_back(std::make_unique<Device>());
        all.devices.back()->context.index = i;
    }
    all.initialised_by = ::getpid();
    return tsr::cuda::success;
}

EXPORTED Result cuDriverGetVersion(int* version) {
    const char* text = std::getenv("TESSERA_SIMULATED_CUDA_VERSION");
    *version = text == nullptr ? 13000 : std::atoi(text);
    return tsr::cuda::success;
}

EXPORTED Result cuGetErrorName(Result error, const char** name) {
    const Named* known = named(error);
    if (known == nullptr) return invalid_value;
    *name = known->name;
    return tsr::cuda::success;
}

EXPORTED Result cuGetErrorString(Result error, const char** text) {
    const Named* known = named(error);
    if (known == nullptr) return invalid_value;
    *text = known->text;
    return tsr::cuda::success;
}

EXPORTED Result cuDeviceGetCount(int* count) {
    if (const Result error = entered("cuDeviceGetCount")) return error;
    *count = static_cast<int>(world().devices.size());
    return tsr::cuda::success;
}

EXPORTED Result cuDeviceGet(Number* device, int index) {
    if (const Result error = entered("cuDeviceGet")) return error;
    if (index < 0 || static_cast<size_t>(index) >= world().devices.size()) return invalid_device;
    *device = index;
    return tsr::cuda::success;
}

EXPORTED Result cuDeviceGetName(char* name, int size, Number device) {
    if (const Result error = entered("cuDeviceGetName")) return error;
    std::snprintf(name, static_cast<size_t>(size), "Simulated GPU %d", device);
    return tsr::cuda::success;
}

EXPORTED Result cuDeviceTotalMem_v2(size_t* bytes, Number /*device*/) {
    if (const Result error = entered("cuDeviceTotalMem_v2")) return error;
    const std::lock_guard lock(world().mutex);
    *bytes = world().capacity;
    return tsr::cuda::success;
}

// Of the kind of an H100.
EXPORTED Result cuDeviceGetAttribute(int* value, int attribute, Number /*device*/) {
    if (const Result error = entered("cuDeviceGetAttribute")) return error;
    if (attribute != tsr::cuda::capability_major && attribute != tsr::cuda::capability_minor)
        return tsr::cuda::invalid_value;
    *value = attribute == tsr::cuda::capability_major ? 9 : 0;
    return tsr::cuda::success;
}

// Even and odd devices are pairs with a better link.
EXPORTED Result cuDeviceGetP2PAttribute(int* value, int attribute, Number device, Number peer) {
    if (const Result error = entered("cuDeviceGetP2PAttribute")) return error;
    if (device == peer || (attribute != tsr::cuda::link_rank && attribute != tsr::cuda::link_atomics))
        return tsr::cuda::invalid_value;
    const bool is_pair = device / 2 == peer / 2;
    *value = is_pair == (attribute == tsr::cuda::link_atomics) ? 1 : 0;
    return tsr::cuda::success;
}

EXPORTED Result cuDeviceCanAccessPeer(int* reaches, Number device, Number peer) {
    if (const Result error = entered("cuDeviceCanAccessPeer")) return error;
    *reaches = device == peer ? 0 : 1;
    return tsr::cuda::success;
}

EXPORTED Result cuDevicePrimaryCtxRetain(CUctx_st** context, Number device) {
    if (const Result error = entered("cuDevicePrimaryCtxRetain")) return error;
    *context = &world().devices[static_cast<size_t>(device)]->context;
    return tsr::cuda::success;
}

EXPORTED Result cuCtxGetCurrent(CUctx_st** context) {
    if (const Result error = entered("cuCtxGetCurrent")) return error;
    *context = current;
    return tsr::cuda::success;
}

EXPORTED Result cuCtxSetCurrent(CUctx_st* context) {
    if (const Result error = entered("cuCtxSetCurrent")) return error;
    current = context;
    return tsr::cuda::success;
}

EXPORTED Result cuMemAlloc_v2(Address* address, size_t size) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemAlloc_v2", &device)) return error;
    if (const Result error = beside_captures()) return error;
    if (size == 0) return invalid_value;
    size_t capacity = 0;
    {
        const std::lock_guard lock(world().mutex);
        capacity = world().capacity;
    }
    return device->memory.allocate(size, capacity, address);
}

// Waits for the device, as the driver does.
EXPORTED Result cuMemFree_v2(Address address) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemFree_v2", &device)) return error;
    Device* const owner = owner_of(address);
    if (owner == nullptr) return invalid_value;
    wait_for(owner);
    return owner->memory.free(address);
}

EXPORTED Result cuMemGetAllocationGranularity(size_t* size, const PagesKind* /*kind*/, int /*option*/) {
    if (const Result error = entered("cuMemGetAllocationGranularity")) return error;
    *size = large_page;
    return tsr::cuda::success;
}

EXPORTED Result cuMemCreate(PagesHandle* pages, size_t size, const PagesKind* kind, unsigned long long flags) {
    if (const Result error = entered("cuMemCreate")) return error;
    World& all = world();
    const auto number = static_cast<size_t>(kind->location.device);
    if (kind->type != 1 || kind->location.type != 1 || number >= all.devices.size()) return invalid_value;
    if (flags != 0 || size == 0 || size % large_page != 0) return invalid_value;
    size_t capacity = 0;
    {
        const std::lock_guard lock(all.mutex);
        capacity = all.capacity;
    }
    return all.devices[number]->memory.create_pages(size, capacity, pages);
}

EXPORTED Result cuMemRelease(PagesHandle pages) {
    if (const Result error = entered("cuMemRelease")) return error;
    Device* const owner = owner_of(pages);
    return owner == nullptr ? invalid_value : owner->memory.release_pages(pages);
}

// A range is of no device before pages of one are mapped.
EXPORTED Result cuMemAddressReserve(Address* at, size_t size, size_t alignment, Address wish,
                                    unsigned long long flags) {
    if (const Result error = entered("cuMemAddressReserve")) return error;
    if (alignment != 0 || wish != 0 || flags != 0 || size == 0 || size % large_page != 0) return invalid_value;
    void* addresses = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (addresses == MAP_FAILED) return tsr::cuda::out_of_memory;
    *at = reinterpret_cast<Address>(addresses);
    const std::lock_guard lock(world().mutex);
    world().reserved[*at] = size;
    return tsr::cuda::success;
}

EXPORTED Result cuMemAddressFree(Address at, size_t size) {
    if (const Result error = entered("cuMemAddressFree")) return error;
    if (!is_reserved(at, size) || owner_of(at) != nullptr) return invalid_value;
    const std::lock_guard lock(world().mutex);
    if (world().reserved[at] != size) return invalid_value;
    ::munmap(reinterpret_cast<void*>(at), size);  // NOLINT(performance-no-int-to-ptr)
    world().reserved.erase(at);
    return tsr::cuda::success;
}

// Neither this nor cuMemUnmap waits for operations that use the range.
EXPORTED Result cuMemMap(Address at, size_t size, size_t offset, PagesHandle pages, unsigned long long flags) {
    if (const Result error = entered("cuMemMap")) return error;
    Device* const owner = owner_of(pages);
    if (owner == nullptr || offset != 0 || flags != 0 || !is_reserved(at, size)) return invalid_value;
    return owner->memory.map_pages(at, size, pages);
}

EXPORTED Result cuMemUnmap(Address at, size_t size) {
    if (const Result error = entered("cuMemUnmap")) return error;
    Device* const owner = owner_of(at);
    return owner == nullptr ? invalid_value : owner->memory.unmap_pages(at, size);
}

EXPORTED Result cuMemSetAccess(Address at, size_t size, const Access* access, size_t count) {
    if (const Result error = entered("cuMemSetAccess")) return error;
    Device* const owner = owner_of(at);
    if (owner == nullptr || count != 1 || access->flags != 3 || access->location.type != 1) return invalid_value;
    if (access->location.device != owner->context.index) return invalid_value;
    return owner->memory.make_accessible(at, size);
}

EXPORTED Result cuMemHostAlloc(void** memory, size_t size, unsigned /*flags*/) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemHostAlloc", &device)) return error;
    if (const Result error = beside_captures()) return error;
    const size_t length = (size + granularity - 1) / granularity * granularity;
    void* pages = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return tsr::cuda::out_of_memory;
    const std::lock_guard lock(world().mutex);
    world().pinned[reinterpret_cast<Address>(pages)] = size;
    world().pinned_allocations[pages] = length;
    *memory = pages;
    return tsr::cuda::success;
}

EXPORTED Result cuMemFreeHost(void* memory) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemFreeHost", &device)) return error;
    const std::lock_guard lock(world().mutex);
    const auto found = world().pinned_allocations.find(memory);
    if (found == world().pinned_allocations.end()) return invalid_value;
    ::munmap(memory, found->second);
    world().pinned_allocations.erase(found);
    world().pinned.erase(reinterpret_cast<Address>(memory));
    return tsr::cuda::success;
}

EXPORTED Result cuMemHostRegister_v2(void* memory, size_t size, unsigned /*flags*/) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemHostRegister_v2", &device)) return error;
    if (memory == nullptr || size == 0) return invalid_value;
    const auto begin = reinterpret_cast<Address>(memory);
    const std::lock_guard lock(world().mutex);
    for (const auto& [other, length] : world().pinned) {
        if (begin < other + length && other < begin + size) return already_registered;
    }
    world().pinned[begin] = size;
    return tsr::cuda::success;
}

EXPORTED Result cuMemHostUnregister(void* memory) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemHostUnregister", &device)) return error;
    const std::lock_guard lock(world().mutex);
    return world().pinned.erase(reinterpret_cast<Address>(memory)) == 1 ? tsr::cuda::success : not_registered;
}

EXPORTED Result cuMemcpyAsync(Address to, Address from, size_t size, CUstream_st* stream) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemcpyAsync", &device)) return error;
    if (const Result error = checked(device, stream)) return error;
    return copy(device, stream, to, size, from, size, size, 1);
}

EXPORTED Result cuMemcpy2DAsync_v2(const Copy2D* request, CUstream_st* stream) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemcpy2DAsync_v2", &device)) return error;
    if (const Result error = checked(device, stream)) return error;
    if (request->from_type != tsr::cuda::memory_type_unified || request->to_type != tsr::cuda::memory_type_unified ||
        request->from_pitch < request->width || request->to_pitch < request->width) {
        return invalid_value;
    }
    const Address from = request->from + request->from_y * request->from_pitch + request->from_x;
    const Address to = request->to + request->to_y * request->to_pitch + request->to_x;
    return copy(device, stream, to, request->to_pitch, from, request->from_pitch, request->width, request->height);
}

EXPORTED Result cuMemsetD8Async(Address to, unsigned char value, size_t size, CUstream_st* stream) {
    Device* device = nullptr;
    if (const Result error = entered("cuMemsetD8Async", &device)) return error;
    if (const Result error = checked(device, stream)) return error;
    const Side target = side_of(to, size);
    enqueue(device, stream, [=] {
        void* bytes = bytes_of(target, size);
        if (bytes == nullptr) return illegal_address;
        std::memset(bytes, value, size);
        return tsr::cuda::success;
    });
    return tsr::cuda::success;
}

EXPORTED Result cuStreamCreateWithPriority(CUstream_st** stream, unsigned flags, int /*priority*/) {
    Device* device = nullptr;
    if (const Result error = entered("cuStreamCreateWithPriority", &device)) return error;
    auto* made = new CUstream_st;
    made->device = device;
    made->blocking = (flags & tsr::cuda::stream_non_blocking) == 0;
    const std::lock_guard lock(world().mutex);
    world().streams.push_back(made);
    *stream = made;
    return tsr::cuda::success;
}

EXPORTED Result cuStreamDestroy_v2(CUstream_st* stream) {
    if (const Result error = entered("cuStreamDestroy_v2")) return error;
    {
        const std::lock_guard lock(world().mutex);
        if (std::erase(world().streams, stream) == 0) return invalid_handle;
    }
    stream->stop();
    delete stream;
    return tsr::cuda::success;
}

EXPORTED Result cuStreamGetCtx(CUstream_st* stream, CUctx_st** context) {
    if (const Result error = entered("cuStreamGetCtx")) return error;
    if (stream == nullptr) {
        *context = current;
        return current == nullptr ? tsr::cuda::invalid_context : tsr::cuda::success;
    }
    const std::lock_guard lock(world().mutex);
    if (std::ranges::find(world().streams, stream) == world().streams.end()) return invalid_handle;
    *context = &stream->device->context;
    return tsr::cuda::success;
}

EXPORTED Result cuStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned /*flags*/) {
    Device* device = nullptr;
    if (const Result error = entered("cuStreamWaitEvent", &device)) return error;
    if (const Result error = checked(device, stream)) return error;
    const FlagPtr flag = event->flag();
    const bool is_captured = stream != nullptr && stream->is_captured();
    if ((flag || event->is_captured) && event->is_captured != is_captured) return capture_isolation;
    if (!flag) return tsr::cuda::success;
    enqueue(device, stream, [flag] {
        flag->wait();
        return tsr::cuda::success;
    });
    return tsr::cuda::success;
}

EXPORTED Result cuStreamIsCapturing(CUstream_st* stream, int* status) {
    if (const Result error = entered("cuStreamIsCapturing")) return error;
    *status = tsr::cuda::capture_none;
    if (stream == nullptr) return tsr::cuda::success;
    const std::lock_guard lock(stream->mutex);
    if (stream->graph) *status = stream->is_broken ? 2 : 1;
    return tsr::cuda::success;
}

EXPORTED Result cuThreadExchangeStreamCaptureMode(int* mode) {
    if (const Result error = entered("cuThreadExchangeStreamCaptureMode")) return error;
    std::swap(*mode, capture_mode);
    return tsr::cuda::success;
}

EXPORTED Result cuStreamBeginCapture_v2(CUstream_st* stream, int mode) {
    if (const Result error = entered("cuStreamBeginCapture_v2")) return error;
    if (stream == nullptr) return capture_unsupported;
    const std::lock_guard lock(stream->mutex);
    if (stream->graph) return invalid_value;
    stream->graph = std::make_unique<CUgraph_st>();
    stream->is_global = mode == 0;
    stream->is_broken = false;
    return tsr::cuda::success;
}

EXPORTED Result cuStreamEndCapture(CUstream_st* stream, CUgraph_st** graph) {
    if (const Result error = entered("cuStreamEndCapture")) return error;
    const std::lock_guard lock(stream->mutex);
    if (!stream->graph) return invalid_value;
    *graph = stream->is_broken ? nullptr : stream->graph.release();
    stream->graph = nullptr;
    return *graph == nullptr ? capture_invalidated : tsr::cuda::success;
}

EXPORTED Result cuGraphInstantiateWithFlags(CUgraphExec_st** made, CUgraph_st* graph, unsigned long long /*flags*/) {
    if (const Result error = entered("cuGraphInstantiateWithFlags")) return error;
    *made = new CUgraphExec_st{std::make_shared<const std::vector<Body>>(graph->operations)};
    return tsr::cuda::success;
}

EXPORTED Result cuGraphDestroy(CUgraph_st* graph) {
    delete graph;
    return tsr::cuda::success;
}

EXPORTED Result cuGraphLaunch(CUgraphExec_st* graph, CUstream_st* stream) {
    Device* device = nullptr;
    if (const Result error = entered("cuGraphLaunch", &device)) return error;
    if (const Result error = checked(device, stream)) return error;
    enqueue(device, stream, [operations = graph->operations] {
        for (const Body& operation : *operations) {
            if (const Result error = operation()) return error;
        }
        return tsr::cuda::success;
    });
    return tsr::cuda::success;
}

EXPORTED Result cuGraphExecDestroy(CUgraphExec_st* graph) {
    delete graph;
    return tsr::cuda::success;
}

EXPORTED Result cuEventCreate(CUevent_st** event, unsigned flags) {
    Device* device = nullptr;
    if (const Result error = entered("cuEventCreate", &device)) return error;
    auto* made = new CUevent_st;
    made->device = device;
    made->has_time = (flags & tsr::cuda::event_disable_timing) == 0;
    const std::lock_guard lock(world().mutex);
    ++world().events;
    *event = made;
    return tsr::cuda::success;
}

EXPORTED Result cuEventDestroy_v2(CUevent_st* event) {
    if (const Result error = entered("cuEventDestroy_v2")) return error;
    delete event;
    const std::lock_guard lock(world().mutex);
    --world().events;
    return tsr::cuda::success;
}

EXPORTED Result cuEventRecord(CUevent_st* event, CUstream_st* stream) {
    Device* device = nullptr;
    if (const Result error = entered("cuEventRecord", &device)) return error;
    if (event->device != device) return invalid_handle;
    if (const Result error = checked(device, stream)) return error;
    const FlagPtr flag = enqueue(device, stream, [] { return tsr::cuda::success; });
    const std::lock_guard lock(event->mutex);
    event->recorded = flag;
    event->is_captured = flag == nullptr;
    return tsr::cuda::success;
}

EXPORTED Result cuEventQuery(CUevent_st* event) {
    if (const Result error = entered("cuEventQuery")) return error;
    if (const Result error = beside_captures()) return error;
    if (event->device->broken != 0) return event->device->broken;
    if (event->is_captured) return captured_event;
    const FlagPtr flag = event->flag();
    return flag && !flag->is_set() ? tsr::cuda::not_ready : event->device->broken.load();
}

EXPORTED Result cuEventElapsedTime(float* ms, CUevent_st* from, CUevent_st* to) {
    if (const Result error = entered("cuEventElapsedTime")) return error;
    if (from->device != to->device || !from->has_time || !to->has_time) return invalid_handle;
    if (from->device->broken != 0) return from->device->broken;
    const FlagPtr first = from->flag();
    const FlagPtr last = to->flag();
    if (!first || !last) return invalid_handle;
    if (!first->is_set() || !last->is_set()) return tsr::cuda::not_ready;
    using Milliseconds = std::chrono::duration<float, std::milli>;
    *ms = world().has_simulated_clock ? Milliseconds(last->simulated() - first->simulated()).count()
                                      : Milliseconds(last->at() - first->at()).count();
    return tsr::cuda::success;
}

EXPORTED Result cuPointerGetAttribute(void* value, int attribute, Address address) {
    if (const Result error = entered("cuPointerGetAttribute")) return error;
    Device* const owner = owner_of(address);
    if (owner != nullptr && owner->broken != 0) return owner->broken;
    if (owner != nullptr && owner->memory.bytes(address, 0) == nullptr) return invalid_value;
    if (owner == nullptr && !is_pinned(address, 0)) return invalid_value;
    switch (attribute) {
        case tsr::cuda::pointer_memory_type:
            *static_cast<unsigned*>(value) = owner == nullptr ? 1 : tsr::cuda::memory_type_device;
            return tsr::cuda::success;
        case tsr::cuda::pointer_device_ordinal:
            *static_cast<int*>(value) = owner == nullptr ? 0 : owner->context.index;
            return tsr::cuda::success;
        default: return invalid_value;
    }
}

EXPORTED Result cuModuleLoadData(CUmod_st** loaded, const void* image) {
    Device* device = nullptr;
    if (const Result error = entered("cuModuleLoadData", &device)) return error;
    if (std::memcmp(image, image_text.data(), image_text.size()) != 0) return tsr::cuda::no_binary;
    static CUmod_st one;
    *loaded = &one;
    return tsr::cuda::success;
}

EXPORTED Result cuModuleGetFunction(CUfunc_st** function, CUmod_st* /*module*/, const char* name) {
    Device* device = nullptr;
    if (const Result error = entered("cuModuleGetFunction", &device)) return error;
    const simulated_cuda::Kernel* const kernel = simulated_cuda::kernel_of(name);
    if (kernel == nullptr) return not_found;
    *function = reinterpret_cast<CUfunc_st*>(const_cast<simulated_cuda::Kernel*>(kernel));
    return tsr::cuda::success;
}

EXPORTED Result cuLaunchKernel(CUfunc_st* function, unsigned blocks, unsigned blocks_y, unsigned blocks_z,
                               unsigned threads, unsigned threads_y, unsigned threads_z, unsigned /*shared_bytes*/,
                               CUstream_st* stream, void** arguments, void** /*extra*/) {
    Device* device = nullptr;
    if (const Result error = entered("cuLaunchKernel", &device)) return error;
    if (const Result error = checked(device, stream)) return error;
    if (blocks == 0 || threads == 0 || blocks_y != 1 || blocks_z != 1 || threads_y != 1 || threads_z != 1) {
        return invalid_value;
    }
    const auto* kernel = reinterpret_cast<const simulated_cuda::Kernel*>(function);
    const auto* begin = static_cast<const std::byte*>(arguments[0]);
    const auto copied = std::make_shared<std::vector<std::byte>>(begin, begin + kernel->size);
    enqueue(device, stream, [=] {
        return kernel->run(copied->data(), blocks, threads, [device](const void* address, size_t bytes) -> void* {
            const auto at = reinterpret_cast<Address>(address);
            if (device->memory.covers(at)) return device->memory.bytes(at, bytes);
            return is_pinned(at, bytes) ? const_cast<void*>(address) : nullptr;
        });
    });
    return tsr::cuda::success;
}

}  // extern "C"
