// The reductions of ShmTransport; see collectives.cc.
#include <algorithm>
#include <cstring>

#include "base/page_size.hpp"
#include "comm/reduce.hpp"
#include "comm/shm/blocks.hpp"
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

DType dtype_of(std::span<const Tensor> list) { return list.empty() ? DType::u8 : list[0].dtype; }

// Number of elements in `size` bytes. Unknown dtypes have no size, but are rejected earlier.
size_t elements_in(size_t size, DType dtype) {
    return size / size_of(dtype);  // NOLINT(clang-analyzer-core.DivideZero)
}

}  // namespace

void ShmTransport::all_reduce(Call& call) {
    const ByteList& list = output_;
    output_.assign(call.request.outputs);
    const DType dtype = dtype_of(call.request.outputs);
    if (list.size() <= one_shot_limit) {
        const bool tiny = list.size() <= Arrival::payload_size;
        if (tiny) {
            list.read(0, next_arrival().payload.data(), list.size());
        } else {
            stage(next_staging(), list, 0, list.size());
            fence_streams();
        }
        sync(call);
        const Arrivals here = arrivals();
        for (size_t r = 0; r < world(); ++r) sources_[r] = tiny ? here[r].payload.data() : staging(r);
        std::byte* out = list.is_contiguous() ? list.contiguous() : block_.data();
        tsr::reduce(out, sources_, elements_in(list.size(), dtype), dtype, call.request.op);
        if (!list.is_contiguous()) list.write(0, out, list.size());
        return;
    }
    // Also for a list with gaps if all ranks have the same layout, as lists of gradients do. There is no separate
    // input.
    const size_t extent = list.extent();
    call.output = buffers_->locate(list.first(), extent);
    call.input.offset = list.layout();
    sync(call);
    bool alike = true;
    for (size_t r = 0; r < world(); ++r) alike = alike && arrival(r).input.offset == call.input.offset;
    const Region region = alike ? common_region(&Arrival::output, extent) : Region{};
    if (region.id == 0) return world() == 2 ? exchange_reduce(call, list) : staged_reduce(call, list, &list);

    // Push: nobody else touches this rank's part of anybody's tensor, so reduce it in place and store it everywhere.
    const Part part = part_of(list.size(), world(), rank_);
    size_t since_pulse = 0;
    list.visit(part.begin, part.size, [&](const std::byte* piece, size_t size) {
        for (size_t done = 0; done < size;) {
            const size_t n = std::min(block_size, size - done);
            const size_t at = static_cast<size_t>(piece - list.first()) + done;
            for (size_t r = 0; r < world(); ++r) sources_[r] = region.of_rank(r) + places_[r] + at;
            tsr::reduce(block_.data(), sources_, elements_in(n, dtype), dtype, call.request.op);
            for (size_t k = 0; k < world(); ++k) {
                const size_t r = (rank_ + k) % world();  // not all into the same rank's memory at once
                std::memcpy(region.of_rank(r) + places_[r] + at, block_.data(), n);
            }
            done += n;
            since_pulse += n;
            if (since_pulse < pulse_bytes) continue;
            since_pulse = 0;
            pulse();
        }
    });
    sync(call);
}

// Two ranks: each sees the other's complete segment and reduces all of it itself, in place, so that no result goes back
// through the staging area. Reducing this segment and staging the next alternate page by page, so that the processor
// always has several streams of memory in flight.
void ShmTransport::exchange_reduce(Call& call, const ByteList& list) {
    const DType dtype = dtype_of(call.request.outputs);
    const auto stage_from = [&](size_t begin, size_t end, std::byte* to) {
        if (begin < end) stage(to, list, begin, end - begin);
    };
    stage_from(0, std::min(segment_size, list.size()), next_staging());
    for (size_t done = 0; done < list.size(); done += segment_size) {
        sync_segment(call, done, std::min(segment_size, list.size() - done), segment_size);
        const size_t next = done + segment_size;
        for (size_t at = 0; at < segment_size; at += page_size) {
            stage_from(next + at, std::min(next + at + page_size, list.size()), next_staging() + at);
            if (done + at >= list.size()) continue;
            const size_t n = std::min(page_size, list.size() - done - at);
            for (size_t r = 0; r < 2; ++r) sources_[r] = staging(r) + at;
            std::byte* out = block_.data();
            if (list.contiguous() != nullptr) sources_[rank_] = out = list.contiguous() + done + at;
            tsr::reduce(out, sources_, elements_in(n, dtype), dtype, call.request.op);
            if (!list.is_contiguous()) list.write(done + at, out, n);
        }
    }
}

