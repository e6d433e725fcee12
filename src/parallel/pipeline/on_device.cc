// What a pipeline does for tensors on a device.
#include <fmt/core.h>

#include "parallel/pipeline/pipeline.hpp"
#include "parallel/placement.hpp"

namespace tsr::pipeline {

void Pipeline::set_stream(StreamHandle stream) {
    const Reentry once = enter();
    if (!is_on_device()) {
        if (stream == nullptr) return;
        throw Error(
            Code::invalid_argument,
            fmt::format("rank {}: a stream was passed, but the pipeline's tensors are on the CPU, which has none",
                        rank_));
    }
    api_.check_stream(stream);
    if (point_) api_.wait(stream, *point_);
    stream_ = stream;
}

void Pipeline::mark_stream() { point_ = api_.record(stream_); }

// The trainer's own tensors may be on the CPU.
void Pipeline::check_place(const Tensor& tensor, const std::string& name) const {
    if (tensor.device.type == DeviceType::cpu) return;
    if (!is_on_device()) {
        throw Error(Code::unsupported,
                    fmt::format("{} is on CUDA device {}, but this pipeline has its tensors on the CPU", name,
                                tensor.device.index));
    }
    check_on_device(tensor, name, device_);
}

void Pipeline::check_places(std::span<const Tensor> tensors, std::string_view what) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i].device.type != DeviceType::cpu)
            check_place(tensors[i], fmt::format("tensor {} of the {}", i, what));
    }
}

// By way of the host: the ranks have no lanes between them, and a sum of several needs the order of the stages.
void Pipeline::sum_of_device(const Tensor& gradient, const std::vector<int>& ranks) {
    const size_t size = gradient.size_bytes();
    if (pinned_size_ < size) {
        pinned_ = api_.allocate_host(size);
        pinned_size_ = size;
    }
    const auto copy = [&](std::byte* to, const std::byte* from) {
        api_.copy(to, from, size, stream_);
        api_.record(stream_)->wait(Deadline::in(comm_->options().timeout));
    };
    copy(pinned_.get(), gradient.data);
    sum_on_host({pinned_.get(), gradient.shape, gradient.dtype, {}}, ranks);
    copy(gradient.data, pinned_.get());
}

}  // namespace tsr::pipeline
