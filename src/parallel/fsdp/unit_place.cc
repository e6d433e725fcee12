#include "parallel/fsdp/unit_place.hpp"

#include <fmt/core.h>

#include "comm/inner_options.hpp"

namespace tsr {

std::shared_ptr<Communicator> own_communicator(Communicator& comm, const std::string& what, int color, Reach reach) {
    CommOptions options = inner_options(comm, "/" + what);
    if (reach == Reach::all) options.backend = comm.options().backend;
    options.bound = true;
    return comm.split(color, comm.rank(), options);
}

Error unshards_another(const FsdpPlan& plan, int rank, size_t unit, int peer, size_t theirs) {
    return Error(Code::mismatch,
                 fmt::format(
                     "rank {} unshards unit \"{}\" while rank {} unshards unit \"{}\"{}; all ranks must unshard "
                     "the same units in the same order",
                     rank, plan.units[unit].name, peer, theirs < plan.units.size() ? plan.units[theirs].name : "?",
                     theirs == unit ? " with other units also unsharded" : ""))
        .with_rank(rank)
        .with_peer(peer);
}

}  // namespace tsr