// Reduces `input` through the staging areas; `output` is null on ranks that do not want the result. At point i the i-th
// segment's inputs are there and the results of the one before it.
void ShmTransport::staged_reduce(Call& call, const ByteList& input, const ByteList* output) {
    const DType dtype = dtype_of(call.request.inputs.empty() ? call.request.outputs : call.request.inputs);
    const size_t segments = (input.size() + segment_size - 1) / segment_size;
    const auto length_of = [&](size_t i) { return std::min(segment_size, input.size() - i * segment_size); };
    for (size_t i = 0; i <= segments; ++i) {
        if (i < segments) {
            // All but this rank's own part, which only this rank reads.
            const Part own = part_of(length_of(i), world(), rank_);
            const size_t begin = i * segment_size;
            stage(next_staging(), input, begin, own.begin);
            const size_t end = own.begin + own.size;
            stage(next_staging() + end, input, begin + end, length_of(i) - end);
            if (!input.is_contiguous()) stage(next_staging() + own.begin, input, begin + own.begin, own.size);
        }
        if (i > 0) {
            const Part own = part_of(length_of(i - 1), world(), rank_);
            for (size_t r = 0; r < world(); ++r) sources_[r] = staging(r) + own.begin;
            if (input.contiguous() != nullptr) {
                sources_[rank_] = input.contiguous() + (i - 1) * segment_size + own.begin;
            }
            if (stores_.stream()) {
                for (size_t at = 0; at < own.size; at += block_size) {
                    const size_t n = std::min(block_size, own.size - at);
                    tsr::reduce(block_.data(), sources_, elements_in(n, dtype), dtype, call.request.op);
                    stage(next_result() + own.begin + at, block_.data(), n);
                    for (const std::byte*& source : sources_) source += n;
                }
            } else {
                tsr::reduce(next_result() + own.begin, sources_, elements_in(own.size, dtype), dtype, call.request.op);
            }
        }
        sync_segment(call, i * segment_size, i < segments ? length_of(i) : 0, segment_size);
        if (i == 0 || output == nullptr) continue;
        for (size_t r = 0; r < world(); ++r) {
            const Part part = part_of(length_of(i - 1), world(), r);
            output->write((i - 1) * segment_size + part.begin, result(r) + part.begin, part.size);
        }
    }
}

