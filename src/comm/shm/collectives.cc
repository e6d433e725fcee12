// The collectives of ShmTransport as sequences of synchronisation points. Three ways, chosen alike on all ranks:
//   small    the data goes through the staging areas (or, if tiny, beside the stamps): one point, no more
//   direct   all ranks' tensors lie in one buffer of the communicator: ranks read and write each other's memory
//   staged   anything else: segments pass through the staging areas, one point per segment
// Here are those that move data only; reductions.cc has the others.
#include <algorithm>
#include <cstring>

#include "comm/shm/blocks.hpp"
#include "comm/shm/byte_list.hpp"
#include "comm/shm/shm_transport.hpp"

namespace tsr::shm {

namespace {

void copy_bytes(std::byte* to, const std::byte* from, size_t n) {
    if (n > 0 && to != from) std::memcpy(to, from, n);
}

}  // namespace

void ShmTransport::run(const Request& request, const Operation& operation, uint64_t sequence, milliseconds timeout) {
    Call call{request, operation, sequence, timeout};
    begin(call);
    switch (request.collective) {
        case Collective::barrier:
        case Collective::finalize: sync(call); break;
        case Collective::all_reduce: all_reduce(call); break;
        case Collective::reduce_scatter: reduce_scatter(call); break;
        case Collective::all_gather: all_gather(call); break;
        case Collective::all_gather_v: all_gather_v(call); break;
        case Collective::broadcast: broadcast(call); break;
        case Collective::reduce: reduce(call); break;
        case Collective::gather: gather(call); break;
        case Collective::scatter: scatter(call); break;
        case Collective::all_to_all: all_to_all(call); break;
        default: throw Error(Code::internal, "not a collective");
    }
    finish(call);
}

void ShmTransport::copy_far(std::byte* to, const std::byte* from, size_t n) {
    for (size_t done = 0; done < n; done += pulse_bytes) {
        if (done > 0) pulse();
        copy_bytes(to + done, from + done, std::min(pulse_bytes, n - done));
    }
}

Region ShmTransport::common_region(Location Arrival::* which, size_t size) {
    const Location own = arrival(rank_).*which;
    if (own.buffer == 0) return {};
    for (size_t r = 0; r < world(); ++r) {
        const Location theirs = arrival(r).*which;
        if (theirs.buffer != own.buffer) return {};
        places_[r] = theirs.offset;
    }
    Region region = buffers_->find(own.buffer);
    for (size_t r = 0; region.id != 0 && r < world(); ++r) {
        if (places_[r] > region.stride || size > region.stride - places_[r]) {
            throw Error(Code::corrupt, "a peer tells of a tensor beyond the end of its buffer");
        }
    }
    return region;
}

void ShmTransport::all_gather(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const Tensor& output = call.request.outputs[0];
    const size_t size = input.size_bytes();
    if (size > one_shot_limit) {
        call.input = buffers_->locate(input.data, size);
        call.output = buffers_->locate(output.data, output.size_bytes());
        sync(call);
        if (const Region region = common_region(&Arrival::output, output.size_bytes()); region.id != 0) {
            // A block at a time to everybody, so that it is read from memory once.
            constexpr size_t block = 4 * block_size;
            for (size_t done = 0; done < size; done += block) {
                const size_t n = std::min(block, size - done);
                for (size_t i = 0; i < world(); ++i) {
                    const size_t r = (rank_ + i) % world();
                    copy_bytes(region.of_rank(r) + places_[r] + rank_ * size + done, input.data + done, n);
                }
                if (done % pulse_bytes == 0) pulse();
            }
            return sync(call);
        }
        if (const Region region = common_region(&Arrival::input, size); region.id != 0) {
            for (size_t i = 0; i < world(); ++i) {
                const size_t r = (rank_ + i) % world();
                copy_far(output.data + r * size, region.of_rank(r) + places_[r], size);
            }
            return sync(call);
        }
    }
    copy_bytes(output.data + rank_ * size, input.data, size);
    size_t done = 0;
    do {
        const size_t n = std::min(segment_size, size - done);
        copy_bytes(next_staging(), input.data + done, n);
        sync(call);
        for (size_t i = 1; i < world(); ++i) {
            const size_t r = (rank_ + i) % world();
            copy_bytes(output.data + r * size + done, staging(r), n);
        }
        done += n;
    } while (done < size);
}

void ShmTransport::all_gather_v(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const auto outputs = call.request.outputs;
    size_t longest = 0;
    for (const Tensor& output : outputs) longest = std::max(longest, output.size_bytes());
    copy_bytes(outputs[rank_].data, input.data, input.size_bytes());
    size_t done = 0;
    do {
        const size_t size = input.size_bytes();
        if (done < size) copy_bytes(next_staging(), input.data + done, std::min(segment_size, size - done));
        sync(call);
        for (size_t i = 1; i < world(); ++i) {
            const size_t r = (rank_ + i) % world();
            const size_t theirs = outputs[r].size_bytes();
            if (done < theirs) copy_bytes(outputs[r].data + done, staging(r), std::min(segment_size, theirs - done));
        }
        done += segment_size;
    } while (done < longest);
}

void ShmTransport::broadcast(Call& call) {
    const ByteList list(call.request.outputs);
    const auto root = static_cast<size_t>(call.operation.peer);
    if (list.size() > one_shot_limit) {
        if (list.contiguous() != nullptr) call.output = buffers_->locate(list.contiguous(), list.size());
        sync(call);
        if (const Region region = common_region(&Arrival::output, list.size()); region.id != 0) {
            if (rank_ != root) copy_far(list.contiguous(), region.of_rank(root) + places_[root], list.size());
            return sync(call);
        }
    }
    size_t done = 0;
    do {
        const size_t n = std::min(segment_size, list.size() - done);
        if (rank_ == root) list.read(done, next_staging(), n);
        sync(call);
        if (rank_ != root) list.write(done, staging(root), n);
        done += n;
    } while (done < list.size());
}

void ShmTransport::gather(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const size_t size = input.size_bytes();
    const bool is_root = rank_ == static_cast<size_t>(call.operation.peer);
    std::byte* output = is_root ? call.request.outputs[0].data : nullptr;
    if (size > one_shot_limit) {
        call.input = buffers_->locate(input.data, size);
        sync(call);
        if (const Region region = common_region(&Arrival::input, size); region.id != 0) {
            for (size_t r = 0; is_root && r < world(); ++r)
                copy_far(output + r * size, region.of_rank(r) + places_[r], size);
            return sync(call);
        }
    }
    if (is_root) copy_bytes(output + rank_ * size, input.data, size);
    size_t done = 0;
    do {
        const size_t n = std::min(segment_size, size - done);
        if (!is_root) copy_bytes(next_staging(), input.data + done, n);
        sync(call);
        for (size_t r = 0; is_root && r < world(); ++r) {
            if (r != rank_) copy_bytes(output + r * size + done, staging(r), n);
        }
        done += n;
    } while (done < size);
}

void ShmTransport::scatter(Call& call) {
    const Tensor& output = call.request.outputs[0];
    const size_t size = output.size_bytes();
    const auto root = static_cast<size_t>(call.operation.peer);
    const std::byte* input = rank_ == root ? call.request.inputs[0].data : nullptr;
    const size_t share = share_of_segment(world());
    size_t done = 0;
    do {
        const size_t n = std::min(share, size - done);
        for (size_t r = 0; rank_ == root && r < world(); ++r) {
            copy_bytes(r == rank_ ? output.data + done : next_staging() + r * share, input + r * size + done, n);
        }
        sync(call);
        if (rank_ != root) copy_bytes(output.data + done, staging(root) + rank_ * share, n);
        done += n;
    } while (done < size);
}

void ShmTransport::all_to_all(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const Tensor& output = call.request.outputs[0];
    const size_t size = input.size_bytes() / world();
    if (input.size_bytes() > one_shot_limit) {
        call.input = buffers_->locate(input.data, input.size_bytes());
        sync(call);
        if (const Region region = common_region(&Arrival::input, input.size_bytes()); region.id != 0) {
            for (size_t i = 0; i < world(); ++i) {
                const size_t r = (rank_ + i) % world();
                copy_far(output.data + r * size, region.of_rank(r) + places_[r] + rank_ * size, size);
            }
            return sync(call);
        }
    }
    const size_t share = share_of_segment(world());
    copy_bytes(output.data + rank_ * size, input.data + rank_ * size, size);
    size_t done = 0;
    do {
        const size_t n = std::min(share, size - done);
        for (size_t r = 0; r < world(); ++r) {
            if (r != rank_) copy_bytes(next_staging() + r * share, input.data + r * size + done, n);
        }
        sync(call);
        for (size_t i = 1; i < world(); ++i) {
            const size_t r = (rank_ + i) % world();
            copy_bytes(output.data + r * size + done, staging(r) + rank_ * share, n);
        }
        done += n;
    } while (done < size);
}

}  // namespace tsr::shm
