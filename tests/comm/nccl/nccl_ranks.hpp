// What tests of communicators with NCCL share: simulated devices (simulated_cuda/control.h), a mock of NCCL
// (mock_nccl/control.h), and ranks as threads, each with a device of its own.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "device/device.hpp"
#include "mock_nccl/fixture.hpp"
#include "ranks.hpp"
#include "simulated_cuda/control.h"
#include "soon.hpp"

namespace tsr::testing {

inline CommOptions nccl_options() {
    const std::string cpu = test_backend();
    return test_options(("cpu:" + cpu + ",cuda:nccl").c_str());
}

// Memory of a rank's device, and its content on the host.
class DeviceMemory {
   public:
    DeviceMemory(int device, size_t size)
        : api_(cuda_device(device)), size_(size), memory_(api_.allocate_zeroed(size)) {}

    [[nodiscard]] std::byte* data() const { return memory_.get(); }
    void write(const std::vector<std::byte>& content, StreamHandle stream = nullptr) {
        api_.copy(memory_.get(), content.data(), size_, stream);
    }
    [[nodiscard]] std::vector<std::byte> read(StreamHandle stream = nullptr) const {
        std::vector<std::byte> content(size_);
        api_.copy(content.data(), memory_.get(), size_, stream);
        api_.record(stream)->wait(soon());
        return content;
    }

   private:
    DeviceApi& api_;
    size_t size_;
    std::shared_ptr<std::byte> memory_;
};

inline Tensor on_device(const DeviceMemory& memory, int64_t count, DType dtype, int device, size_t offset = 0) {
    return {memory.data() + offset, Dims{count}, dtype, {DeviceType::cuda, device}};
}

// The sum over `comm` of what each rank has on its device: the number of that device, counted from 1.
inline int sum_of_numbers(Communicator& comm, int device) {
    DeviceMemory memory(device, 4);
    std::vector<std::byte> value(4);
    value[0] = static_cast<std::byte>(device + 1);
    memory.write(value);
    const Tensor tensor = on_device(memory, 1, DType::i32, device);
    comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
    return std::to_integer<int>(memory.read()[0]);
}

class Nccl : public MockNcclTest {};

inline Error only_error(const Outcomes& outcomes, size_t rank) {
    if (!outcomes[rank]) {
        ADD_FAILURE() << "rank " << rank << " has no error";
        return {Code::internal, ""};
    }
    return *outcomes[rank];
}

}  // namespace tsr::testing
