// The object behind a tsr_mesh. It owns the handles that tsr_mesh_comm lends, one per dimension.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "comm/mesh.hpp"
#include "handles.hpp"

namespace tsr::capi {

struct MeshObject {
    explicit MeshObject(DeviceMesh of) : mesh(std::move(of)) {
        for (int d = 0; d < mesh.shape().ndim(); ++d) {
            handles.emplace_back(new tsr_comm, [](tsr_comm* handle) { destroy(handle); });
            handles.back()->object = mesh.comm(d);
        }
    }

    DeviceMesh mesh;
    std::vector<std::unique_ptr<tsr_comm, void (*)(tsr_comm*)>> handles;
};

}  // namespace tsr::capi
