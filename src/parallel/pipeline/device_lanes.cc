#include "parallel/pipeline/device_lanes.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "comm/inner_options.hpp"

namespace tsr::pipeline {

std::map<Direction, size_t> lanes_of(const std::vector<Direction>& directions) {
    std::map<Direction, size_t> lanes;
    for (const Direction& one : directions) {
        if (one.from == one.to || lanes.contains(one)) continue;
        const auto is_taken = [&](size_t lane) {
            return std::ranges::any_of(lanes, [&](const auto& known) {
                const auto& [other, its_lane] = known;
                return its_lane == lane &&
                       (other.from == one.from || other.from == one.to || other.to == one.from || other.to == one.to);
            });
        };
        size_t lane = 0;
        while (is_taken(lane)) ++lane;
        lanes[one] = lane;
    }
    return lanes;
}

DeviceLanes::DeviceLanes(Communicator& comm, const std::vector<Direction>& directions, const std::string& backend,
                         Device device)
    : device_(device), api_(device_api(device)), rank_(comm.rank()) {
    const auto lanes = lanes_of(directions);
    size_t count = 0;
    for (const auto& [direction, lane] : lanes) count = std::max(count, lane + 1);
    for (size_t lane = 0; lane < count; ++lane) {
        CommOptions options = inner_options(comm, fmt::format("/lane {}", lane));
        options.backend = backend;
        options.device = device.index;
        options.bound = true;
        comms_.push_back(comm.split(0, rank_, options));
    }
    for (const auto& [direction, lane] : lanes) {
        if (direction.from != rank_ && direction.to != rank_) continue;
        lanes_[direction] = {comms_[lane], api_.new_stream()};
    }
}

WorkPtr DeviceLanes::move(Direction direction, const Tensor& tensor, milliseconds timeout, std::string_view label) {
    const Lane& lane = lanes_.at(direction);
    const bool sends = direction.from == rank_;
    lane.comm->set_timeout(timeout);
    return lane.comm->run_tracked({.collective = sends ? Collective::send : Collective::recv,
                                   .inputs = {&tensor, sends ? size_t{1} : 0},
                                   .outputs = {&tensor, sends ? size_t{0} : 1},
                                   .peer = sends ? direction.to : direction.from,
                                   .label = label,
                                   .stream = lane.stream.get()});
}

void DeviceLanes::abort(const std::string& reason) {
    for (const auto& comm : comms_) comm->abort(reason);
}

}  // namespace tsr::pipeline
