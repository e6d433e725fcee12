#include "comm/mesh.hpp"

#include <fmt/format.h>

#include <utility>

#include "comm/fingerprint.hpp"

namespace tsr {

DeviceMesh::DeviceMesh(Communicator& comm, MeshShape shape) : shape_(std::move(shape)), rank_(comm.rank()) {
    if (shape_.rank_count() != comm.world_size()) {
        throw Error(Code::invalid_argument, fmt::format("the mesh ({}) has {} places, the communicator {} ranks",
                                                        shape_.str(), shape_.rank_count(), comm.world_size()));
    }
    // All ranks must arrange themselves alike, or the splits below would make groups that do not fit together.
    check_same_on_all_ranks(comm, {fmt::format("({})", shape_.str())}, "the ranks' meshes differ");
    for (int d = 0; d < shape_.ndim(); ++d) {
        CommOptions options = comm.options();
        options.name = comm.name() + "/" + shape_.name(d);
        comms_.push_back(comm.split(shape_.first_of_group(rank_, d), shape_.coordinate(rank_, d), options));
    }
}

}  // namespace tsr
