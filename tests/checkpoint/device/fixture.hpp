// What the tests of states with tensors on (simulated) devices share: such states, a stream that is held, and a look at
// what is left when a test ends.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/fixture.hpp"
#include "device/device.hpp"
#include "simulated_cuda/control.h"
#include "simulated_cuda/device_test.hpp"
#include "simulated_cuda/hold.hpp"
#include "soon.hpp"

namespace tsr::testing {

inline constexpr Device cpu{};
inline Device cuda(int index) { return {DeviceType::cuda, index}; }

// A state whose tensors are on any devices: the same content as an OwnedState of the same tensors, which it is filled from
// and compared in.
class DeviceState {
   public:
    State state;

    void add_whole(const Spec& spec, Device device) {
        mirror_.add_whole(spec);
        place(spec, device, nullptr, -1);
    }
    void add_sharded(const Spec& spec, const Layout& layout, int rank, Device device) {
        mirror_.add_sharded(spec, layout, rank);
        place(spec, device, &layout, rank);
    }
    void fill(uint64_t salt = 0) {
        mirror_.fill(salt);
        upload();
    }
    void poison() {
        mirror_.poison();
        upload();
    }
    // The number of elements that differ from what fill(salt) writes.
    int64_t differences(uint64_t salt = 0) {
        for_each([](DeviceApi& device, std::byte* here, std::byte* there, size_t size) {
            device.copy(here, there, size, nullptr);
            device.record(nullptr)->wait(soon());
        });
        return mirror_.differences(salt);
    }
    [[nodiscard]] Tensor piece(const std::string& name, size_t box = 0) const {
        return state.tensors().find(name)->second.piece(box);
    }

   private:
    void place(const Spec& spec, Device device, const Layout* layout, int rank) {
        std::vector<Tensor> pieces;
        const StateTensor& mirrored = mirror_.state.tensors().find(spec.name)->second;
        for (size_t i = 0; i < mirrored.memory.size(); ++i) {
            Tensor piece = mirrored.piece(i);
            if (device != cpu) {
                memory_.push_back(device_api(device).allocate(piece.size_bytes()));
                piece.data = memory_.back().get();
                piece.device = device;
            }
            pieces.push_back(piece);
        }
        if (layout == nullptr) {
            state.add_tensor(spec.name, pieces[0]);
        } else {
            state.add_sharded(spec.name, *layout, spec.dtype, pieces, rank);
        }
    }
    void upload() {
        for_each([](DeviceApi& device, std::byte* here, std::byte* there, size_t size) {
            device.copy(there, here, size, nullptr);
            device.record(nullptr)->wait(soon());
        });
    }
    template <class Visit>
    void for_each(Visit visit) {
        for (const auto& [name, tensor] : state.tensors()) {
            const StateTensor& mirrored = mirror_.state.tensors().find(name)->second;
            for (size_t i = 0; i < tensor.memory.size(); ++i) {
                if (tensor.device != cpu)
                    visit(device_api(tensor.device), mirrored.memory[i], tensor.memory[i],
                          tensor.piece(i).size_bytes());
            }
        }
    }

    OwnedState mirror_;
    std::vector<std::shared_ptr<std::byte>> memory_;
};

// Holds a stream from now until it is opened or destroyed.
class HeldStream {
   public:
    HeldStream(Device device, StreamHandle stream)
        : hold_(device_api(device), stream), end_(device_api(device).record(stream)) {}
    ~HeldStream() {
        open();
        end_->wait(soon());
    }
    HeldStream(const HeldStream&) = delete;
    HeldStream& operator=(const HeldStream&) = delete;

    void open() const { hold_.release(); }
    [[nodiscard]] bool is_held() const { return !end_->done(); }

   private:
    const Hold hold_;
    const std::unique_ptr<DeviceEvent> end_;
};

class DeviceCheckpoint : public DeviceTest {
   protected:
    // Returns when the device has done all that it was given, such as copies that a failed save left behind.
    static void settle(int device) {
        static_cast<void>(cuda_device(device).allocate(1));  // to free it waits for the device
    }

    TempDir dir_;
};

}  // namespace tsr::testing
