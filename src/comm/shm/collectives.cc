// The collectives of ShmTransport as sequences of synchronisation points. Three ways, chosen identically on all ranks:
//   small    the data goes through the staging areas (or, if tiny, beside the stamps): a single point
//   direct   all ranks' tensors are in one buffer of the communicator: ranks read and write each other's memory
//   staged   anything else: segments pass through the staging areas, one point per segment
// An output is written only after the first point, at which the fingerprints are compared, even the rank's own part.
// This file has the collectives that only move data; reductions.cc has the others.
#include <algorithm>
#include <cstring>

#include "comm/coalesce.hpp"
#include "comm/shm/blocks.hpp"
#include "comm/shm/shm_transport.hpp"

namespace tsr::shm {

void ShmTransport::run(const Request& request, const Operation& operation, uint64_t sequence, milliseconds timeout) {
    Call call{request, operation, sequence, timeout};
    begin(call);
    stores_.begin_collective();
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
    stores_.end_collective(request.collective);
    finish(call);
}

// Into what others read after the next point.
void ShmTransport::stage(std::byte* to, const std::byte* from, size_t n) {
    if (n < Stores::least) return copy_bytes(to, from, n);
    stores_.stage(n);
    if (stores_.stream()) {
        copy_streaming(to, from, n);
    } else {
        copy_bytes(to, from, n);
    }
}

void ShmTransport::stage(std::byte* to, const ByteList& from, size_t offset, size_t n) {
    from.visit(offset, n, [&](const std::byte* piece, size_t size) {
        stage(to, piece, size);
        to += size;
    });
}

void ShmTransport::sync_segment(Call& call, size_t done, size_t n, size_t full) {
    fence_streams();
    sync(call);
    stores_.lap(call.request.collective, done > 0 && n == full);
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
            throw Error(Code::corrupt, "a peer announced a tensor beyond the end of its buffer");
        }
    }
    return region;
}

Location ShmTransport::locate(const ByteList& list) const {
    if (list.contiguous() == nullptr) return {};
    return buffers_->locate(list.contiguous(), list.size());
}

void ShmTransport::all_gather(Call& call) {
    const auto inputs = call.request.inputs;
    const auto outputs = call.request.outputs;
    input_.assign(inputs);
    output_.assign(outputs);
    const size_t size = input_.size();
    if (size > one_shot_limit) {
        call.input = locate(input_);
        call.output = locate(output_);
        sync(call);
        if (const Region region = common_region(&Arrival::output, output_.size()); region.id != 0) {
            // A block at a time to everybody, so that it is read from memory once.
            constexpr size_t block = 4 * block_size;
            size_t begin = 0;  // of the tensor among the outputs
            for (size_t i = 0; i < inputs.size(); begin += outputs[i++].size_bytes()) {
                const size_t own = inputs[i].size_bytes();
                for (size_t done = 0; done < own; done += block) {
                    const size_t n = std::min(block, own - done);
                    for (size_t k = 0; k < world(); ++k) {
                        const size_t r = (rank_ + k) % world();
                        copy_bytes(region.of_rank(r) + places_[r] + begin + rank_ * own + done, inputs[i].data + done,
                                   n);
                    }
                    if (done % pulse_bytes == 0) pulse();
                }
            }
            return sync(call);
        }
        if (const Region region = common_region(&Arrival::input, size); region.id != 0) {
            for (size_t k = 0; k < world(); ++k) {
                const size_t r = (rank_ + k) % world();
                const std::byte* from = region.of_rank(r) + places_[r];
                for (size_t i = 0; i < inputs.size(); from += inputs[i++].size_bytes()) {
                    copy_far(outputs[i].data + r * inputs[i].size_bytes(), from, inputs[i].size_bytes());
                }
            }
            return sync(call);
        }
    }
    for (size_t r = 0; r < world(); ++r) parts_[r].assign_parts(outputs, r, world());
    size_t done = 0;
    do {
        const size_t n = std::min(segment_size, size - done);
        stage(next_staging(), input_, done, n);
        sync_segment(call, done, n, segment_size);
        for (size_t i = 0; done == 0 && i < inputs.size(); ++i) {
            const size_t own = inputs[i].size_bytes();
            copy_bytes(outputs[i].data + rank_ * own, inputs[i].data, own);
        }
        for (size_t k = 1; k < world(); ++k) {
            const size_t r = (rank_ + k) % world();
            parts_[r].write(done, staging(r), n);
        }
        done += n;
    } while (done < size);
}

