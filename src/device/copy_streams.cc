#include "device/copy_streams.hpp"

#include <utility>

#include "base/attempt.hpp"
#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "device/launch.hpp"

namespace tsr {

CopyStream::CopyStream(CopyStreams& all, DeviceApi& device)
    : all_(all), device_(device), stream_(device.new_stream()) {}

void CopyStream::follow(StreamHandle program) {
    const auto now = device_.record(program);
    const std::lock_guard lock(mutex_);
    device_.wait(stream_.get(), *now);
    program_ = program;
}

void CopyStream::follow(const DeviceEvent& event) {
    const std::lock_guard lock(mutex_);
    device_.wait(stream_.get(), event);
}

void CopyStream::lead() {
    const auto now = record();
    device_.wait(program_, *now);
}

template <class Body>
auto CopyStream::put(Body&& body) {
    try {
        const std::lock_guard lock(mutex_);
        return body();
    } catch (...) {
        ++all_.failures_;
        throw;
    }
}

void CopyStream::copy(std::byte* to, const std::byte* from, size_t size) {
    put([&] { device_.copy(to, from, size, stream_.get()); });
}

void CopyStream::copy_rows(ByteRows to, ConstByteRows from, size_t rows, size_t row_size) {
    put([&] { device_.copy_rows(to, from, rows, row_size, stream_.get()); });
}

std::shared_ptr<const DeviceEvent> CopyStream::record() {
    return put([&] { return std::shared_ptr<const DeviceEvent>(device_.record(stream_.get())); });
}

void CopyStream::wait() {
    const auto event = record();
    try {
        event->wait(Deadline::in(all_.timeout_));
    } catch (...) {
        ++all_.failures_;
        throw;
    }
}

// The kernel writes the checksums of chunks into a slice.
std::vector<uint32_t> CopyStream::checksums(std::span<const std::span<const std::byte>> ranges) {
    constexpr size_t chunk = kernels::chunk_elements;
    constexpr size_t most = CopyStreams::slice_bytes / sizeof(uint32_t);
    const auto chunks_of = [](std::span<const std::byte> range) { return (range.size() + chunk - 1) / chunk; };
    const auto memory = slice();
    const std::span<const uint32_t> all(reinterpret_cast<const uint32_t*>(memory.get()), most);
    std::vector<uint32_t> checksums;
    while (!ranges.empty()) {
        size_t count = 0;
        size_t chunks = 0;
        put([&] {
            OverTensors<kernels::ChecksumOfChunks> over(device_, {{}, memory.get()}, stream_.get());
            for (; count < ranges.size() && chunks + chunks_of(ranges[count]) <= most; ++count) {
                over.add(ranges[count].size(), ranges[count].data());
                chunks += chunks_of(ranges[count]);
            }
            over.finish();
        });
        wait();
        for (size_t at = 0; const std::span<const std::byte> range : ranges.first(count)) {
            checksums.push_back(crc32c_joined(all.subspan(at, chunks_of(range)), chunk, range.size()));
            at += chunks_of(range);
        }
        ranges = ranges.subspan(count);
    }
    return checksums;
}

std::shared_ptr<std::byte> CopyStream::slice() { return all_.slice(device_); }

CopyStreams::~CopyStreams() {
    const auto settled = [this] { settle(); };
    if (!attempt(settled)) return;
    const auto error = attempt(settled);
    if (!error || error->code() == Code::cuda) return;  // a device that has failed for good copies nothing more
    // A copy may still run: what it may touch is left to it.
    const std::lock_guard lock(pool_->mutex);
    for (auto& slice : pool_->free) {
        static_cast<void>(new std::shared_ptr<std::byte>(std::move(slice)));  // NOLINT(cppcoreguidelines-owning-memory)
    }
}

CopyStream* CopyStreams::of(Device device) {
    if (device.type == DeviceType::cpu) return nullptr;
    const std::lock_guard lock(mutex_);
    auto& stream = streams_[device.index];
    if (stream == nullptr) stream = std::make_unique<CopyStream>(*this, device_api(device));
    return stream.get();
}

std::shared_ptr<std::byte> CopyStreams::slice(DeviceApi& device) {
    std::shared_ptr<std::byte> memory;
    {
        const std::lock_guard lock(pool_->mutex);
        if (!pool_->free.empty()) {
            memory = std::move(pool_->free.back());
            pool_->free.pop_back();
        }
    }
    if (memory == nullptr) memory = device.allocate_host(slice_bytes);
    std::byte* const data = memory.get();
    std::shared_ptr<std::byte> slice{data, [pool = pool_, memory = std::move(memory)](std::byte*) mutable {
                                         const std::lock_guard lock(pool->mutex);
                                         pool->free.push_back(std::move(memory));
                                     }};
    settle();  // it may be of a thread that has just failed
    return slice;
}

void CopyStreams::settle() {
    if (settled_ == failures_) return;
    const std::lock_guard lock(mutex_);
    const unsigned failures = failures_;
    if (settled_ == failures) return;
    for (const auto& [index, stream] : streams_) {
        if (stream != nullptr) stream->wait();
    }
    settled_ = failures;
}

}  // namespace tsr