void ShmTransport::reduce(Call& call) {
    const ByteList& input = input_;
    input_.assign(call.request.inputs);
    const bool is_root = rank_ == place_of(call.request.peer);
    const DType dtype = dtype_of(call.request.inputs);
    const ByteList* output = is_root ? &output_ : nullptr;
    if (is_root) output_.assign(call.request.outputs);
    if (input.size() <= one_shot_limit) {
        input.read(0, next_staging(), input.size());
        sync(call);
        if (!is_root || input.size() == 0) return;
        for (size_t r = 0; r < world(); ++r) sources_[r] = staging(r);
        return tsr::reduce(output->contiguous(), sources_, elements_in(input.size(), dtype), dtype, call.request.op);
    }
    call.input = locate(input);
    if (is_root) call.output = locate(*output);
    sync(call);
    const Region inputs = common_region(&Arrival::input, input.size());
    const auto root = place_of(call.request.peer);
    const Location to = arrival(root).output;
    const Region target = to.buffer != 0 ? buffers_->find(to.buffer) : Region{};
    // A rank that has released the root's buffer cannot reach it; then no rank uses it.
    next_arrival().payload[0] = std::byte{inputs.id != 0 && target.id != 0};
    if (inputs.id == 0 || to.buffer == 0) return staged_reduce(call, input, output);
    if (target.id != 0 && (to.offset > target.stride || input.size() > target.stride - to.offset)) {
        throw Error(Code::corrupt, "a peer announced a tensor beyond the end of its buffer");
    }
    sync(call);
    for (size_t r = 0; r < world(); ++r) {
        if (arrival(r).payload[0] == std::byte{0}) return staged_reduce(call, input, output);
    }
    // Each rank reduces its part of all inputs into the root's memory.
    const Part part = part_of(input.size(), world(), rank_);
    for (size_t done = 0; done < part.size;) {
        const size_t n = std::min(block_size, part.size - done);
        for (size_t r = 0; r < world(); ++r) sources_[r] = inputs.of_rank(r) + places_[r] + part.begin + done;
        tsr::reduce(target.of_rank(root) + to.offset + part.begin + done, sources_, elements_in(n, dtype), dtype,
                    call.request.op);
        done += n;
        if (done % pulse_bytes == 0) pulse();
    }
    sync(call);
}

void ShmTransport::reduce_scatter(Call& call) {
    const auto inputs = call.request.inputs;
    const auto outputs = call.request.outputs;
    input_.assign(inputs);
    output_.assign(outputs);
    const DType dtype = dtype_of(inputs);
    if (input_.size() > one_shot_limit) {
        call.input = locate(input_);
        sync(call);
        const Region region = common_region(&Arrival::input, input_.size());
        if (region.id != 0) {
            size_t begin = 0;  // of the tensor among the inputs
            for (size_t i = 0; i < inputs.size(); begin += inputs[i++].size_bytes()) {
                const size_t size = outputs[i].size_bytes();
                for (size_t done = 0; done < size;) {
                    const size_t n = std::min(block_size, size - done);
                    for (size_t r = 0; r < world(); ++r) {
                        sources_[r] = region.of_rank(r) + places_[r] + begin + rank_ * size + done;
                    }
                    tsr::reduce(outputs[i].data + done, sources_, elements_in(n, dtype), dtype, call.request.op);
                    done += n;
                    if (done % pulse_bytes == 0) pulse();
                }
            }
            return sync(call);  // before it nobody may change its input
        }
    }
    for (size_t r = 0; r < world(); ++r) parts_[r].assign_parts(inputs, r, world());
    const ByteList& own = parts_[rank_];
    const size_t share = share_of_segment(world());
    const bool whole = own.is_contiguous() && output_.is_contiguous();
    const size_t most = whole ? share : std::min(share, block_size);  // reduced at once
    size_t done = 0;
    do {
        const size_t n = std::min(share, output_.size() - done);
        for (size_t r = 0; r < world(); ++r) {
            if (r != rank_ || !own.is_contiguous()) stage(next_staging() + r * share, parts_[r], done, n);
        }
        sync_segment(call, done, n, share);
        for (size_t at = 0; at < n; at += most) {
            const size_t count = std::min(most, n - at);
            for (size_t r = 0; r < world(); ++r) sources_[r] = staging(r) + rank_ * share + at;
            if (own.is_contiguous()) sources_[rank_] = own.contiguous() + done + at;
            std::byte* out = output_.is_contiguous() ? output_.contiguous() + done + at : block_.data();
            tsr::reduce(out, sources_, elements_in(count, dtype), dtype, call.request.op);
            if (!output_.is_contiguous()) output_.write(done + at, out, count);
        }
        done += n;
    } while (done < output_.size());
}

}  // namespace tsr::shm
