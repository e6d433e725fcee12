// The buffers of a model, which all ranks get from one rank.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/page_size.hpp"
#include "comm/fingerprint.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/placement.hpp"

namespace tsr {

void Ddp::register_buffers(const std::function<std::vector<NamedTensor>()>& make) {
    check_idle("buffers cannot be registered");
    if (!buffers_.empty()) {
        throw Error(Code::invalid_state, "buffers are already registered; register all of them in one call");
    }
    comm_->in_one_call([&] { take_buffers(make); });
}

void Ddp::take_buffers(const std::function<std::vector<NamedTensor>()>& make) {
    std::vector<NamedTensor> buffers;
    size_t size = 0;
    const std::vector<std::string> lines = or_refuse_on_all_ranks(*comm_, Compared::buffers, [&] {
        buffers = make();
        if (buffers.empty()) throw Error(Code::invalid_argument, "no buffers are given");
        for (NamedTensor& buffer : buffers) {
            buffer.name = without_wrappers(std::move(buffer.name));
            if (buffer.name.empty()) throw Error(Code::invalid_argument, "a buffer's name is empty");
            if (buffer.tensor.device.type == DeviceType::cpu) {
                size += buffer.tensor.size_bytes();
            } else if (reducer_->device() == nullptr) {
                throw Error(
                    Code::unsupported,
                    fmt::format("buffer \"{}\" is not on the CPU, but the model's parameters are", buffer.name));
            } else {
                check_on_device(buffer.tensor, fmt::format("buffer \"{}\"", buffer.name), comm_->device());
            }
        }
        return description(buffers, "buffer");
    });
    check_same_on_all_ranks(*comm_, Compared::buffers, lines, "the ranks' buffers differ");
    buffers_memory_ = comm_->allocate(std::max(size, page_size));
    buffers_ = std::move(buffers);
    try {
        move_buffers(0);
        if (reducer_->device() != nullptr) reducer_->device()->await(*comm_);
    } catch (...) {
        buffers_.clear();  // the caller may free them after the error
        throw;
    }
}

// All buffers of all dtypes in one broadcast of bytes; and one of those on the device, in place.
void Ddp::move_buffers(int from) {
    if (reducer_->device() != nullptr) broadcast_buffers_on_device(from);
    const bool is_source = comm_->rank() == from;
    const auto each = [&](auto&& copy_one) {
        std::byte* at = buffers_memory_->data();
        for (const NamedTensor& buffer : buffers_) {
            if (buffer.tensor.device.type != DeviceType::cpu) continue;
            const size_t size = buffer.tensor.size_bytes();
            if (size > 0) copy_one(at, buffer.tensor.data, size);
            at += size;
        }
        return static_cast<int64_t>(at - buffers_memory_->data());
    };
    const int64_t size = each([&](std::byte* packed, const std::byte* own, size_t n) {
        if (is_source) std::memcpy(packed, own, n);
    });
    if (size == 0) return;
    const Tensor tensor{buffers_memory_->data(), Dims{size}, DType::u8, {}};
    comm_->run({.collective = Collective::broadcast, .outputs = {&tensor, 1}, .peer = from, .label = "buffers"});
    each([&](const std::byte* packed, std::byte* own, size_t n) {
        if (!is_source) std::memcpy(own, packed, n);
    });
}

void Ddp::broadcast_buffers_on_device(int from) {
    std::vector<Tensor> bytes;
    for (const auto& [name, tensor] : buffers_) {
        if (tensor.device.type == DeviceType::cpu || tensor.size_bytes() == 0) continue;
        bytes.push_back({tensor.data, Dims{static_cast<int64_t>(tensor.size_bytes())}, DType::u8, tensor.device});
    }
    if (bytes.empty()) return;
    reducer_->device()->broadcast(
        *comm_, {.collective = Collective::broadcast, .outputs = bytes, .peer = from, .label = "buffers"});
}

void Ddp::broadcast_buffers() {
    check_idle("buffers cannot be broadcast");
    if (buffers_.empty()) throw Error(Code::invalid_state, "no buffers were registered");
    comm_->in_one_call([&] {
        int from = 0;
        if (options_.join != DdpJoin::off) {
            reducer_->announce(Reducer::Presence::broadcasts_buffers);
            from = reducer_->first_active();
        }
        move_buffers(from);
    });
}

}  // namespace tsr
