// The algorithms of the Gloo transport. Large data is moved with about the minimum traffic; small data travels in the
// notices, one message from each rank to every other.
#include <algorithm>
#include <cstring>

#include "comm/coalesce.hpp"
#include "comm/gloo/gloo_transport.hpp"
#include "comm/reduce.hpp"

namespace tsr::gloo_transport {

namespace {

constexpr size_t chunk_size = size_t{4} << 20;             // of a reduction; two are in flight
constexpr size_t block_size = size_t{1} << 20;             // of a broadcast along a chain
constexpr size_t tree_broadcast_size = size_t{256} << 10;  // up to this by a tree, then by a chain

// Each phase of a collective has its own stream; the messages of a list's tensors follow each other in it.
enum Phase : uint64_t { scatter_phase, gather_phase, move_phase };

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
    Call call = call_of(request, operation, sequence, timeout, everybody_, rank_);
    switch (request.collective) {
        case Collective::barrier:
        case Collective::finalize: return enter(call, {});
        case Collective::all_reduce: return all_reduce(call);
        case Collective::broadcast: return broadcast(call);
        case Collective::reduce: {
            enter(call, {});
            const Tensor& in = request.inputs[0];
            std::byte* out = rank_ == request.peer ? request.outputs[0].data : nullptr;
            return reduce_memory(call, in.data, out, static_cast<size_t>(in.numel()), in.dtype, request.peer);
        }
        case Collective::reduce_scatter: return reduce_scatter(call);
        case Collective::all_gather: return all_gather(call);
        case Collective::all_gather_v: return gather_all(call, request.inputs[0], request.outputs);
        case Collective::gather: return gather(call);
        case Collective::scatter: return scatter(call);
        case Collective::all_to_all: return all_to_all(call);
        case Collective::send:
        case Collective::recv:
        case Collective::allocate:
        case Collective::compute: break;
    }
    throw Error(Code::internal, "not a collective");
}

const std::byte* GlooTransport::payload_of(const Call& call, int at) const {
    return entered_[static_cast<size_t>(call.rank_at(at))].bytes.data();
}

std::vector<const std::byte*> GlooTransport::payloads(const Call& call, const std::byte* own) const {
    std::vector<const std::byte*> result;
    for (int at = 0; at < call.size(); ++at) result.push_back(at == call.place ? own : payload_of(call, at));
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
        reduce(result.data(), payloads(call, own.data()), size / size_of(dtype), dtype, call.request.op);
        return unpack(result.data(), list);
    }
    enter(call, {});
    if (list.size() > 1 && size <= packed_size) {
        std::vector<std::byte> packed(size);
        pack(list, packed.data());
        reduce_memory(call, packed.data(), packed.data(), size / size_of(dtype), dtype, -1);
        return unpack(packed.data(), list);
    }
    for (const Tensor& tensor : list) {
        reduce_memory(call, tensor.data, tensor.data, static_cast<size_t>(tensor.numel()), dtype, -1);
    }
}

void GlooTransport::reduce_memory(Call& call, const std::byte* in, std::byte* out, size_t count, DType dtype,
                                  int root) {
    const size_t element = size_of(dtype);
    const size_t each = std::max<size_t>(chunk_size / element, static_cast<size_t>(world()));
    const Chunks chunks{count, each, [&](size_t c) { return in + c * each * element; },
                        [&](size_t c) { return out == nullptr ? nullptr : out + c * each * element; }, [](size_t) {}};
    reduce_chunks(call, chunks, dtype, root, static_cast<size_t>(world()));
}

