// cuFile's functions over the simulated devices.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>

#include "checkpoint/io/cufile.hpp"
#include "device/cuda/driver.hpp"
#include "mock_cufile/control.h"
#include "simulated_cuda/control.h"

#define EXPORTED __attribute__((visibility("default")))

// The driver's, from the simulated one.
extern "C" {
int cuStreamCreateWithPriority(tsr::cuda::Stream* stream, unsigned flags, int priority);
int cuStreamDestroy_v2(tsr::cuda::Stream stream);
}

namespace {

using tsr::cufile::Status;

constexpr int driver_not_initialized = 5001;
constexpr int io_not_supported = 5008;
constexpr int pointer_invalid = 5012;
constexpr int direct_not_set = 5020;
constexpr size_t page = 4096;

struct World {
    std::mutex mutex;
    mock_cufile_fault fault = MOCK_CUFILE_SOUND;
    mock_cufile_counts counts{};
};

World& world() {
    static World& all = *new World;
    return all;
}

struct Read {
    void* to;
    const std::byte* from;
    size_t size;
    std::promise<bool> done;
};

// On a stream of its own, which no other waits for.
bool put(void* to, const std::byte* from, size_t size) {
    tsr::cuda::Stream stream = nullptr;
    if (cuStreamCreateWithPriority(&stream, tsr::cuda::stream_non_blocking, 0) != 0) return false;
    auto* const read = new Read{to, from, size, {}};
    auto done = read->done.get_future();
    const auto body = [](void* argument) -> int {
        auto* const one = static_cast<Read*>(argument);
        void* const bytes = simulated_cuda_bytes(one->to, one->size);
        if (bytes != nullptr) std::memcpy(bytes, one->from, one->size);
        one->done.set_value(bytes != nullptr);
        return 0;
    };
    const auto ended = [](void* argument) { delete static_cast<Read*>(argument); };
    bool is_there = false;
    if (simulated_cuda_launch_until(stream, body, ended, read) != 0) {
        delete read;
    } else {
        try {
            is_there = done.get();
        } catch (const std::future_error&) {  // the device failed before
        }
    }
    cuStreamDestroy_v2(stream);
    return is_there;
}

}  // namespace

extern "C" {

EXPORTED void mock_cufile_set(mock_cufile_fault fault) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    all.fault = fault;
    all.counts = {};
}

EXPORTED void mock_cufile_counted(mock_cufile_counts* counts) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    *counts = all.counts;
}

EXPORTED long cuFileUseCount() {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    return static_cast<long>(all.counts.opened);
}

EXPORTED Status cuFileDriverOpen() {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    if (all.fault == MOCK_CUFILE_NO_DRIVER) return {driver_not_initialized, 0};
    ++all.counts.opened;
    return {};
}

EXPORTED Status cuFileDriverGetProperties(tsr::cufile::Properties* properties) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    properties->control = all.fault == MOCK_CUFILE_COMPATIBLE ? 1U << tsr::cufile::allow_compat_mode : 0;
    return {};
}

EXPORTED Status cuFileHandleRegister(void** handle, tsr::cufile::Description* file) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    if (all.counts.opened == 0) return {driver_not_initialized, 0};
    if (all.fault == MOCK_CUFILE_FILE_SYSTEM) return {io_not_supported, 0};
    if ((::fcntl(file->file.descriptor, F_GETFL) & O_DIRECT) == 0) return {direct_not_set, 0};
    ++all.counts.registered;
    *handle = new int(file->file.descriptor);
    return {};
}

EXPORTED void cuFileHandleDeregister(void* handle) {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    --all.counts.registered;
    delete static_cast<int*>(handle);
}

EXPORTED ssize_t cuFileRead(void* handle, void* to, size_t size, off_t offset, off_t skipped) {
    World& all = world();
    mock_cufile_fault fault{};
    {
        const std::lock_guard lock(all.mutex);
        fault = all.fault;
        const bool is_second = ++all.counts.reads % 2 == 0;
        if (!is_second && (fault == MOCK_CUFILE_SHORT || fault == MOCK_CUFILE_EIO)) fault = MOCK_CUFILE_SOUND;
    }
    if (fault == MOCK_CUFILE_POINTER) return -pointer_invalid;
    if (fault == MOCK_CUFILE_EIO) {
        errno = EIO;
        return -1;
    }
    if (fault == MOCK_CUFILE_SHORT) size /= 2;
    // Whole pages of the file, as it is open past the page cache.
    const auto begin = static_cast<size_t>(offset) / page * page;
    const size_t before = static_cast<size_t>(offset) - begin;
    const size_t room = (before + size + page - 1) / page * page;
    const std::unique_ptr<std::byte, decltype(&std::free)> pages(
        static_cast<std::byte*>(std::aligned_alloc(page, room)), &std::free);
    const ssize_t got = ::pread(*static_cast<int*>(handle), pages.get(), room, static_cast<off_t>(begin));
    if (got < 0) return -1;
    const size_t length = std::min(size, static_cast<size_t>(got) - std::min(before, static_cast<size_t>(got)));
    std::byte* const data = pages.get() + before;
    if (fault == MOCK_CUFILE_WRONG_BYTE) data[length / 2] ^= std::byte{1};
    if (!put(static_cast<std::byte*>(to) + skipped, data, length)) return -pointer_invalid;
    const std::lock_guard lock(all.mutex);
    all.counts.bytes += length;
    return static_cast<ssize_t>(length);
}

}  // extern "C"
