// Moves tensors in the memory of CUDA devices between the ranks of a pipeline.
//
// NCCL runs the operations of a communicator one after the other, and one that waits for its peer holds up all that come
// later. So each direction between two ranks is a lane: a stream, and a communicator on which either rank has no other
// peer. Ranks that do not meet share communicators: a chain of ranks has four.
//
//     trainer's   forward 0 . forward 1 . . . . . . . . . . . wait . backward 0
//                          \ event                           / event
//     lane to 1             wait . send 0 . wait . send 1   /
//     lane from 1                                   receive 0
//
// What is enqueued never waits for what is enqueued later, on any rank: a lane's operations come in one order, the
// receiver's after the sender has told the receiver of them, and all that an operation waits for was enqueued before. So
// no order of the host's calls makes devices wait for each other for ever.
//
// One thread at a time uses a lane.
#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "comm/communicator.hpp"
#include "device/device.hpp"

namespace tsr::pipeline {

// Between two ranks.
struct Direction {
    int from = 0;
    int to = 0;
    auto operator<=>(const Direction&) const = default;
};

// The number of a communicator for each direction, so that no rank has two directions on one.
[[nodiscard]] std::map<Direction, size_t> lanes_of(const std::vector<Direction>& directions);

class DeviceLanes {
   public:
    // Collective over `comm`, with the same directions on every rank; those of other ranks are ignored. `backend` is one
    // with devices, `device` this rank's. The lanes end with `comm` when that is aborted.
    DeviceLanes(Communicator& comm, const std::vector<Direction>& directions, const std::string& backend,
                Device device);
    DeviceLanes(const DeviceLanes&) = delete;
    DeviceLanes& operator=(const DeviceLanes&) = delete;

    [[nodiscard]] DeviceApi& api() const { return api_; }
    [[nodiscard]] Device device() const { return device_; }

    [[nodiscard]] StreamHandle stream(Direction direction) const { return lanes_.at(direction).stream.get(); }
    // Sends or receives after all that the lane's stream has, and returns. The work is finished when the device is done; it
    // fails if that takes longer than `timeout`.
    [[nodiscard]] WorkPtr move(Direction direction, const Tensor& tensor, milliseconds timeout, std::string_view label);

    // Ends what is unfinished; later operations fail.
    void abort(const std::string& reason);

   private:
    struct Lane {
        std::shared_ptr<Communicator> comm;
        std::shared_ptr<void> stream;
    };

    const Device device_;
    DeviceApi& api_;
    const int rank_;
    std::vector<std::shared_ptr<Communicator>> comms_;
    std::map<Direction, Lane> lanes_;  // this rank's
};

}  // namespace tsr::pipeline
