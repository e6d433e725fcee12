#include "comm/mesh.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "comm/fingerprint.hpp"
#include "comm/inner_options.hpp"

namespace tsr {

DeviceMesh::DeviceMesh(Communicator& comm, MeshShape shape)
    : shape_(std::move(shape)), all_(shape_), rank_(comm.rank()) {
    if (shape_.rank_count() != comm.world_size()) {
        refuse_on_all_ranks(
            comm, Compared::meshes,
            Error(Code::invalid_argument, fmt::format("mesh ({}) needs {} ranks, but the communicator has {}",
                                                      shape_.str(), shape_.rank_count(), comm.world_size())));
    }
    // All ranks must have the same shape, or the splits below would create inconsistent groups.
    check_same_on_all_ranks(comm, Compared::meshes, {fmt::format("({})", shape_.str())},
                            "the mesh differs between ranks");
    for (int d = 0; d < shape_.ndim(); ++d) {
        dims_.push_back({d});
        comms_.push_back(join(comm, dims_.back(), shape_.name(d)));
    }
}

// The communicator of the ranks that differ from this one in `dims` alone, in row-major order.
std::shared_ptr<Communicator> DeviceMesh::join(Communicator& comm, const std::vector<int>& dims,
                                               const std::string& name) const {
    int first = rank_;
    for (const int dim : dims) first = all_.first_of_group(first, dim);
    CommOptions options = inner_options(comm, "/" + name);
    options.backend = comm.options().backend;  // programs use it for their tensors
    std::shared_ptr<Communicator> group = comm.split(first, rank_, options);
    // The mesh or the last of its slices calls leave().
    Communicator* const it = group.get();
    return {it, [group = std::move(group)](Communicator*) { group->leave(); }};
}

DeviceMesh DeviceMesh::slice(std::span<const std::string> names) const {
    std::vector<int> chosen;
    std::vector<int> sizes;
    for (const std::string& name : names) {
        chosen.push_back(shape_.dim(name));
        sizes.push_back(shape_.size(chosen.back()));
        if (chosen.size() < 2 || chosen.back() > chosen[chosen.size() - 2]) continue;
        throw Error(Code::invalid_argument,
                    fmt::format("cannot slice ({}) from mesh ({}): name each dimension once, in the mesh's order",
                                fmt::join(names, ", "), shape_.str()));
    }
    DeviceMesh part(*this, MeshShape({names.begin(), names.end()}, std::move(sizes)));
    for (const int dim : chosen) {
        part.dims_.push_back(dims_[static_cast<size_t>(dim)]);
        part.comms_.push_back(comm(dim));
    }
    return part;
}

DeviceMesh DeviceMesh::flatten(Communicator& comm, const std::string& name) const {
    if (comm.rank() != rank_ || comm.world_size() != all_.rank_count()) {
        throw Error(
            Code::invalid_argument,
            fmt::format(
                "a mesh created as rank {} of {} cannot be flattened over a communicator in which this is rank {} "
                "of {}; pass the communicator that the mesh was created from",
                rank_, all_.rank_count(), comm.rank(), comm.world_size()));
    }
    std::vector<std::string> names;
    std::vector<int> dims;
    for (int d = 0; d < shape_.ndim(); ++d) {
        names.push_back(shape_.name(d));
        const std::vector<int>& own = dims_[static_cast<size_t>(d)];
        dims.insert(dims.end(), own.begin(), own.end());
    }
    const std::string joined = name.empty() ? fmt::format("{}", fmt::join(names, "_")) : name;
    DeviceMesh flat(*this, MeshShape({joined}, {shape_.rank_count()}));
    check_same_on_all_ranks(comm, Compared::meshes,
                            {fmt::format("({}) as \"{}\" of ({})", shape_.str(), joined, all_.str())},
                            "the flattened dimensions differ between ranks");
    flat.comms_.push_back(join(comm, dims, joined));
    flat.dims_.push_back(std::move(dims));
    return flat;
}

}  // namespace tsr
