// The ranks of a communicator that are on this rank's host and can share memory: their numbers, a communicator for
// them, and memory that all of them reach. Used by one thread at a time, like a communicator; constant except for its
// communicator.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.hpp"

namespace tsr {

class HostRanks {
   public:
    // Collective over `comm`.
    explicit HostRanks(const std::shared_ptr<Communicator>& comm);

    // For each rank of the communicator, the lowest rank on its host; the rank itself if the transport shares no
    // memory.
    [[nodiscard]] const std::vector<int>& firsts() const { return firsts_; }
    // The ranks of this host, in order.
    [[nodiscard]] const std::vector<int>& ranks() const { return ranks_; }
    [[nodiscard]] int place() const { return host_->rank(); }  // this rank's index among them
    [[nodiscard]] int places() const { return host_->world_size(); }
    // All ranks are on this host; comm() is then the original communicator.
    [[nodiscard]] bool is_alone() const { return host_ == comm_; }
    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return host_; }

    // Collective over the host's ranks. Errors name ranks of the original communicator, not places.
    void run(const Request& request);
    // Collective over the host's ranks: zeroed memory shared by all of them, aligned to 4096. Freed with the last
    // reference.
    [[nodiscard]] std::shared_ptr<std::byte> allocate(size_t size);
    // Translates an error of the host's communicator, which numbers ranks by place, to ranks of the original one.
    [[nodiscard]] Error told(const Error& error) const;

   private:
    const std::shared_ptr<Communicator> comm_;
    const std::vector<int> firsts_;
    const std::vector<int> ranks_;
    const std::shared_ptr<Communicator> host_;
};

}  // namespace tsr
