// Moves tensors on one device between the ranks of a communicator, in the order of the device's streams: the interface that
// NCCL implements. The communicator has a transport for the CPU beside it, which carries what this one needs to begin and
// notices the deaths of peers.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "comm/request.hpp"
#include "device/device.hpp"

namespace tsr {

class DeviceTransport {
   public:
    virtual ~DeviceTransport() = default;
    [[nodiscard]] virtual std::string_view name() const = 0;
    [[nodiscard]] virtual Device device() const = 0;

    // Throws UNSUPPORTED for a validated operation that this transport lacks.
    virtual void require(const Request& request) const = 0;
    // Enqueues a validated operation, whose tensors are all on device(), on the stream and returns. Every rank enqueues the same
    // operations in the same order; one thread at a time. Throws NCCL, CUDA or ABORTED; PEER_LOST, without naming it, if
    // a connection to a peer has ended.
    virtual void enqueue(const Request& request, StreamHandle stream) = 0;
    // Collective over all ranks, while nothing that was enqueued is unfinished: a transport for the ranks with the same
    // color, or null for those with no_color. Waits until `deadline`; `poll` is called meanwhile and may throw to give up. If it
    // fails, this transport has failed too.
    struct Part {
        static constexpr int no_color = -1;
        int color = no_color;
        int rank = 0;   // this rank's in the part
        int ranks = 0;  // of the part
    };
    [[nodiscard]] virtual std::unique_ptr<DeviceTransport> split(const Part& part, Deadline deadline,
                                                                 const std::function<void()>& poll) = 0;
    // Throws what has failed since in operations that were enqueued, as far as it is known. Any thread.
    virtual void check() = 0;
    // Ends everything that was enqueued, and makes later calls throw ABORTED. Idempotent, any thread.
    virtual void abort() = 0;
};

// What rank 0 makes for all ranks before they connect. Plain bytes.
using NcclId = std::array<char, 128>;

// Both throw UNSUPPORTED where NCCL cannot be used.
struct NcclFacts {
    std::string version;  // "2.28.9"
    std::string path;     // of the library that was loaded
};
[[nodiscard]] NcclFacts nccl_facts();
[[nodiscard]] NcclId make_nccl_id();

// Collective over `ranks` ranks with the same id, each on a different device. Waits until `deadline` for the others; `poll` is
// called meanwhile and may throw to give up.
[[nodiscard]] std::unique_ptr<DeviceTransport> make_nccl_transport(const NcclId& id, int rank, int ranks, Device device,
                                                                   Deadline deadline,
                                                                   const std::function<void()>& poll);

}  // namespace tsr
