// A communicator and the stream on which its operations run, with the kernels before and after them. Used by the trainer's
// thread, but for the communicator, which any thread may abort.
#pragma once

#include <cstddef>
#include <memory>

#include "comm/communicator.hpp"
#include "comm/work.hpp"
#include "device/device.hpp"
#include "device/growing_memory.hpp"

namespace tsr {

class DeviceLane {
   public:
    void open(std::shared_ptr<Communicator> comm, DeviceApi& api);
    [[nodiscard]] bool is_open() const { return comm_ != nullptr; }

    [[nodiscard]] Communicator& comm() const { return *comm_; }
    [[nodiscard]] StreamHandle stream() const { return stream_.get(); }

    // What is put here from now on comes after what `other` has now.
    void follow(StreamHandle other);
    [[nodiscard]] WorkPtr run(Request request);
    // All that the stream has now, for another stream to wait for. Fails like the last operation, but is never done.
    [[nodiscard]] WorkPtr point();
    [[nodiscard]] const WorkPtr& last() const { return last_; }  // null: there was none
    // Memory for what is put here, used in the order of the stream. Throws NO_MEMORY.
    void reserve(size_t size) { room_.reserve(size, *api_); }
    [[nodiscard]] std::byte* room() const { return room_.data(); }
    // Returns when the device has done all of it, kernels too.
    void drain(Deadline deadline);

   private:
    std::shared_ptr<Communicator> comm_;
    DeviceApi* api_ = nullptr;
    std::shared_ptr<void> stream_;
    WorkPtr last_;
    GrowingMemory room_;
};

}  // namespace tsr
