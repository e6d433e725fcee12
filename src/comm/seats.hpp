// The places of a job's ranks, when a rank that dies is replaced: each place is taken by one process after another, and
// all ranks make one communicator after another, old and new processes together.
//
// They meet in attempts that the store counts. In each, every rank announces its process; the last one to do so publishes
// the list, and the ranks make the communicator (attempt.hpp). An attempt that finds another process of this rank
// announced has failed: that one has died, or is about to see that it was replaced. So a process joins the first attempt
// whose outcome is open, whatever happened before it came, and those that wait in an attempt that cannot succeed follow.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/communicator.hpp"
#include "store/store.hpp"

namespace tsr {

// Collective. Communicator::create() for the ranks of such a job: `replacement` counts the processes that had this rank
// before. If it is not 0, this process joins those that call grow().
[[nodiscard]] std::shared_ptr<Communicator> create_replaceable(std::shared_ptr<Store> store, int rank, int world_size,
                                                               int replacement, const CommOptions& options,
                                                               const Departures& departures = {});

// After a communicator of create_replaceable() has failed, or one of grow(): a new one of the same ranks, of which some are
// new processes. Collective over all of these. The old one and all its memory become unusable. Throws TIMEOUT naming the
// ranks that do not come within `options.timeout`, PEER_LOST if one has ended and is not replaced, ABORTED if this process
// has been replaced, INVALID_STATE for another communicator.
[[nodiscard]] std::shared_ptr<Communicator> grow(Communicator& comm, const CommOptions& options);

// What a Group knows of its place.
struct Seats {
    std::shared_ptr<Store> store;  // has only keys of these communicators
    int rank = 0;
    int world_size = 1;
    int replacement = 0;  // how many processes had this rank before this one
    Departures departures;
    int64_t attempt = 0;  // that made the current communicator; 0: there is none yet
};

}  // namespace tsr