// Each member receives all inputs of its slice of a chunk, reduces them in the members' order, and sends the result to
// the root or to all. While one chunk's results go out, the next one's inputs come in, and the caller prepares the one
// after. A chunk's input may be its output.
void GlooTransport::reduce_chunks(Call& call, const Chunks& chunks, DType dtype, int root, size_t divisor) {
    if (chunks.count == 0) return;
    const int n = call.size();
    const int own = call.place;
    const size_t element = size_of(dtype);
    const size_t largest = chunks.length(0) / static_cast<size_t>(n) + 1;
    const size_t slice = (largest * element + 63) / 64 * 64;
    staging_.resize(2 * static_cast<size_t>(n) * slice);
    const auto staged = [&](size_t c, int r) {
        return staging_.data() + (c % 2 * static_cast<size_t>(n) + static_cast<size_t>(r)) * slice;
    };
    const auto offset = [&](size_t c, int r) { return part_of(chunks.length(c), r, n).begin * element; };
    const auto size = [&](size_t c, int r) { return part_of(chunks.length(c), r, n).count * element; };

    struct InFlight {
        const std::byte* input;
        std::unique_ptr<Exchange> scatter;
        std::unique_ptr<Exchange> gather;
    };
    std::deque<InFlight> flying;  // from chunk `first` on
    size_t first = 0;
    const auto begin_scatter = [&](size_t c) {
        const std::byte* in = chunks.input(c);
        Exchange& exchange =
            *flying.emplace_back(InFlight{in, std::make_unique<Exchange>(*this, call), nullptr}).scatter;
        const uint64_t slot = slot::collective(call.sequence, scatter_phase);
        for (int k = 1; k < n; ++k) {
            exchange.receive(call.before(k), slot, staged(c, call.before(k)), size(c, own));
        }
        for (int k = 1; k < n; ++k) {
            exchange.send(call.after(k), slot, in + offset(c, call.after(k)), size(c, call.after(k)));
        }
    };
    const auto reduce_and_gather = [&](size_t c) {
        InFlight& chunk = flying[c - first];
        chunk.scatter->finish();
        std::byte* out = chunks.output(c);
        std::byte* result = out != nullptr ? out + offset(c, own) : staged(c, own);
        std::vector<const std::byte*> inputs;
        for (int r = 0; r < n; ++r) inputs.push_back(r == own ? chunk.input + offset(c, own) : staged(c, r));
        reduce(result, inputs, size(c, own) / element, dtype, call.request.op, divisor);
        chunk.gather = std::make_unique<Exchange>(*this, call);
        const uint64_t slot = slot::collective(call.sequence, gather_phase);
        for (int k = 1; k < n; ++k) {
            const int from = call.before(k);
            if (root < 0 || root == own) chunk.gather->receive(from, slot, out + offset(c, from), size(c, from));
        }
        for (int k = 1; k < n; ++k) {
            const int to = call.after(k);
            if (root < 0 || root == to) chunk.gather->send(to, slot, result, size(c, own));
        }
    };
    const auto end_gather = [&] {
        flying.front().gather->finish();
        flying.pop_front();
        chunks.done(first++);
    };
    begin_scatter(0);
    for (size_t c = 0; c < chunks.number(); ++c) {
        // That half of the staging is free: chunk c - 1 is reduced.
        if (c + 1 < chunks.number()) begin_scatter(c + 1);
        reduce_and_gather(c);
        if (c > 0) end_gather();
    }
    end_gather();
}

void GlooTransport::follow_reduction(const Chunks& chunks) {
    if (chunks.count == 0) return;
    (void)chunks.input(0);
    for (size_t c = 0; c < chunks.number(); ++c) {
        if (c + 1 < chunks.number()) (void)chunks.input(c + 1);
        if (c > 0) chunks.done(c - 1);
    }
    chunks.done(chunks.number() - 1);
}

void GlooTransport::reduce_scatter(Call& call) {
    enter(call, {});
    const auto ranks = static_cast<size_t>(world());
    for_batches(call.request.inputs, call.request.outputs, [&](auto wholes, auto parts) {
        scatter_batch(wholes, parts, ranks,
                      [&](const Tensor& all, const Tensor& own) { reduce_scatter(call, all, own); });
    });
}

void GlooTransport::reduce_scatter(Call& call, const Tensor& input, const Tensor& output) {
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
            exchange.receive(call.before(k), slot::collective(call.sequence, scatter_phase), staged(call.before(k)),
                             size);
        }
        for (int k = 1; k < n; ++k) {
            exchange.send(call.after(k), slot::collective(call.sequence, scatter_phase), own_part(call.after(k)), size);
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
    const size_t each = size <= tree_broadcast_size ? tree_broadcast_size : block_size;
    const auto at = [&](size_t c) { return data + c * each; };
    broadcast_chunks(call, {size, each, at, at, [](size_t) {}}, call.request.peer);
}

