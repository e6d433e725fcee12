// Makes the parameters of a unit whole: one copy a host, in memory that its ranks share, of which each rank writes its own
// chunks; across hosts one rank of each exchanges those of its host.
//
//     all ranks of the host have let go of the memory - each writes its chunks - [leaders exchange] - all may read
//
// Between two of these the ranks meet in a collective, which orders all memory before it on one rank ahead of all after it
// on the others. Everything here runs in jobs of its communicator's progress thread, one after the other.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/host_ranks.hpp"
#include "parallel/fsdp/unit_plan.hpp"

namespace tsr {

// What a copy lies in. Used by one unit after the other.
struct WholeMemory {
    size_t size = 0;
    std::shared_ptr<std::byte> memory;  // MAP_SHARED; none before the first copy
};

class WholeCopies {
   public:
    // Collective over `comm`, which belongs to this object.
    WholeCopies(std::shared_ptr<Communicator> comm, std::shared_ptr<const FsdpPlan> plan);

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return comm_; }
    // Of the ranks, as they share memory.
    [[nodiscard]] const HostRanks& host() const { return host_; }

    // Fills `memory`, which is number `slot` of those in use and large enough, from this rank's shards. MISMATCH if another
    // rank makes another unit whole.
    void make_whole(size_t unit, size_t slot, WholeMemory& memory, const std::byte* shards);

   private:
    void agree(size_t unit, size_t slot);
    void exchange(const UnitPlan& unit, std::byte* whole);
    [[nodiscard]] std::vector<Tensor> chunks_of(const UnitPlan& unit, std::byte* whole, int first_rank,
                                                int count) const;

    const std::shared_ptr<Communicator> comm_;
    const std::shared_ptr<const FsdpPlan> plan_;
    HostRanks host_;
    std::shared_ptr<Communicator> leaders_;  // one rank a host; null if there is one host, or for the others
    std::vector<int> hosts_;                 // the lowest rank of each, in the leaders' order
    bool even_ = false;                      // hosts have equally many ranks, which follow each other
};

}  // namespace tsr
