// A mesh over a communicator: each named dimension has a communicator of the ranks that differ from this one only in
// that coordinate. Creation is collective; afterwards a mesh is constant. A slice has a subset of a mesh's dimensions
// and shares their communicators; a flattened mesh merges all dimensions into one, with its own communicator.
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
    // Collective. A shape that does not match the communicator's size is INVALID_ARGUMENT on all ranks, naming a rank
    // with that shape.
    DeviceMesh(Communicator& comm, MeshShape shape);

    // The dimensions `names`, which must be in this mesh's order. Local. Throws NOT_FOUND, INVALID_ARGUMENT.
    [[nodiscard]] DeviceMesh slice(std::span<const std::string> names) const;
    // Merges all dimensions into one named `name`, by default their names joined by "_". Collective over `comm`, which
    // must have the ranks of the communicator that the original mesh was created from, in the same order; otherwise
    // INVALID_ARGUMENT on this rank only, since it is unknown where the others wait.
    [[nodiscard]] DeviceMesh flatten(Communicator& comm, const std::string& name) const;

    [[nodiscard]] const MeshShape& shape() const { return shape_; }
    [[nodiscard]] int coordinate(int dim) const { return comm(dim)->rank(); }
    // The mesh that this is a part of, over all ranks of the communicator that it was created from, and this rank there.
    [[nodiscard]] const MeshShape& all() const { return all_; }
    [[nodiscard]] int rank_of_all() const { return rank_; }
    // The dimensions of all() that make up `dim`: one, or those that were flattened.
    [[nodiscard]] std::span<const int> dims_of(int dim) const { return dims_[static_cast<size_t>(dim)]; }
    [[nodiscard]] const std::shared_ptr<Communicator>& comm(int dim) const { return comms_[static_cast<size_t>(dim)]; }

   private:
    DeviceMesh(const DeviceMesh& whole, MeshShape shape)
        : shape_(std::move(shape)), all_(whole.all_), rank_(whole.rank_) {}
    [[nodiscard]] std::shared_ptr<Communicator> join(Communicator& comm, const std::vector<int>& dims,
                                                     const std::string& name) const;

    MeshShape shape_;
    MeshShape all_;                       // the shape over all ranks of the communicator; a slice's shape_ has fewer
    int rank_;                            // among all
    std::vector<std::vector<int>> dims_;  // the dimensions of all_ that make up each dimension
    std::vector<std::shared_ptr<Communicator>> comms_;  // one per dimension
};

}  // namespace tsr
