// tessera/mesh.h: named arrangements of ranks.
#include "tessera/mesh.h"

#include "comm/communicator.hpp"
#include "comm/fingerprint.hpp"
#include "comm/mesh.hpp"
#include "handles.hpp"
#include "mesh_object.hpp"

namespace tsr::capi {

namespace {

std::vector<std::string> names_in(const char* const* names, int32_t ndim) {
    if (ndim < 1 || ndim > TSR_MAX_NDIM) {
        throw Error(Code::invalid_argument,
                    fmt::format("the mesh has {} dimensions; 1 to {} are supported", ndim, TSR_MAX_NDIM));
    }
    required(names, "names");
    std::vector<std::string> copied;
    for (int32_t d = 0; d < ndim; ++d) copied.push_back(name_in(names[d], "a dimension's name"));
    return copied;
}

MeshShape shape_in(const char* const* names, const int32_t* sizes, int32_t ndim) {
    std::vector<std::string> copied = names_in(names, ndim);
    required(sizes, "sizes");
    return {std::move(copied), {sizes, sizes + ndim}};
}

}  // namespace

extern "C" {

tsr_status tsr_mesh_create(tsr_comm* comm, const char* const* names, const int32_t* sizes, int32_t ndim,
                           tsr_mesh** out) {
    return guard([&] {
        create(out, [&] {
            Communicator& ranks = *object_of(comm, "comm");
            MeshShape shape =
                or_refuse_on_all_ranks(ranks, Compared::meshes, [&] { return shape_in(names, sizes, ndim); });
            return std::make_shared<MeshObject>(DeviceMesh(ranks, std::move(shape)));
        });
    });
}

tsr_status tsr_mesh_ndim(const tsr_mesh* mesh, int32_t* ndim) {
    return guard([&] { required(ndim, "ndim") = object_of(mesh, "mesh")->mesh.shape().ndim(); });
}

tsr_status tsr_mesh_dim(const tsr_mesh* mesh, const char* name, int32_t* size, int32_t* coordinate) {
    return guard([&] {
        const DeviceMesh& m = object_of(mesh, "mesh")->mesh;
        const int dim = m.shape().dim(name_in(name, "name"));
        if (size != nullptr) *size = m.shape().size(dim);
        if (coordinate != nullptr) *coordinate = m.coordinate(dim);
    });
}

tsr_status tsr_mesh_comm(const tsr_mesh* mesh, const char* name, tsr_comm** comm) {
    return guard([&] {
        tsr_comm*& out = required(comm, "comm");
        out = nullptr;
        MeshObject& m = *object_of(mesh, "mesh");
        out = m.handles[static_cast<size_t>(m.mesh.shape().dim(name_in(name, "name")))].get();
    });
}

tsr_status tsr_mesh_slice(const tsr_mesh* mesh, const char* const* names, int32_t ndim, tsr_mesh** out) {
    return guard([&] {
        create(out, [&] {
            const DeviceMesh& whole = object_of(mesh, "mesh")->mesh;
            return std::make_shared<MeshObject>(whole.slice(names_in(names, ndim)));
        });
    });
}

tsr_status tsr_mesh_flatten(const tsr_mesh* mesh, tsr_comm* comm, const char* name, tsr_mesh** out) {
    return guard([&] {
        create(out, [&] {
            if (comm == nullptr) (void)object_of(mesh, "mesh");  // if both are invalid, report the first
            Communicator& ranks = *object_of(comm, "comm");
            const auto [whole, text] = or_refuse_on_all_ranks(ranks, Compared::meshes, [&] {
                return std::pair(object_of(mesh, "mesh"), std::string(name == nullptr ? "" : name_in(name, "name")));
            });
            return std::make_shared<MeshObject>(whole->mesh.flatten(ranks, text));
        });
    });
}

void tsr_mesh_destroy(tsr_mesh* mesh) { destroy(mesh); }

}  // extern "C"

}  // namespace tsr::capi
