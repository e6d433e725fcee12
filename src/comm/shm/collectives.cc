// The collectives of ShmTransport as sequences of synchronisation points. Three ways, chosen alike on all ranks:
//   small    the data goes through the staging areas (or, if tiny, beside the stamps): one point, no more
//   direct   all ranks' tensors lie in one buffer of the communicator: ranks read and write each other's memory
//   staged   anything else: segments pass through the staging areas, one point per segment
#include <algorithm>
#include <cstring>

#include "comm/reduce.hpp"
#include "comm/shm/shm_transport.hpp"

namespace tsr::shm {

// A list of tensors as one run of bytes. Neighbours in memory are joined.
class ByteList {
   public:
    explicit ByteList(std::span<const Tensor> tensors) {
        for (const Tensor& tensor : tensors) {
            const size_t size = tensor.size_bytes();
            if (size == 0) continue;
            if (total_ > 0 && last_end_ == tensor.data) {
                (more_.empty() ? first_ : more_.back()).size += size;
            } else if (total_ == 0) {
                first_ = {tensor.data, size, 0};
            } else {
                if (more_.empty()) more_.push_back(first_);
                more_.push_back({tensor.data, size, total_});
            }
            last_end_ = tensor.data + size;
            total_ += size;
        }
    }

    [[nodiscard]] size_t size() const { return total_; }
    // The memory if it is one piece, else null.
    [[nodiscard]] std::byte* contiguous() const { return more_.empty() ? first_.data : nullptr; }

    void read(size_t offset, std::byte* to, size_t n) const {
        visit(offset, n, [&](std::byte* piece, size_t size) {
            std::memcpy(to, piece, size);
            to += size;
        });
    }
    void write(size_t offset, const std::byte* from, size_t n) const {
        visit(offset, n, [&](std::byte* piece, size_t size) {
            std::memcpy(piece, from, size);
            from += size;
        });
    }

   private:
    struct Piece {
        std::byte* data = nullptr;
        size_t size = 0;
        size_t begin = 0;
    };

    template <class Visit>
    void visit(size_t offset, size_t n, Visit&& visitor) const {
        if (n == 0) return;
        if (more_.empty()) return visitor(first_.data + offset, n);
        auto piece = std::upper_bound(more_.begin(), more_.end(), offset,
                                      [](size_t at, const Piece& p) { return at < p.begin; });
        for (--piece; n > 0; ++piece) {
            const size_t skip = offset - piece->begin;
            const size_t size = std::min(n, piece->size - skip);
            visitor(piece->data + skip, size);
            offset += size;
            n -= size;
        }
    }

