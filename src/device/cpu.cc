// The CPU as a device: operations run on the caller's thread, so every event is done.
#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/page_size.hpp"
#include "base/round_up.hpp"
#include "device/device.hpp"

namespace tsr {

namespace {

class DoneEvent final : public DeviceEvent {
   public:
    const Clock::time_point at = Clock::now();

    [[nodiscard]] bool done() const override { return true; }
    void wait(Deadline /*deadline*/) const override {}
};

class Cpu final : public DeviceApi {
   public:
    [[nodiscard]] std::string_view name() const override { return "CPU"; }

    [[nodiscard]] std::shared_ptr<std::byte> allocate(size_t size) override { return mapped(size, MAP_POPULATE); }
    [[nodiscard]] std::shared_ptr<std::byte> allocate_zeroed(size_t size) override { return mapped(size, 0); }

    [[nodiscard]] std::shared_ptr<std::byte> allocate_host(size_t size) override { return allocate(size); }
    [[nodiscard]] std::shared_ptr<void> register_host(std::byte* /*data*/, size_t /*size*/) override { return nullptr; }

    [[nodiscard]] std::shared_ptr<void> new_stream() override { return nullptr; }
    void in_use(FunctionRef<void()> body) override { body(); }
    void check_stream(StreamHandle stream) override {
        if (stream == nullptr) return;
        throw Error(Code::invalid_argument, "a stream was passed for a tensor on the CPU; the CPU has no streams");
    }
    [[nodiscard]] bool is_captured(StreamHandle /*stream*/) override { return false; }
    void check_memory(const std::byte* /*data*/) override {}

    void copy(std::byte* to, const std::byte* from, size_t size, StreamHandle stream) override {
        check_stream(stream);
        if (size > 0) std::memcpy(to, from, size);
    }

    void copy_rows(ByteRows to, ConstByteRows from, size_t rows, size_t row_size, StreamHandle stream) override {
        if (to.stride == row_size && from.stride == row_size) return copy(to.data, from.data, rows * row_size, stream);
        check_stream(stream);
        if (row_size == 0) return;
        for (size_t row = 0; row < rows; ++row) {
            std::memcpy(to.data + row * to.stride, from.data + row * from.stride, row_size);
        }
    }

    void zero(std::byte* to, size_t size, StreamHandle stream) override {
        check_stream(stream);
        if (size > 0) std::memset(to, 0, size);
    }

    [[nodiscard]] std::unique_ptr<DeviceEvent> record(StreamHandle stream) override {
        check_stream(stream);
        return std::make_unique<DoneEvent>();
    }
    void record_again(DeviceEvent& /*event*/, StreamHandle stream) override { check_stream(stream); }

    [[nodiscard]] std::unique_ptr<DeviceEvent> record_time(StreamHandle stream) override { return record(stream); }
    [[nodiscard]] std::chrono::nanoseconds elapsed(const DeviceEvent& from, const DeviceEvent& to) override {
        return dynamic_cast<const DoneEvent&>(to).at - dynamic_cast<const DoneEvent&>(from).at;
    }

    void wait(StreamHandle stream, const DeviceEvent& /*event*/) override { check_stream(stream); }

    void require_kernels() override { throw Error(Code::unsupported, "the CPU has no kernels of devices"); }
    void launch(const Launch& /*launch*/, StreamHandle /*stream*/) override { require_kernels(); }

   private:
    static std::shared_ptr<std::byte> mapped(size_t size, int flags) {
        const size_t length = std::max(round_up(size, page_size), page_size);
        void* pages = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
        if (pages == MAP_FAILED) {
            throw Error(Code::no_memory, fmt::format("the CPU has no memory for {} bytes", size));
        }
        return {static_cast<std::byte*>(pages), [length](std::byte* data) { ::munmap(data, length); }};
    }
};

}  // namespace

DeviceApi& cpu_device() {
    static Cpu cpu;
    return cpu;
}

}  // namespace tsr
