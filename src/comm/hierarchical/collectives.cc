// The collectives of the hierarchical transport. The other ranks of a host run the same local steps in the same order
// as its leader, which runs the steps between hosts in between.
#include <algorithm>
#include <array>
#include <cstring>

#include "comm/coalesce.hpp"
#include "comm/hierarchical/hierarchical_transport.hpp"
#include "comm/reduce.hpp"

namespace tsr::hierarchical {

namespace {

// A stream of messages between two ranks; steps of one collective follow each other in it.
constexpr uint64_t phase = 3;
uint64_t slot_of(uint64_t sequence) { return gloo_transport::slot::collective(sequence, phase); }

Tensor bytes_at(const std::byte* data, size_t size) {
    return {const_cast<std::byte*>(data), Dims{static_cast<int64_t>(size)}, DType::u8, {}};
}

Tensor elements_at(const std::byte* data, size_t size, DType dtype) {
    return {const_cast<std::byte*>(data), Dims{static_cast<int64_t>(size / size_of(dtype))}, dtype, {}};
}

// The bytes [begin, begin + size) of a list; begin and size are whole elements.
std::vector<Tensor> part_of_list(std::span<const Tensor> list, size_t begin, size_t size) {
    std::vector<Tensor> part;
    for (const Tensor& tensor : list) {
        if (size == 0) break;
        const size_t own = tensor.size_bytes();
        if (begin >= own) {
            begin -= own;
            continue;
        }
        const size_t n = std::min(size, own - begin);
        part.push_back(elements_at(tensor.data + begin, n, tensor.dtype));
        begin = 0;
        size -= n;
    }
    return part;
}

// A host's sum of these dtypes could overflow although the average of all ranks does not.
bool sums_overflow(DType dtype, ReduceOp op) {
    return op == ReduceOp::avg && (dtype == DType::f16 || !is_floating(dtype));
}

// The chunk size of a reduction or a broadcast of `size` bytes, in whole elements: at least a few chunks, so that
// network and memory work concurrently, but not so many that the cost per chunk matters.
size_t chunk_size(size_t size) {
    constexpr size_t least = size_t{256} << 10;
    constexpr size_t most = size_t{1} << 20;
    return std::clamp(size / 4 / 64 * 64, least, most);
}

size_t round_to_line(size_t size) { return (size + 63) / 64 * 64; }

// The next chunk is prepared while the previous one is in flight.
void pipeline(size_t chunks, const std::function<void(size_t chunk)>& begin,
              const std::function<void(size_t chunk)>& end) {
    if (chunks > 0) begin(0);
    for (size_t c = 0; c < chunks; ++c) {
        if (c + 1 < chunks) begin(c + 1);
        end(c);
    }
}

}  // namespace

// --- reductions

void HierarchicalTransport::reduce_to_leader(const Call& call, std::span<const Tensor> inputs, std::byte* to,
                                             size_t size) {
    const Tensor output = elements_at(to, size, inputs[0].dtype);
    local(call, {.collective = Collective::reduce,
                 .inputs = inputs,
                 .outputs = is_leader() ? std::span(&output, 1) : std::span<const Tensor>(),
                 .op = call.request.op == ReduceOp::avg ? ReduceOp::sum : call.request.op,
                 .peer = leader()});
}

void HierarchicalTransport::all_reduce(const Call& call) {
    const auto list = call.request.outputs;
    const size_t size = size_of_list(list);
    if (size == 0) return enter(call);
    const DType dtype = list[0].dtype;
    if (sums_overflow(dtype, call.request.op)) {
        enter(call);
        wide_->run(call.request, call.operation, call.sequence, call.timeout);
        return local_barrier(call);
    }
    if (size <= GlooTransport::max_payload) return all_reduce_small(call, size);

    const size_t element = size_of(dtype);
    const size_t each = chunk_size(size);
    const auto length = [&](size_t c) { return std::min(each, size - c * each); };
    const auto reduce = [&](size_t c) {
        std::byte* to = is_leader() ? chunk_memory(c) : nullptr;
        reduce_to_leader(call, part_of_list(list, c * each, length(c)), to, length(c));
        return to;
    };
    const auto spread = [&](size_t c) {
        const std::vector<Tensor> part = part_of_list(list, c * each, length(c));
        if (is_leader() && part.size() > 1) unpack(chunk_memory(c), part);
        local(call, {.collective = Collective::broadcast, .outputs = part, .peer = leader()});
    };
    GlooTransport::Chunks chunks;
    chunks.count = size / element;
    chunks.each = each / element;
    chunks.input = reduce;
    chunks.output = [&](size_t c) {
        const std::vector<Tensor> part = part_of_list(list, c * each, length(c));
        return part.size() == 1 ? part[0].data : chunk_memory(c);
    };
    chunks.done = spread;
    if (!is_leader()) return GlooTransport::follow_reduction(chunks);
    auto between = among_leaders(call);
    const auto begin = [&, first = chunks.input](size_t c) {
        const std::byte* data = first(c);
        // This host agrees; no output is written before the others do.
        if (c == 0) wide_->enter(between, {});
        return data;
    };
    chunks.input = begin;
    wide_->reduce_chunks(between, chunks, dtype, -1, world());
}

// The data goes with the notices.
void HierarchicalTransport::all_reduce_small(const Call& call, size_t size) {
    const auto list = call.request.outputs;
    const DType dtype = list[0].dtype;
    alignas(64) std::array<std::byte, GlooTransport::max_payload> own;
    alignas(64) std::array<std::byte, GlooTransport::max_payload> result;
    reduce_to_leader(call, list, own.data(), size);
    if (is_leader()) {
        auto between = among_leaders(call);
        wide_->enter(between, std::span(own).first(size));
        std::vector<const std::byte*> inputs;
        for (int at = 0; at < between.size(); ++at) {
            inputs.push_back(at == between.place ? own.data() : wide_->payload_of(between, at));
        }
        tsr::reduce(result.data(), inputs, size / size_of(dtype), dtype, call.request.op, world());
        unpack(result.data(), list);
    }
    local(call, {.collective = Collective::broadcast, .outputs = list, .peer = leader()});
}

void HierarchicalTransport::reduce(const Call& call) {
    const Tensor& input = call.request.inputs[0];
    const int root = call.request.peer;
    const size_t size = input.size_bytes();
    enter(call);
    if (sums_overflow(input.dtype, call.request.op)) {
        wide_->run(call.request, call.operation, call.sequence, call.timeout);
        return local_barrier(call);
    }
    const size_t element = size_of(input.dtype);
    const size_t each = chunk_size(size);
    const auto length = [&](size_t c) { return std::min(each, size - c * each); };
    const auto memory = [&](size_t c) { return chunk_memory(c); };
    const auto piece = [&](const Tensor& whole, size_t c) {
        return elements_at(whole.data + c * each, length(c), whole.dtype);
    };
    GlooTransport::Chunks chunks;
    chunks.count = size / element;
    chunks.each = each / element;
    chunks.input = [&](size_t c) {
        const Tensor part = piece(input, c);
        std::byte* to = is_leader() ? memory(c) : nullptr;
        reduce_to_leader(call, {&part, 1}, to, length(c));
        return to;
    };
    chunks.output = [&](size_t c) -> std::byte* {
        if (!is_here(root)) return nullptr;
        return root == rank_ ? piece(call.request.outputs[0], c).data : memory(c);
    };
    chunks.done = [&](size_t c) {
        if (!is_here(root) || root == leader()) return;
        if (is_leader()) {
            local_message(call, Collective::send, root, elements_at(memory(c), length(c), input.dtype));
        } else if (rank_ == root) {
            local_message(call, Collective::recv, leader(), piece(call.request.outputs[0], c));
        }
    };
    if (is_leader()) {
        auto between = among_leaders(call);
        const auto host_of_root = static_cast<int>(host_of_[static_cast<size_t>(root)]);
        wide_->reduce_chunks(between, chunks, input.dtype, host_of_root, world());
    } else {
        GlooTransport::follow_reduction(chunks);
    }
    local_barrier(call);
}

// Each host reduces all slices locally, sends those of other hosts' ranks to their leaders, and reduces the slices
// received for its own ranks.
void HierarchicalTransport::reduce_scatter(const Call& call) {
    enter(call);
    if (sums_overflow(call.request.inputs[0].dtype, call.request.op)) {
        wide_->run(call.request, call.operation, call.sequence, call.timeout);
        return local_barrier(call);
    }
    for_batches(call.request.inputs, call.request.outputs, [&](auto wholes, auto parts) {
        scatter_batch(wholes, parts, world(),
                      [&](const Tensor& all, const Tensor& own) { reduce_scatter(call, all, own); });
    });
    local_barrier(call);
}

void HierarchicalTransport::reduce_scatter(const Call& call, const Tensor& input, const Tensor& output) {
    const size_t element = size_of(output.dtype);
    const size_t size = output.size_bytes();
    const size_t each = max_chunk_bytes / element / world() * element;
    const size_t chunks = (size + each - 1) / each;
    const auto length = [&](size_t c) { return std::min(each, size - c * each); };
    const size_t own = own_host().size();
    // Of two chunks: what the other leaders send, and the results.
    const size_t stride = round_to_line(own * std::min(each, size));
    if (is_leader()) parts_.resize(2 * (hosts_.size() + 1) * stride);
    const auto part_from = [&](size_t c, size_t at) {
        return parts_.data() + (c % 2 * (hosts_.size() + 1) + at) * stride;
    };
    const auto memory = [&](size_t c) { return chunk_memory(c); };
    std::deque<Exchange> exchanges;
    auto between = among_leaders(call);
    std::vector<size_t> first;  // rank of each host, where the hosts' ranks follow each other
    for (size_t at = 0, n = 0; at < hosts_.size(); n += host(at++).size()) first.push_back(n);
    const auto begin = [&](size_t c) {
        std::vector<Tensor> slices;
        for (size_t at = 0; at < hosts_.size(); ++at) {
            for (const int rank : host(at)) {
                const std::byte* slice = input.data + static_cast<size_t>(rank) * size + c * each;
                slices.push_back(elements_at(slice, length(c), input.dtype));
            }
        }
        reduce_to_leader(call, slices, is_leader() ? memory(c) : nullptr, world() * length(c));
        if (!is_leader()) return;
        Exchange& exchange = exchanges.emplace_back(*wide_, between);
        for (int k = 1; k < between.size(); ++k) {
            const auto from = static_cast<size_t>(between.before(k));
            exchange.receive(between.before(k), slot_of(call.sequence), part_from(c, from), own * length(c));
        }
        for (int k = 1; k < between.size(); ++k) {
            const auto to = static_cast<size_t>(between.after(k));
            exchange.send(between.after(k), slot_of(call.sequence), memory(c) + first[to] * length(c),
                          host(to).size() * length(c));
        }
    };
    const auto end = [&](size_t c) {
        std::byte* result = nullptr;
        if (is_leader()) {
            exchanges.front().finish();
            exchanges.pop_front();
            std::vector<const std::byte*> inputs;
            for (size_t at = 0; at < hosts_.size(); ++at) {
                inputs.push_back(at == own_host_ ? memory(c) + first[at] * length(c) : part_from(c, at));
            }
            result = part_from(c, hosts_.size());
            tsr::reduce(result, inputs, own * length(c) / element, output.dtype, call.request.op, world());
        }
        const Tensor from = bytes_at(result, own * length(c));
        const Tensor to = bytes_at(output.data + c * each, length(c));
        local(call, {.collective = Collective::scatter,
                     .inputs = is_leader() ? std::span(&from, 1) : std::span<const Tensor>(),
                     .outputs = {&to, 1},
                     .peer = leader()});
    };
    pipeline(chunks, begin, end);
}

// --- copies

// From the root to its host, between the leaders, to the other hosts.
void HierarchicalTransport::broadcast(const Call& call) {
    const auto list = call.request.outputs;
    const int root = call.request.peer;
    const size_t size = size_of_list(list);
    enter(call);
    const int source = is_here(root) ? root : leader();
    const size_t each = chunk_size(size);
    const auto part = [&](size_t c) {
        const size_t begin = c * each;
        return part_of_list(list, begin, std::min(each, size - begin));
    };
    const auto spread = [&](size_t c) {
        local(call, {.collective = Collective::broadcast, .outputs = part(c), .peer = source});
    };
    GlooTransport::Chunks chunks;
    chunks.count = size;
    chunks.each = each;
    if (!is_leader()) {
        for (size_t c = 0; c < chunks.number(); ++c) spread(c);
        return local_barrier(call);
    }
    const auto memory = [&](size_t c) {
        const std::vector<Tensor> tensors = part(c);
        return tensors.size() == 1 ? tensors[0].data : chunk_memory(c);
    };
    chunks.input = [&](size_t c) {
        spread(c);
        const std::vector<Tensor> tensors = part(c);
        std::byte* data = memory(c);
        if (tensors.size() > 1) pack(tensors, data);
        return data;
    };
    chunks.output = memory;
    chunks.done = [&](size_t c) {
        if (is_here(root)) return;
        const std::vector<Tensor> tensors = part(c);
        if (tensors.size() > 1) unpack(memory(c), tensors);
        spread(c);
    };
    auto between = among_leaders(call);
    wide_->broadcast_chunks(between, chunks, static_cast<int>(host_of_[static_cast<size_t>(root)]));
    local_barrier(call);
}

void HierarchicalTransport::all_gather(const Call& call) {
    enter(call);
    for_batches(call.request.outputs, call.request.inputs, [&](auto wholes, auto parts) {
        gather_batch(wholes, parts, world(), [&](const Tensor& own, const Tensor& all) {
            gather_all(call, own, gathered_parts(own, all, world()));
        });
    });
    local_barrier(call);
}

void HierarchicalTransport::all_gather_v(const Call& call) {
    enter(call);
    gather_all(call, call.request.inputs[0], call.request.outputs);
    local_barrier(call);
}

void HierarchicalTransport::gather_all(const Call& call, const Tensor& input, std::span<const Tensor> outputs) {
    size_t longest = 0;
    for (const Tensor& output : outputs) longest = std::max(longest, output.size_bytes());
    const size_t each = std::max<size_t>(max_chunk_bytes / world() / 64 * 64, 4096);
    const auto piece = [&](const Tensor& whole, size_t c) {
        const size_t begin = std::min(whole.size_bytes(), c * each);
        return bytes_at(whole.data + begin, std::min(each, whole.size_bytes() - begin));
    };
    const auto pieces = [&](const std::vector<int>& ranks, size_t c) {
        std::vector<Tensor> list;
        for (const int rank : ranks) list.push_back(piece(outputs[static_cast<size_t>(rank)], c));
        return list;
    };
    std::deque<Exchange> exchanges;
    auto between = among_leaders(call);
    const auto begin = [&](size_t c) {
        const Tensor own = piece(input, c);
        const std::vector<Tensor> here = pieces(own_host(), c);
        local(call, {.collective = Collective::all_gather_v, .inputs = {&own, 1}, .outputs = here});
        if (!is_leader()) return;
        Exchange& exchange = exchanges.emplace_back(*wide_, between);
        for (int k = 1; k < between.size(); ++k) {
            for (const Tensor& to : pieces(host(static_cast<size_t>(between.before(k))), c)) {
                exchange.receive(between.before(k), slot_of(call.sequence), to.data, to.size_bytes());
            }
        }
        for (int k = 1; k < between.size(); ++k) {
            for (const Tensor& from : here) {
                exchange.send(between.after(k), slot_of(call.sequence), from.data, from.size_bytes());
            }
        }
    };
    const auto end = [&](size_t c) {
        if (is_leader()) {
            exchanges.front().finish();
            exchanges.pop_front();
        }
        std::vector<Tensor> elsewhere;
        for (size_t at = 0; at < hosts_.size(); ++at) {
            if (at == own_host_) continue;
            const std::vector<Tensor> theirs = pieces(host(at), c);
            elsewhere.insert(elsewhere.end(), theirs.begin(), theirs.end());
        }
        local(call, {.collective = Collective::broadcast, .outputs = elsewhere, .peer = leader()});
    };
    pipeline((longest + each - 1) / each, begin, end);
}

// Ranks of the root's host through memory, the others directly to the root.
void HierarchicalTransport::gather(const Call& call) {
    const Tensor& input = call.request.inputs[0];
    const int root = call.request.peer;
    const size_t size = input.size_bytes();
    enter(call);
    const auto all = among_all(call);
    Exchange exchange(*wide_, all);
    const auto part = [&](int rank) { return call.request.outputs[0].data + static_cast<size_t>(rank) * size; };
    if (!is_here(root)) {
        exchange.send(root, slot_of(call.sequence), input.data, size);
    } else {
        Tensor here;
        if (rank_ == root) {
            for (int k = 1; k < all.size(); ++k) {
                const int from = all.before(k);
                if (!is_here(from)) exchange.receive(from, slot_of(call.sequence), part(from), size);
            }
            parts_.resize(std::max(parts_.size(), own_host().size() * size));
            here = bytes_at(is_contiguous() ? part(leader()) : parts_.data(), own_host().size() * size);
        }
        const Tensor own = bytes_at(input.data, size);
        local(call, {.collective = Collective::gather,
                     .inputs = {&own, 1},
                     .outputs = rank_ == root ? std::span(&here, 1) : std::span<const Tensor>(),
                     .peer = root});
        for (size_t i = 0; rank_ == root && !is_contiguous() && i < own_host().size(); ++i) {
            copy_bytes(part(own_host()[i]), here.data + i * size, size);
        }
    }
    exchange.finish();
    local_barrier(call);
}

void HierarchicalTransport::scatter(const Call& call) {
    const Tensor& output = call.request.outputs[0];
    const int root = call.request.peer;
    const size_t size = output.size_bytes();
    enter(call);
    const auto all = among_all(call);
    Exchange exchange(*wide_, all);
    const auto part = [&](int rank) { return call.request.inputs[0].data + static_cast<size_t>(rank) * size; };
    if (!is_here(root)) {
        exchange.receive(root, slot_of(call.sequence), output.data, size);
    } else {
        Tensor here;
        if (rank_ == root) {
            for (int k = 1; k < all.size(); ++k) {
                const int to = all.after(k);
                if (!is_here(to)) exchange.send(to, slot_of(call.sequence), part(to), size);
            }
            parts_.resize(std::max(parts_.size(), own_host().size() * size));
            here = bytes_at(is_contiguous() ? part(leader()) : parts_.data(), own_host().size() * size);
            for (size_t i = 0; !is_contiguous() && i < own_host().size(); ++i) {
                copy_bytes(here.data + i * size, part(own_host()[i]), size);
            }
        }
        const Tensor own = bytes_at(output.data, size);
        local(call, {.collective = Collective::scatter,
                     .inputs = rank_ == root ? std::span(&here, 1) : std::span<const Tensor>(),
                     .outputs = {&own, 1},
                     .peer = root});
    }
    exchange.finish();
    local_barrier(call);
}

// Between ranks of a host through memory, else from each directly to each.
void HierarchicalTransport::all_to_all(const Call& call) {
    const Tensor& input = call.request.inputs[0];
    const Tensor& output = call.request.outputs[0];
    const size_t size = input.size_bytes() / world();
    enter(call);
    const auto all = among_all(call);
    const auto part = [&](const Tensor& tensor, int r) { return tensor.data + static_cast<size_t>(r) * size; };
    Exchange exchange(*wide_, all);
    for (int k = 1; k < all.size(); ++k) {
        const int from = all.before(k);
        if (!is_here(from)) exchange.receive(from, slot_of(call.sequence), part(output, from), size);
    }
    for (int k = 1; k < all.size(); ++k) {
        const int to = all.after(k);
        if (!is_here(to)) exchange.send(to, slot_of(call.sequence), part(input, to), size);
    }
    const size_t own = own_host().size();
    Tensor from = bytes_at(part(input, leader()), own * size);
    Tensor to = bytes_at(part(output, leader()), own * size);
    if (!is_contiguous()) {
        parts_.resize(std::max(parts_.size(), 2 * own * size));
        from.data = parts_.data();
        to.data = parts_.data() + own * size;
        for (size_t i = 0; i < own; ++i) copy_bytes(from.data + i * size, part(input, own_host()[i]), size);
    }
    local(call, {.collective = Collective::all_to_all, .inputs = {&from, 1}, .outputs = {&to, 1}});
    for (size_t i = 0; !is_contiguous() && i < own; ++i) {
        copy_bytes(part(output, own_host()[i]), to.data + i * size, size);
    }
    exchange.finish();
    local_barrier(call);
}

}  // namespace tsr::hierarchical