    Piece first_;
    std::vector<Piece> more_;  // all pieces, if there is more than one
    const std::byte* last_end_ = nullptr;
    size_t total_ = 0;
};

namespace {

// Up to here every rank reduces everything by itself: one point instead of two.
constexpr size_t one_shot_limit = size_t{16} << 10;
// Results are made a block at a time, so that a block of every rank stays in the second-level cache.
constexpr size_t block_size = size_t{16} << 10;

// Between two looks at interruptions and alarms, some milliseconds of copying; a multiple of the block.
constexpr size_t pulse_bytes = size_t{16} << 20;

struct Part {
    size_t begin = 0;
    size_t size = 0;
};

// The r-th of `parts` nearly equal parts of `size` bytes; parts begin on cache lines.
Part part_of(size_t size, size_t parts, size_t r) {
    const size_t even = (size + parts - 1) / parts;
    const size_t each = (even + cache_line - 1) / cache_line * cache_line;
    const size_t begin = std::min(size, r * each);
    return {begin, std::min(each, size - begin)};
}

// What each of `parts` gets of a segment: a multiple of the cache line, thus of any element.
size_t share_of_segment(size_t parts) { return std::max(cache_line, segment_size / parts / cache_line * cache_line); }

void copy_bytes(std::byte* to, const std::byte* from, size_t n) {
    if (n > 0 && to != from) std::memcpy(to, from, n);
}

}  // namespace

void ShmTransport::run(const Request& request, uint64_t sequence, milliseconds timeout) {
    Call call{request, operation_of(request), sequence, timeout};
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

void ShmTransport::all_reduce(Call& call) {
    const ByteList list(call.request.outputs);
    const auto dtype = static_cast<DType>(call.operation.dtype);
    if (list.size() <= Arrival::payload_size) {
        list.read(0, next_arrival().payload.data(), list.size());
        sync(call);
        if (list.size() == 0) return;
        for (size_t r = 0; r < world(); ++r) sources_[r] = arrival(r).payload.data();
        alignas(8) std::array<std::byte, Arrival::payload_size> out;
        tsr::reduce(out.data(), sources_, call.operation.count, dtype, call.operation.op);
        return list.write(0, out.data(), list.size());
    }
    if (list.size() <= one_shot_limit) {
        list.read(0, next_staging(), list.size());
        sync(call);
        for (size_t r = 0; r < world(); ++r) sources_[r] = staging(r);
        std::byte* out = list.contiguous() != nullptr ? list.contiguous() : block_.data();
        tsr::reduce(out, sources_, call.operation.count, dtype, call.operation.op);
        if (out == block_.data()) list.write(0, out, list.size());
        return;
    }
    if (list.contiguous() != nullptr) call.output = buffers_->locate(list.contiguous(), list.size());
    sync(call);
    const Region region = common_region(&Arrival::output, list.size());
    if (region.id == 0) return world() == 2 ? exchange_reduce(call, list) : staged_reduce(call, list, &list);

    // Push: nobody else touches this rank's part of anybody's tensor, so reduce it in place and store it everywhere.
    const Part part = part_of(list.size(), world(), rank_);
    const size_t element = size_of(dtype);
    for (size_t done = 0; done < part.size;) {
        const size_t n = std::min(block_size, part.size - done);
        for (size_t r = 0; r < world(); ++r) sources_[r] = region.of_rank(r) + places_[r] + part.begin + done;
        tsr::reduce(block_.data(), sources_, n / element, dtype, call.operation.op);
        for (size_t r = 0; r < world(); ++r) {
            std::memcpy(region.of_rank(r) + places_[r] + part.begin + done, block_.data(), n);
        }
        done += n;
        if (done % pulse_bytes == 0) pulse();
    }
    sync(call);
}

// Two ranks: both see the whole of the other's segment and reduce all of it themselves, in place. A result takes no way
// back through the staging area. Reducing this segment and staging the next alternate page by page, so that the processor
// always has several streams of memory in flight.
void ShmTransport::exchange_reduce(Call& call, const ByteList& list) {
    constexpr size_t page = 4096;
    const auto dtype = static_cast<DType>(call.operation.dtype);
    const auto stage = [&](size_t begin, size_t end, std::byte* to) {
        if (begin < end) list.read(begin, to, end - begin);
    };
    stage(0, std::min(segment_size, list.size()), next_staging());
    for (size_t done = 0; done < list.size(); done += segment_size) {
        sync(call);
        const size_t next = done + segment_size;
        for (size_t at = 0; at < segment_size; at += page) {
            stage(next + at, std::min(next + at + page, list.size()), next_staging() + at);
            if (done + at >= list.size()) continue;
            const size_t n = std::min(page, list.size() - done - at);
            for (size_t r = 0; r < 2; ++r) sources_[r] = staging(r) + at;
            std::byte* out = block_.data();
            if (list.contiguous() != nullptr) sources_[rank_] = out = list.contiguous() + done + at;
            tsr::reduce(out, sources_, n / size_of(dtype), dtype, call.operation.op);
            if (list.contiguous() == nullptr) list.write(done + at, out, n);
        }
    }
}

// Reduces `input` through the staging areas; `output` is null on ranks that do not want the result. At point i the i-th
// segment's inputs are there and the results of the one before it.
void ShmTransport::staged_reduce(Call& call, const ByteList& input, const ByteList* output) {
    const auto dtype = static_cast<DType>(call.operation.dtype);
    const size_t element = size_of(dtype);
    const size_t segments = (input.size() + segment_size - 1) / segment_size;
    const auto length_of = [&](size_t i) { return std::min(segment_size, input.size() - i * segment_size); };
    for (size_t i = 0; i <= segments; ++i) {
        if (i < segments) {
            // All but this rank's own part, which only this rank reads.
            const Part own = part_of(length_of(i), world(), rank_);
            const size_t begin = i * segment_size;
            input.read(begin, next_staging(), own.begin);
            const size_t end = own.begin + own.size;
            input.read(begin + end, next_staging() + end, length_of(i) - end);
            if (input.contiguous() == nullptr) input.read(begin + own.begin, next_staging() + own.begin, own.size);
        }
        if (i > 0) {
            const Part own = part_of(length_of(i - 1), world(), rank_);
            for (size_t r = 0; r < world(); ++r) sources_[r] = staging(r) + own.begin;
            if (input.contiguous() != nullptr) {
                sources_[rank_] = input.contiguous() + (i - 1) * segment_size + own.begin;
            }
            tsr::reduce(next_result() + own.begin, sources_, own.size / element, dtype, call.operation.op);
        }
        sync(call);
        if (i == 0 || output == nullptr) continue;
        for (size_t r = 0; r < world(); ++r) {
            const Part part = part_of(length_of(i - 1), world(), r);
            output->write((i - 1) * segment_size + part.begin, result(r) + part.begin, part.size);
        }
    }
}

void ShmTransport::reduce(Call& call) {
    const ByteList input(call.request.inputs);
    const bool is_root = rank_ == static_cast<size_t>(call.operation.peer);
    const auto dtype = static_cast<DType>(call.operation.dtype);
    std::optional<ByteList> output;
    if (is_root) output.emplace(call.request.outputs);
    if (input.size() <= one_shot_limit) {
        input.read(0, next_staging(), input.size());
        sync(call);
        if (!is_root || input.size() == 0) return;
        for (size_t r = 0; r < world(); ++r) sources_[r] = staging(r);
        return tsr::reduce(output->contiguous(), sources_, call.operation.count, dtype, call.operation.op);
    }
    sync(call);
    staged_reduce(call, input, is_root ? &*output : nullptr);
}

void ShmTransport::reduce_scatter(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const Tensor& output = call.request.outputs[0];
    const size_t size = output.size_bytes();
    const size_t element = size_of(input.dtype);
    const bool small = input.size_bytes() <= one_shot_limit;
    if (!small) {
        call.input = buffers_->locate(input.data, input.size_bytes());
        sync(call);
        const Region region = common_region(&Arrival::input, input.size_bytes());
        if (region.id != 0) {
            for (size_t done = 0; done < size;) {
                const size_t n = std::min(block_size, size - done);
                for (size_t r = 0; r < world(); ++r) sources_[r] = region.of_rank(r) + places_[r] + rank_ * size + done;
                tsr::reduce(output.data + done, sources_, n / element, input.dtype, call.operation.op);
                done += n;
                if (done % pulse_bytes == 0) pulse();
            }
            return sync(call);  // before it nobody may change its input
        }
    }
    const size_t share = share_of_segment(world());
    size_t done = 0;
    do {
        const size_t n = std::min(share, size - done);
        for (size_t r = 0; r < world(); ++r) {
            if (r != rank_) copy_bytes(next_staging() + r * share, input.data + r * size + done, n);
        }
        sync(call);
        for (size_t r = 0; r < world(); ++r) sources_[r] = staging(r) + rank_ * share;
        sources_[rank_] = input.data + rank_ * size + done;
        tsr::reduce(output.data + done, sources_, n / element, input.dtype, call.operation.op);
        done += n;
    } while (done < size);
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
