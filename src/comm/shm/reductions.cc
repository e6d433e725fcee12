// The reductions of ShmTransport; see collectives.cc.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "comm/reduce.hpp"
#include "comm/shm/blocks.hpp"
#include "comm/shm/byte_list.hpp"
#include "comm/shm/shm_transport.hpp"

namespace tsr::shm {

namespace {

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

}  // namespace
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
        std::byte* out = list.is_contiguous() ? list.contiguous() : block_.data();
        tsr::reduce(out, sources_, call.operation.count, dtype, call.operation.op);
        if (!list.is_contiguous()) list.write(0, out, list.size());
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
            if (!list.is_contiguous()) list.write(done + at, out, n);
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
            if (!input.is_contiguous()) input.read(begin + own.begin, next_staging() + own.begin, own.size);
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
            if (r != rank_ && n > 0) std::memcpy(next_staging() + r * share, input.data + r * size + done, n);
        }
        sync(call);
        for (size_t r = 0; r < world(); ++r) sources_[r] = staging(r) + rank_ * share;
        sources_[rank_] = input.data + rank_ * size + done;
        tsr::reduce(output.data + done, sources_, n / element, input.dtype, call.operation.op);
        done += n;
    } while (done < size);
}

}  // namespace tsr::shm
