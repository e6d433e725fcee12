// Unshards the parameters of a unit (makes them "whole"): one copy per host, in memory that its ranks share and into
// which each rank writes its own chunks. Across hosts, one rank per host (the leader) exchanges the chunks of its host.
//
//     all ranks of the host have released the memory - each writes its chunks - [leaders exchange] - all may read
//
// If an earlier copy is still in the memory, each rank compares its chunks with it, and nothing is written if all are
// unchanged.
//
// A unit may be kept by fewer ranks than shard it, from its forward to its backward: each of a few consecutive hosts
// keeps a part of the copy, and only these hosts exchange their parts when the unit is unsharded again.
//
// Between two of these phases the ranks meet in a collective, which orders all memory accesses before it on one rank
// before all accesses after it on the others. Everything runs in jobs of the communicator's progress thread, one after
// another.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/host_ranks.hpp"
#include "parallel/fsdp/unit_plan.hpp"

namespace tsr {

// Memory of a copy. Used by one unit after another.
struct WholeMemory {
    size_t size = 0;
    std::shared_ptr<std::byte> memory;  // MAP_SHARED; null before the first copy
};

// The part of a unit that a host keeps.
struct KeptPart {
    int hosts = 0;                      // hosts that keep the unit together
    std::shared_ptr<std::byte> memory;  // null before it is kept for the first time
};

class WholeCopies {
   public:
    // Collective over `comm`, which belongs to this object.
    WholeCopies(std::shared_ptr<Communicator> comm, std::shared_ptr<const FsdpPlan> plan);

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return comm_; }
    // The ranks of this host, which share memory.
    [[nodiscard]] const HostRanks& host() const { return host_; }

    // Fills `memory`, which is slot number `slot` and large enough, from this rank's shards or from the kept part of
    // the unit; skipped if the copy `is_left` there and no shard has changed. MISMATCH if another rank unshards another
    // unit.
    void make_whole(size_t unit, size_t slot, WholeMemory& memory, const std::byte* shards, const KeptPart* kept,
                    bool is_left);

    // The number of hosts that together keep a unit for every `ranks` consecutive ranks. 1: each host has all of it. 0:
    // nothing is kept, because all hosts would be needed, or hosts have different numbers of ranks or do not divide
    // evenly. Collective: if there are several, they get a communicator.
    [[nodiscard]] int prepare_to_keep(int ranks);
    // Keeps this host's part of a unit that is unsharded in `memory`.
    void keep(size_t unit, const WholeMemory& memory, KeptPart& kept);

   private:
    // Runs `body`; if it fails, aborts what other ranks wait for.
    template <class Body>
    void together(Body&& body);
    // Whether the copy is stale on any rank.
    [[nodiscard]] bool agree(size_t unit, size_t slot, bool is_stale);
    [[nodiscard]] bool is_stale(const UnitPlan& unit, const std::byte* whole, const std::byte* shards) const;
    void exchange(const UnitPlan& unit, std::byte* whole);
    // The slices, as bytes, of each piece that `count` of the `hosts` hosts keep, beginning with host `first`.
    [[nodiscard]] std::vector<Tensor> slices_of(const UnitPlan& unit, std::byte* whole, int hosts, int first,
                                                int count) const;
    // Copies this rank's share of its host's part from or to the unsharded copy.
    template <class Copy>
    void copy_part(const UnitPlan& unit, std::byte* whole, const KeptPart& kept, Copy&& copy) const;
    [[nodiscard]] std::vector<Tensor> chunks_of(const UnitPlan& unit, std::byte* whole, int first_rank,
                                                int count) const;

    const std::shared_ptr<Communicator> comm_;
    const std::shared_ptr<const FsdpPlan> plan_;
    HostRanks host_;
    std::shared_ptr<Communicator> leaders_;  // one rank per host; null on the other ranks and with a single host
    std::vector<int> hosts_;                 // the lowest rank of each host, in the leaders' order
    bool even_ = false;                      // hosts have the same number of consecutive ranks
    size_t host_number_ = 0;                 // of this host
    std::map<int, std::shared_ptr<Communicator>> keepers_;  // by number of hosts: their leaders
};

}  // namespace tsr
