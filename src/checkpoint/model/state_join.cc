#include "checkpoint/model/state_join.hpp"

#include <fmt/core.h>

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/json.hpp"

namespace tsr {

namespace {

Json to_json(const Dims& dims) { return Json(Json::Array(dims.begin(), dims.end())); }

Dims dims_of(const Json& json) {
    std::vector<int64_t> sizes;
    for (const Json& size : json.as_array()) sizes.push_back(size.as_int());
    return Dims(std::span<const int64_t>(sizes));
}

// How the tensor lies on the ranks, as far as this one knows; empty if its layout is of other ranks than those joined.
std::string place_of(const TensorKind& kind, const Peers& peers) {
    if (!kind.layout) return "whole";
    const bool of_peers = kind.layout->world_size() == peers.world_size() && kind.rank == peers.rank();
    return of_peers ? kind.layout->str() : "";
}

// [[name, dtype, shape, place, [offsets, sizes] of each box ...], ...]
std::string description(const State& state, const Peers& peers) {
    Json::Array all;
    for (const auto& [name, tensor] : state.tensors()) {
        const TensorKind& kind = *tensor.kind;
        Json::Array one{name, static_cast<int64_t>(kind.dtype), to_json(kind.shape), place_of(kind, peers)};
        for (const Box& box : kind.boxes) {
            one.emplace_back(Json::Array{to_json(box.offsets), to_json(box.sizes)});
        }
        all.emplace_back(std::move(one));
    }
    return Json(std::move(all)).dump();
}

// A tensor as the ranks together have it.
struct Joint {
    DType dtype = DType::f32;
    Dims shape;
    int first = 0;  // the lowest rank that has it
    std::string place;
    int ranks = 0;           // how many have it, with this place
    std::vector<Box> boxes;  // in order of ranks
    std::vector<int> counts;
};

using Joints = std::map<std::string, Joint, std::less<>>;

void add(Joints& joints, int rank, int world_size, const Json& told) {
    const Json::Array& one = told.as_array();
    const std::string& name = one[0].as_string();
    const auto dtype = static_cast<DType>(one[1].as_int());
    const Dims shape = dims_of(one[2]);
    const std::string& place = one[3].as_string();
    const auto [at, is_new] = joints.try_emplace(name);
    Joint& joint = at->second;
    if (is_new) joint = {dtype, shape, rank, place, 0, {}, std::vector<int>(static_cast<size_t>(world_size), 0)};
    if (joint.dtype != dtype || joint.shape != shape) {
        throw Error(Code::mismatch,
                    fmt::format("tensor '{}' is {} {} on rank {}, but {} {} on rank {}", name, name_of(joint.dtype),
                                joint.shape.str(), joint.first, name_of(dtype), shape.str(), rank));
    }
    if (!place.empty() && place == joint.place) ++joint.ranks;
    for (size_t i = 4; i < one.size(); ++i) {
        const Json::Array& box = one[i].as_array();
        joint.boxes.push_back({dims_of(box[0]), dims_of(box[1])});
        ++joint.counts[static_cast<size_t>(rank)];
    }
}

Layout layout_of(const std::string& name, const Joint& joint) {
    try {
        return Layout::from_boxes(joint.shape, joint.boxes, joint.counts);
    } catch (const Error& error) {
        throw Error(error.code(),
                    fmt::format("tensor '{}': the ranks hold parts that do not fit together: {}", name, error.what()));
    }
}

}  // namespace

void join_states(State& state, Peers& peers) {
    std::string mine;
    peers.all_or_none("join", [&] { mine = description(state, peers); });
    const std::vector<std::string> texts = peers.gather(mine);

    std::vector<std::pair<std::string, Layout>> changed;
    Joints joints;
    peers.all_or_none("join", [&] {
        for (int rank = 0; rank < peers.world_size(); ++rank) {
            const Json told = Json::parse(texts[static_cast<size_t>(rank)], "the tensors of a rank");
            for (const Json& one : told.as_array()) add(joints, rank, peers.world_size(), one);
        }
        for (const auto& [name, joint] : joints) {
            if (joint.ranks == peers.world_size()) continue;
            // The tensors of a layer mostly lie alike.
            if (!changed.empty()) {
                const auto& [last, layout] = changed.back();
                const Joint& other = joints.find(last)->second;
                if (other.shape == joint.shape && other.counts == joint.counts && other.boxes == joint.boxes) {
                    changed.emplace_back(name, layout);
                    continue;
                }
            }
            changed.emplace_back(name, layout_of(name, joint));
        }
    });
    for (const auto& [name, layout] : changed) {
        state.distribute(name, joints.find(name)->second.dtype, layout, peers.rank());
    }
    state.require_same_updates();
}

}  // namespace tsr
