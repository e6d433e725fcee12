// Makes the parameters of a unit whole: one copy a host, in memory that its ranks share, of which each rank writes its own
// chunks; across hosts one rank of each exchanges those of its host.
//
//     all ranks of the host have let go of the memory - each writes its chunks - [leaders exchange] - all may read
//
// Where a copy of before is left in the memory each rank compares its chunks with that, and nothing is written if all of them
// are as they were.
//
// A unit may be kept among fewer ranks than it is cut among, from its forward to its backward: each of a few hosts that
// follow each other keeps a part of the whole copy, and they alone exchange those when it becomes whole again.
//
// Between two of these the ranks meet in a collective, which orders all memory before it on one rank ahead of all after it
// on the others. Everything here runs in jobs of its communicator's progress thread, one after the other.
#pragma once

#include <map>
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

// What a host keeps of a unit.
struct KeptPart {
    int hosts = 0;                      // that keep the unit together
    std::shared_ptr<std::byte> memory;  // none before it is kept for the first time
};

class WholeCopies {
   public:
    // Collective over `comm`, which belongs to this object.
    WholeCopies(std::shared_ptr<Communicator> comm, std::shared_ptr<const FsdpPlan> plan);

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return comm_; }
    // Of the ranks, as they share memory.
    [[nodiscard]] const HostRanks& host() const { return host_; }

    // Fills `memory`, which is number `slot` of those in use and large enough, from this rank's shards, or from what was
    // kept of the unit; not if it `is_left` there and no shard has changed. MISMATCH if another rank makes another unit
    // whole.
    void make_whole(size_t unit, size_t slot, WholeMemory& memory, const std::byte* shards, const KeptPart* kept,
                    bool is_left);

    // How many hosts keep a unit together that is kept among each `ranks` ranks that follow each other. 1: each host has
    // all of it. 0: none keeps anything, as where all would together, or where hosts have different numbers of ranks or do
    // not fit together. Collective: where there are more, they get a communicator.
    [[nodiscard]] int prepare_to_keep(int ranks);
    // This host's part, of a unit that is whole in `memory`.
    void keep(size_t unit, const WholeMemory& memory, KeptPart& kept);

   private:
    // Runs it, and ends what others wait for if it fails.
    template <class Body>
    void together(Body&& body);
    // Whether the copy is stale on one of the ranks.
    [[nodiscard]] bool agree(size_t unit, size_t slot, bool is_stale);
    [[nodiscard]] bool is_stale(const UnitPlan& unit, const std::byte* whole, const std::byte* shards) const;
    void exchange(const UnitPlan& unit, std::byte* whole);
    // The slices, as bytes, of each piece that one of `hosts` hosts keeps, or all of them.
    [[nodiscard]] std::vector<Tensor> slices_of(const UnitPlan& unit, std::byte* whole, int hosts, int first,
                                                int count) const;
    // Copies this rank's share of its host's part, from or to the whole copy.
    template <class Copy>
    void copy_part(const UnitPlan& unit, std::byte* whole, const KeptPart& kept, Copy&& copy) const;
    [[nodiscard]] std::vector<Tensor> chunks_of(const UnitPlan& unit, std::byte* whole, int first_rank,
                                                int count) const;

    const std::shared_ptr<Communicator> comm_;
    const std::shared_ptr<const FsdpPlan> plan_;
    HostRanks host_;
    std::shared_ptr<Communicator> leaders_;  // one rank a host; null if there is one host, or for the others
    std::vector<int> hosts_;                 // the lowest rank of each, in the leaders' order
    bool even_ = false;                      // hosts have equally many ranks, which follow each other
    size_t host_number_ = 0;                 // of this host
    std::map<int, std::shared_ptr<Communicator>> keepers_;  // of so many hosts, their leaders
};

}  // namespace tsr
