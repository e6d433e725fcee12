// A mesh over a communicator: for each named dimension the communicator of the ranks that differ from this one in that
// coordinate alone. Creation is collective; afterwards a mesh is constant.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "tensor/mesh_shape.hpp"

namespace tsr {

class DeviceMesh {
   public:
    DeviceMesh(Communicator& comm, MeshShape shape);

    [[nodiscard]] const MeshShape& shape() const { return shape_; }
    [[nodiscard]] int coordinate(int dim) const { return shape_.coordinate(rank_, dim); }
    [[nodiscard]] const std::shared_ptr<Communicator>& comm(int dim) const { return comms_[static_cast<size_t>(dim)]; }

   private:
    MeshShape shape_;
    int rank_;
    std::vector<std::shared_ptr<Communicator>> comms_;  // one a dimension
};

}  // namespace tsr