// One chunk goes along a tree; several along a chain, in which each member sends a chunk on as soon as it is there.
void GlooTransport::broadcast_chunks(Call& call, const Chunks& chunks, int root) {
    if (chunks.count == 0) return;
    const int n = call.size();
    const int distance = (call.place - root + n) % n;  // from the root
    const auto at = [&](int d) { return (root + d) % n; };
    const uint64_t slot = slot::collective(call.sequence, move_phase);
    Exchange receives(*this, call);
    Exchange sends(*this, call);
    if (chunks.number() == 1) {
        int mask = 1;
        while (mask < n && (distance & mask) == 0) mask <<= 1;
        const std::byte* data = nullptr;
        if (distance > 0) {
            std::byte* out = chunks.output(0);
            receives.receive(at(distance - mask), slot, out, chunks.count);
            receives.finish();
            data = out;
        } else {
            data = chunks.input(0);
        }
        for (mask >>= 1; mask > 0; mask >>= 1) {
            if (distance + mask < n) sends.send(at(distance + mask), slot, data, chunks.count);
        }
        chunks.done(0);
        return sends.finish();
    }
    const bool is_last = distance + 1 == n;
    std::deque<std::byte*> outputs;
    size_t posted = 0;
    const auto free_memory_for = [&](size_t c) {
        if (c >= chunks_in_flight && !is_last) sends.finish_next();
    };
    for (size_t c = 0; c < chunks.number(); ++c) {
        const std::byte* data = nullptr;
        if (distance > 0) {
            for (; posted < std::min(chunks.number(), c + chunks_in_flight - 1); ++posted) {
                free_memory_for(posted);
                outputs.push_back(chunks.output(posted));
                receives.receive(at(distance - 1), slot, outputs.back(), chunks.length(posted));
            }
            receives.finish_next();
            data = outputs.front();
            outputs.pop_front();
        } else {
            free_memory_for(c);
            data = chunks.input(c);
        }
        if (!is_last) sends.send(at(distance + 1), slot, data, chunks.length(c));
        chunks.done(c);
    }
    sends.finish();
}

void GlooTransport::all_gather(Call& call) {
    const auto inputs = call.request.inputs;
    const auto outputs = call.request.outputs;
    const auto ranks = static_cast<size_t>(world());
    if (inputs.size() == 1) return gather_all(call, inputs[0], gathered_parts(inputs[0], outputs[0], ranks));
    enter(call, {});
    for_batches(outputs, inputs, [&](auto wholes, auto parts) {
        gather_batch(wholes, parts, ranks, [&](const Tensor& own, const Tensor& all) {
            exchange_all(call, own, gathered_parts(own, all, ranks));
        });
    });
}

void GlooTransport::gather_all(Call& call, const Tensor& input, std::span<const Tensor> outputs) {
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
    exchange_all(call, input, outputs);
}

void GlooTransport::exchange_all(Call& call, const Tensor& input, std::span<const Tensor> outputs) {
    const uint64_t slot = slot::collective(call.sequence, move_phase);
    Exchange exchange(*this, call);
    for (int k = 1; k < world(); ++k) {
        const Tensor& to = outputs[static_cast<size_t>(call.before(k))];
        exchange.receive(call.before(k), slot, to.data, to.size_bytes());
    }
    for (int k = 1; k < world(); ++k) exchange.send(call.after(k), slot, input.data, input.size_bytes());
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
    for (int k = 1; k < world(); ++k) exchange.receive(call.before(k), slot, part(call.before(k)), input.size_bytes());
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
    for (int k = 1; k < world(); ++k) exchange.send(call.after(k), slot, part(call.after(k)), output.size_bytes());
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
    for (int k = 1; k < world(); ++k) exchange.receive(call.before(k), slot, part(output, call.before(k)), size);
    for (int k = 1; k < world(); ++k) exchange.send(call.after(k), slot, part(input, call.after(k)), size);
    copy_bytes(part(output, rank_), part(input, rank_), size);
    exchange.finish();
}

}  // namespace tsr::gloo_transport
