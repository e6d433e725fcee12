// The ranks of a communicator that lie on this rank's host and can share memory: who they are, a communicator of theirs,
// and memory that all of them reach. Owned by one thread at a time, as a communicator is; constant but for its
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

    // For each rank of the communicator the lowest one on its host; itself where the transport shares no memory.
    [[nodiscard]] const std::vector<int>& firsts() const { return firsts_; }
    // Of this host, in their order.
    [[nodiscard]] const std::vector<int>& ranks() const { return ranks_; }
    [[nodiscard]] int place() const { return host_->rank(); }  // of this rank among them
    [[nodiscard]] int places() const { return host_->world_size(); }
    // They are all there are; their communicator is the whole one then.
    [[nodiscard]] bool is_alone() const { return host_ == comm_; }
    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return host_; }

    // Collective over them. Errors name ranks, not places.
    void run(const Request& request);
    // Collective over them: zeroed memory, the same for all, aligned to 4096. Freed when the last holder lets go.
    [[nodiscard]] std::shared_ptr<std::byte> allocate(size_t size);
    // The host's communicator numbers its ranks by their places: an error of it, with the ranks that they are.
    [[nodiscard]] Error told(const Error& error) const;

   private:
    const std::shared_ptr<Communicator> comm_;
    const std::vector<int> firsts_;
    const std::vector<int> ranks_;
    const std::shared_ptr<Communicator> host_;
};

}  // namespace tsr
