#include "parallel/fsdp/device_lane.hpp"

#include <utility>

namespace tsr {

void DeviceLane::open(std::shared_ptr<Communicator> comm, DeviceApi& api) {
    comm_ = std::move(comm);
    api_ = &api;
    stream_ = api.new_stream();
}

void DeviceLane::follow(StreamHandle other) { api_->wait(stream(), *api_->record(other)); }

WorkPtr DeviceLane::run(Request request) {
    request.stream = stream();
    last_ = comm_->run_tracked(request);
    return last_;
}

WorkPtr DeviceLane::point() {
    auto point = std::make_shared<Work>();
    point->launched(*api_, api_->record(stream()));
    last_->on_done([point](const std::optional<Error>& error) {
        if (error) point->finish(error);
    });
    return point;
}

void DeviceLane::drain(Deadline deadline) { api_->record(stream())->wait(deadline); }

}  // namespace tsr
