// The algorithms of the Gloo transport. Each moves about as little as can be where data is large, and goes with the
// notices, one message from each to each, where it is small.
#include <algorithm>
#include <cstring>

#include "comm/gloo/gloo_transport.hpp"
#include "comm/reduce.hpp"

namespace tsr::gloo_transport {

namespace {

constexpr size_t chunk_size = size_t{4} << 20;             // of a reduction; two are in flight
constexpr size_t block_size = size_t{1} << 20;             // of a broadcast along a chain
constexpr size_t packed_size = size_t{4} << 20;            // a list of tensors up to this is moved as one
constexpr size_t tree_broadcast_size = size_t{256} << 10;  // up to this by a tree, then by a chain

// The phases of one collective have streams of their own; those of a list's tensors follow each other in them.
enum Phase : uint64_t { scatter_phase, gather_phase, move_phase };

size_t size_of_list(std::span<const Tensor> list) {
    size_t size = 0;
    for (const Tensor& tensor : list) size += tensor.size_bytes();
    return size;
}

void pack(std::span<const Tensor> list, std::byte* to) {
    for (const Tensor& tensor : list) {
        if (tensor.size_bytes() > 0) std::memcpy(to, tensor.data, tensor.size_bytes());
        to += tensor.size_bytes();
    }
}

void unpack(const std::byte* from, std::span<const Tensor> list) {
    for (const Tensor& tensor : list) {
        if (tensor.size_bytes() > 0) std::memcpy(tensor.data, from, tensor.size_bytes());
        from += tensor.size_bytes();
    }
}

void copy_bytes(std::byte* to, const std::byte* from, size_t size) {
    if (size > 0 && to != from) std::memcpy(to, from, size);
}

// The r-th of n nearly equal parts of `count`.
struct Part {
    size_t begin;
    size_t count;
};
Part part_of(size_t count, int r, int n) {
    const size_t begin = count * static_cast<size_t>(r) / static_cast<size_t>(n);
    const size_t end = count * (static_cast<size_t>(r) + 1) / static_cast<size_t>(n);
    return {begin, end - begin};
}

}  // namespace

void GlooTransport::run(const Request& request, const Operation& operation, uint64_t sequence, milliseconds timeout) {
    Call call = call_of(request, operation, sequence, timeout);
    switch (request.collective) {
        case Collective::barrier:
        case Collective::finalize: return enter(call, {});
        case Collective::all_reduce: return all_reduce(call);
        case Collective::broadcast: return broadcast(call);
        case Collective::reduce: {
            enter(call, {});
            const Tensor& in = request.inputs[0];
            std::byte* out = rank_ == request.peer ? request.outputs[0].data : nullptr;
            return reduce_slices(call, in.data, out, static_cast<size_t>(in.numel()), in.dtype, request.peer);
        }
        case Collective::reduce_scatter: return reduce_scatter(call);
        case Collective::all_gather: {
            std::vector<Tensor> parts(static_cast<size_t>(world()), request.inputs[0]);
            for (size_t r = 0; r < parts.size(); ++r) {
                parts[r].data = request.outputs[0].data + r * request.inputs[0].size_bytes();
            }
            return gather_all(call, request.inputs[0], parts);
        }
        case Collective::all_gather_v: return gather_all(call, request.inputs[0], request.outputs);
        case Collective::gather: return gather(call);
        case Collective::scatter: return scatter(call);
        case Collective::all_to_all: return all_to_all(call);
        case Collective::send:
        case Collective::recv:
        case Collective::allocate: break;
    }
    throw Error(Code::internal, "not a collective");
}

std::vector<const std::byte*> GlooTransport::payloads(const std::byte* own) const {
    std::vector<const std::byte*> result;
    for (int r = 0; r < world(); ++r) {
        result.push_back(r == rank_ ? own : entered_[static_cast<size_t>(r)].bytes.data());
    }
    return result;
}

// --- reductions

void GlooTransport::all_reduce(Call& call) {
    const auto list = call.request.outputs;
    const size_t size = size_of_list(list);
    if (size == 0) return enter(call, {});
    const DType dtype = list[0].dtype;
    alignas(64) std::array<std::byte, Notice::inline_size> own;
    if (size <= own.size()) {
        pack(list, own.data());
        enter(call, std::span(own).first(size));
        alignas(64) std::array<std::byte, Notice::inline_size> result;
        reduce(result.data(), payloads(own.data()), size / size_of(dtype), dtype, call.request.op);
        return unpack(result.data(), list);
    }
    enter(call, {});
    if (list.size() > 1 && size <= packed_size) {
        std::vector<std::byte> packed(size);
        pack(list, packed.data());
        reduce_slices(call, packed.data(), packed.data(), size / size_of(dtype), dtype, -1);
        return unpack(packed.data(), list);
    }
    for (const Tensor& tensor : list) {
        reduce_slices(call, tensor.data, tensor.data, static_cast<size_t>(tensor.numel()), dtype, -1);
    }
}

// Chunk by chunk: each rank receives all inputs of its slice, reduces them in rank order, and sends the result to the
// root, or to all if root is -1. While one chunk's results go out, the next one's inputs come in. `in` may be `out`;
// `out` is nullptr where no result is wanted.
void GlooTransport::reduce_slices(Call& call, const std::byte* in, std::byte* out, size_t count, DType dtype,
                                  int root) {
    if (count == 0) return;
    const int n = world();
    const size_t element = size_of(dtype);
    const size_t chunk = std::max<size_t>(chunk_size / element, static_cast<size_t>(n));
    const size_t chunks = (count + chunk - 1) / chunk;
    const size_t slice =
        ((std::min(chunk, count) + static_cast<size_t>(n) - 1) / static_cast<size_t>(n) * element + 63) / 64 * 64;
    staging_.resize(2 * static_cast<size_t>(n) * slice);
    const auto staged = [&](size_t c, int r) {
        return staging_.data() + (c % 2 * static_cast<size_t>(n) + static_cast<size_t>(r)) * slice;
    };
    const auto length = [&](size_t c) { return std::min(chunk, count - c * chunk); };
    const auto offset = [&](size_t c, int r) { return (c * chunk + part_of(length(c), r, n).begin) * element; };
    const auto size = [&](size_t c, int r) { return part_of(length(c), r, n).count * element; };

    std::deque<Exchange> scatters;
    std::deque<Exchange> gathers;
    const auto begin_scatter = [&](size_t c) {
        Exchange& exchange = scatters.emplace_back(*this, call);
        for (int k = 1; k < n; ++k) {
            exchange.receive(before(k), slot::collective(call.sequence, scatter_phase), staged(c, before(k)),
                             size(c, rank_));
        }
        for (int k = 1; k < n; ++k) {
            exchange.send(after(k), slot::collective(call.sequence, scatter_phase), in + offset(c, after(k)),
                          size(c, after(k)));
        }
    };
    const auto reduce_and_gather = [&](size_t c) {
        scatters.front().finish();
        scatters.pop_front();
        std::byte* result = out != nullptr ? out + offset(c, rank_) : staged(c, rank_);
        std::vector<const std::byte*> inputs;
        for (int r = 0; r < n; ++r) inputs.push_back(r == rank_ ? in + offset(c, rank_) : staged(c, r));
        reduce(result, inputs, size(c, rank_) / element, dtype, call.request.op);
        Exchange& exchange = gathers.emplace_back(*this, call);
        for (int k = 1; k < n; ++k) {
            const int from = before(k);
            if (root < 0 || root == rank_) {
                exchange.receive(from, slot::collective(call.sequence, gather_phase), out + offset(c, from),
                                 size(c, from));
            }
        }
        for (int k = 1; k < n; ++k) {
            const int to = after(k);
            if (root < 0 || root == to) {
                exchange.send(to, slot::collective(call.sequence, gather_phase), result, size(c, rank_));
            }
        }
    };
    begin_scatter(0);
    for (size_t c = 0; c < chunks; ++c) {
        // The other half of the staging is free: chunk c - 1 is reduced, and its results, if staged, have gone.
        if (c > 0) {
            gathers.front().finish();
            gathers.pop_front();
        }
        if (c + 1 < chunks) begin_scatter(c + 1);
        reduce_and_gather(c);
    }
    gathers.front().finish();
}

void GlooTransport::reduce_scatter(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const Tensor& output = call.request.outputs[0];
    enter(call, {});
    const int n = world();
    const size_t element = size_of(output.dtype);
    const auto count = static_cast<size_t>(output.numel());
    const size_t chunk = std::max<size_t>(chunk_size / element / static_cast<size_t>(n), 1);
    const size_t slice = (std::min(chunk, count) * element + 63) / 64 * 64;
    staging_.resize(static_cast<size_t>(n) * slice);
    for (size_t begin = 0; begin < count; begin += chunk) {
        const size_t size = std::min(chunk, count - begin) * element;
        const auto own_part = [&](int r) {
            return input.data + static_cast<size_t>(r) * output.size_bytes() + begin * element;
        };
        const auto staged = [&](int r) { return staging_.data() + static_cast<size_t>(r) * slice; };
        Exchange exchange(*this, call);
        for (int k = 1; k < n; ++k) {
            exchange.receive(before(k), slot::collective(call.sequence, scatter_phase), staged(before(k)), size);
        }
        for (int k = 1; k < n; ++k) {
            exchange.send(after(k), slot::collective(call.sequence, scatter_phase), own_part(after(k)), size);
        }
        exchange.finish();
        std::vector<const std::byte*> inputs;
        for (int r = 0; r < n; ++r) inputs.push_back(r == rank_ ? own_part(r) : staged(r));
        reduce(output.data + begin * element, inputs, size / element, output.dtype, call.request.op);
    }
}

// --- copies

void GlooTransport::broadcast(Call& call) {
    const auto list = call.request.outputs;
    const int root = call.request.peer;
    const size_t size = size_of_list(list);
    alignas(64) std::array<std::byte, Notice::inline_size> own;
    if (size <= own.size()) {
        if (rank_ == root) pack(list, own.data());
        enter(call, rank_ == root ? std::span<const std::byte>(own).first(size) : std::span<const std::byte>());
        if (rank_ != root) unpack(entered_[static_cast<size_t>(root)].bytes.data(), list);
        return;
    }
    enter(call, {});
    if (list.size() > 1 && size <= packed_size) {
        std::vector<std::byte> packed(size);
        if (rank_ == root) pack(list, packed.data());
        broadcast_bytes(call, packed.data(), size);
        if (rank_ != root) unpack(packed.data(), list);
        return;
    }
    for (const Tensor& tensor : list) broadcast_bytes(call, tensor.data, tensor.size_bytes());
}

void GlooTransport::broadcast_bytes(Call& call, std::byte* data, size_t size) {
    const int n = world();
    const int distance = (rank_ - call.request.peer + n) % n;  // from the root
    const auto at = [&](int d) { return (call.request.peer + d) % n; };
    const uint64_t slot = slot::collective(call.sequence, move_phase);
    if (size <= tree_broadcast_size) {
        int mask = 1;
        while (mask < n && (distance & mask) == 0) mask <<= 1;
        if (distance > 0) {
            Exchange exchange(*this, call);
            exchange.receive(at(distance - mask), slot, data, size);
            exchange.finish();
        }
        Exchange exchange(*this, call);
        for (mask >>= 1; mask > 0; mask >>= 1) {
            if (distance + mask < n) exchange.send(at(distance + mask), slot, data, size);
        }
        return exchange.finish();
    }
    // A chain: each rank sends a block on as soon as it is there.
    Exchange receives(*this, call);
    Exchange sends(*this, call);
    if (distance > 0) {
        for (size_t begin = 0; begin < size; begin += block_size) {
            receives.receive(at(distance - 1), slot, data + begin, std::min(block_size, size - begin));
        }
    }
    for (size_t begin = 0; begin < size; begin += block_size) {
        if (distance > 0) receives.finish_next_receive();
        if (distance + 1 < n) sends.send(at(distance + 1), slot, data + begin, std::min(block_size, size - begin));
    }
    sends.finish();
}

void GlooTransport::gather_all(Call& call, const Tensor& input, std::span<const Tensor> outputs) {
    const uint64_t slot = slot::collective(call.sequence, move_phase);
    const size_t largest = std::ranges::max_element(outputs, {}, &Tensor::size_bytes)->size_bytes();
    if (largest <= Notice::inline_size) {
        enter(call, {input.data, input.size_bytes()});
        for (int r = 0; r < world(); ++r) {
            const Tensor& to = outputs[static_cast<size_t>(r)];
            copy_bytes(to.data, r == rank_ ? input.data : entered_[static_cast<size_t>(r)].bytes.data(),
                       to.size_bytes());
        }
        return;
    }
    enter(call, {});
    Exchange exchange(*this, call);
    for (int k = 1; k < world(); ++k) {
        const Tensor& to = outputs[static_cast<size_t>(before(k))];
        exchange.receive(before(k), slot, to.data, to.size_bytes());
    }
    for (int k = 1; k < world(); ++k) exchange.send(after(k), slot, input.data, input.size_bytes());
    copy_bytes(outputs[static_cast<size_t>(rank_)].data, input.data, input.size_bytes());
    exchange.finish();
}

void GlooTransport::gather(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const uint64_t slot = slot::collective(call.sequence, move_phase);
    enter(call, {});
    Exchange exchange(*this, call);
    if (rank_ != call.request.peer) {
        exchange.send(call.request.peer, slot, input.data, input.size_bytes());
        return exchange.finish();
    }
    const auto part = [&](int r) { return call.request.outputs[0].data + static_cast<size_t>(r) * input.size_bytes(); };
    for (int k = 1; k < world(); ++k) exchange.receive(before(k), slot, part(before(k)), input.size_bytes());
    copy_bytes(part(rank_), input.data, input.size_bytes());
    exchange.finish();
}

void GlooTransport::scatter(Call& call) {
    const Tensor& output = call.request.outputs[0];
    const uint64_t slot = slot::collective(call.sequence, move_phase);
    enter(call, {});
    Exchange exchange(*this, call);
    if (rank_ != call.request.peer) {
        exchange.receive(call.request.peer, slot, output.data, output.size_bytes());
        return exchange.finish();
    }
    const auto part = [&](int r) { return call.request.inputs[0].data + static_cast<size_t>(r) * output.size_bytes(); };
    for (int k = 1; k < world(); ++k) exchange.send(after(k), slot, part(after(k)), output.size_bytes());
    copy_bytes(output.data, part(rank_), output.size_bytes());
    exchange.finish();
}

void GlooTransport::all_to_all(Call& call) {
    const Tensor& input = call.request.inputs[0];
    const Tensor& output = call.request.outputs[0];
    const uint64_t slot = slot::collective(call.sequence, move_phase);
    enter(call, {});
    const size_t size = input.size_bytes() / static_cast<size_t>(world());
    const auto part = [&](const Tensor& tensor, int r) { return tensor.data + static_cast<size_t>(r) * size; };
    Exchange exchange(*this, call);
    for (int k = 1; k < world(); ++k) exchange.receive(before(k), slot, part(output, before(k)), size);
    for (int k = 1; k < world(); ++k) exchange.send(after(k), slot, part(input, after(k)), size);
    copy_bytes(part(output, rank_), part(input, rank_), size);
    exchange.finish();
}

}  // namespace tsr::gloo_transport