void ShmTransport::all_gather_v(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const auto outputs = call.request.outputs;
    size_t longest = 0;
    for (const Tensor& output : outputs) longest = std::max(longest, output.size_bytes());
    size_t done = 0;
    do {
        const size_t size = input.size_bytes();
        const size_t n = done < size ? std::min(segment_size, size - done) : 0;
        stage(next_staging(), input.data + done, n);
        sync_segment(call, done, std::min(segment_size, longest - done), segment_size);
        copy_bytes(outputs[rank_].data + done, input.data + done, n);
        for (size_t i = 1; i < world(); ++i) {
            const size_t r = (rank_ + i) % world();
            const size_t theirs = outputs[r].size_bytes();
            if (done < theirs) copy_bytes(outputs[r].data + done, staging(r), std::min(segment_size, theirs - done));
        }
        done += segment_size;
    } while (done < longest);
}

void ShmTransport::broadcast(Call& call) {
    const ByteList& list = output_;
    output_.assign(call.request.outputs);
    const auto root = place_of(call.request.peer);
    if (list.size() > one_shot_limit) {
        call.output = locate(list);
        sync(call);
        if (const Region region = common_region(&Arrival::output, list.size()); region.id != 0) {
            if (rank_ != root) copy_far(list.contiguous(), region.of_rank(root) + places_[root], list.size());
            return sync(call);
        }
    }
    size_t done = 0;
    do {
        const size_t n = std::min(segment_size, list.size() - done);
        if (rank_ == root) stage(next_staging(), list, done, n);
        sync_segment(call, done, n, segment_size);
        if (rank_ != root) list.write(done, staging(root), n);
        done += n;
    } while (done < list.size());
}

void ShmTransport::gather(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const size_t size = input.size_bytes();
    const bool is_root = rank_ == place_of(call.request.peer);
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
    size_t done = 0;
    do {
        const size_t n = std::min(segment_size, size - done);
        if (!is_root) stage(next_staging(), input.data + done, n);
        sync_segment(call, done, n, segment_size);
        for (size_t r = 0; is_root && r < world(); ++r) {
            copy_bytes(output + r * size + done, r == rank_ ? input.data + done : staging(r), n);
        }
        done += n;
    } while (done < size);
}

void ShmTransport::scatter(Call& call) {
    const Tensor& output = call.request.outputs[0];
    const size_t size = output.size_bytes();
    const auto root = place_of(call.request.peer);
    const std::byte* input = rank_ == root ? call.request.inputs[0].data : nullptr;
    const size_t share = share_of_segment(world());
    size_t done = 0;
    do {
        const size_t n = std::min(share, size - done);
        for (size_t r = 0; rank_ == root && r < world(); ++r) {
            if (r != rank_) stage(next_staging() + r * share, input + r * size + done, n);
        }
        sync_segment(call, done, n, share);
        copy_bytes(output.data + done, rank_ == root ? input + rank_ * size + done : staging(root) + rank_ * share, n);
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
    size_t done = 0;
    do {
        const size_t n = std::min(share, size - done);
        for (size_t r = 0; r < world(); ++r) {
            if (r != rank_) stage(next_staging() + r * share, input.data + r * size + done, n);
        }
        sync_segment(call, done, n, share);
        copy_bytes(output.data + rank_ * size + done, input.data + rank_ * size + done, n);
        for (size_t i = 1; i < world(); ++i) {
            const size_t r = (rank_ + i) % world();
            copy_bytes(output.data + r * size + done, staging(r) + rank_ * share, n);
        }
        done += n;
    } while (done < size);
}

}  // namespace tsr::shm
