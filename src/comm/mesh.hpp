// A mesh over a communicator: for each named dimension the communicator of the ranks that differ from this one in that
// coordinate alone. Creation is collective; afterwards a mesh is constant. A slice has some of a mesh's dimensions and
// shares their communicators; a flattened mesh has all of a mesh's in one, with a communicator of its own.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "tensor/mesh_shape.hpp"

namespace tsr {

class DeviceMesh {
   public:
    // Collective. A shape that is not the communicator's is INVALID_ARGUMENT on all ranks, which names a rank that has it.
    DeviceMesh(Communicator& comm, MeshShape shape);

    // The dimensions `names`, which are in this mesh's order. Local. Throws NOT_FOUND, INVALID_ARGUMENT.
    [[nodiscard]] DeviceMesh slice(std::span<const std::string> names) const;
    // One dimension `name` in the place of all; an empty name: theirs, joined by "_". Collective over `comm`, which has the
    // ranks of the communicator that the first mesh was made of, in the same order; one that has not is INVALID_ARGUMENT on
    // this rank alone, since where the others wait is not known.
    [[nodiscard]] DeviceMesh flatten(Communicator& comm, const std::string& name) const;

    [[nodiscard]] const MeshShape& shape() const { return shape_; }
    [[nodiscard]] int coordinate(int dim) const { return comm(dim)->rank(); }
    [[nodiscard]] const std::shared_ptr<Communicator>& comm(int dim) const { return comms_[static_cast<size_t>(dim)]; }

   private:
    DeviceMesh(const DeviceMesh& whole, MeshShape shape)
        : shape_(std::move(shape)), all_(whole.all_), rank_(whole.rank_) {}
    [[nodiscard]] std::shared_ptr<Communicator> join(Communicator& comm, const std::vector<int>& dims,
                                                     const std::string& name) const;

    MeshShape shape_;
    MeshShape all_;                       // of the communicator's ranks; shape_ is of some of them in a slice
    int rank_;                            // among all
    std::vector<std::vector<int>> dims_;  // those of all_ of which each dimension consists
    std::vector<std::shared_ptr<Communicator>> comms_;  // one a dimension
};

}  // namespace tsr
