#include "checkpoint/model/state_gather.hpp"

#include <fmt/core.h>

#include <cstring>
#include <set>
#include <vector>

#include "base/attempt.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/model/runs.hpp"
#include "comm/fingerprint.hpp"

namespace tsr {

namespace {

const StateTensor& found(const State& state, std::string_view name) {
    const auto tensor = state.tensors().find(name);
    if (tensor != state.tensors().end()) return tensor->second;
    throw Error(Code::not_found, fmt::format("the state has no tensor '{}'", name));
}

void check(const Communicator& comm, const TensorKind& kind, std::string_view name, int root) {
    if (root < -1 || root >= comm.world_size()) {
        throw Error(Code::invalid_argument, fmt::format("root is {}; it must be -1 (all ranks) or one of the {} ranks",
                                                        root, comm.world_size()));
    }
    if (kind.layout && (kind.layout->world_size() != comm.world_size() || kind.rank != comm.rank())) {
        throw Error(Code::invalid_argument,
                    fmt::format("tensor '{}' has a layout of {} ranks, with this as rank {}; the communicator has {} "
                                "ranks, with this as rank {}",
                                name, kind.layout->world_size(), kind.rank, comm.world_size(), comm.rank()));
    }
}

void check_memory(const Tensor& memory, const TensorKind& kind, std::string_view name) {
    if (memory.dtype == kind.dtype && memory.shape == kind.shape) return;
    throw Error(Code::invalid_argument,
                fmt::format("tensor '{}' is {} {}, but the memory for it is {} {}", name, name_of(kind.dtype),
                            kind.shape.str(), name_of(memory.dtype), memory.shape.str()));
}

// A tensor's boxes, copied if they are on a device.
struct OnHost {
    std::vector<const std::byte*> memory;
    std::vector<AlignedBuffer> copies;
};

OnHost on_host(const State& state, const StateTensor& tensor, milliseconds timeout) {
    OnHost host{{tensor.memory.begin(), tensor.memory.end()}, {}};
    if (tensor.device.type == DeviceType::cpu) return host;
    CopyStreams copies(timeout);
    state.follow(copies);
    CopyStream& on = *copies.of(tensor.device);
    for (size_t i = 0; i < tensor.memory.size(); ++i) {
        const size_t size = tensor.piece(i).size_bytes();
        if (size == 0) continue;
        const AlignedBuffer& copy = host.copies.emplace_back(size);
        on.copy(copy.data(), tensor.memory[i], size);
        host.memory[i] = copy.data();
    }
    on.wait();
    return host;
}

// The boxes of a tensor for which this is the lowest rank that holds them, by their index among its own.
struct Sender {
    int rank = 0;
    std::vector<std::pair<size_t, Box>> boxes;
    int64_t elements = 0;
};

std::vector<Sender> senders_of(const Layout& layout) {
    std::vector<Sender> senders;
    std::set<std::vector<int64_t>> seen;  // boxes are equal or disjoint: the offsets tell them apart
    for (int rank = 0; rank < layout.world_size(); ++rank) {
        if (!layout.is_explicit() && layout.replica_of(rank) != 0) continue;
        Sender sender{rank, {}, 0};
        const std::vector<Box> boxes = layout.boxes_of(rank);
        for (size_t i = 0; i < boxes.size(); ++i) {
            if (boxes[i].empty() || !seen.insert({boxes[i].offsets.begin(), boxes[i].offsets.end()}).second) continue;
            sender.boxes.emplace_back(i, boxes[i]);
            sender.elements += boxes[i].numel();
        }
        if (sender.elements > 0) senders.push_back(std::move(sender));
    }
    return senders;
}

}  // namespace

void gather_tensor(Communicator& comm, const State& state, std::string_view name, int root,
                   FunctionRef<Tensor()> whole) {
    const StateTensor* tensor = nullptr;
    const bool wanted = root == -1 || root == comm.rank();
    Tensor out;
    OnHost own;
    const auto wrong = attempt([&] {
        tensor = &found(state, name);
        check(comm, *tensor->kind, name, root);
        if (wanted) out = whole();
        if (wanted) check_memory(out, *tensor->kind, name);
        own = on_host(state, *tensor, comm.options().timeout);
    });
    std::vector<std::string> lines{fmt::format("tensor '{}', on rank {}", name, root)};
    if (wrong) {
        lines.push_back(fmt::format("tensor '{}' with an error: {}", name, wrong->what()));
    } else {
        const TensorKind& kind = *tensor->kind;
        lines.push_back(fmt::format("tensor '{}' of {} {}, {}", name, name_of(kind.dtype), kind.shape.str(),
                                    kind.layout ? kind.layout->str() : "whole on each rank"));
    }
    const auto differs =
        attempt([&] { check_same_on_all_ranks(comm, Compared::tensors, lines, "the ranks gather different tensors"); });
    if (wrong) throw Error(*wrong);
    if (differs) throw Error(*differs);

    const TensorKind& kind = *tensor->kind;
    if (!kind.layout) {
        if (wanted && out.size_bytes() > 0) std::memcpy(out.data, own.memory[0], out.size_bytes());
        return;
    }
    const Box all = Box::whole(kind.shape);
    const auto item = static_cast<int64_t>(size_of(kind.dtype));
    std::vector<std::byte> memory;
    for (const Sender& sender : senders_of(*kind.layout)) {
        const bool sends = sender.rank == comm.rank();
        if (!wanted && !sends) continue;
        memory.resize(static_cast<size_t>(sender.elements * item));
        if (sends) {
            std::byte* at = memory.data();
            for (const auto& [number, box] : sender.boxes) {
                const auto size = static_cast<size_t>(box.numel() * item);
                std::memcpy(at, own.memory[number], size);
                at += size;
            }
        }
        const Tensor bytes{memory.data(), Dims{static_cast<int64_t>(memory.size())}, DType::u8, {}};
        constexpr const char* label = "a part of a whole tensor";
        if (root == -1) {
            comm.run(
                {.collective = Collective::broadcast, .outputs = {&bytes, 1}, .peer = sender.rank, .label = label});
        } else if (!sends) {
            comm.run({.collective = Collective::recv, .outputs = {&bytes, 1}, .peer = sender.rank, .label = label});
        } else if (!wanted) {
            comm.run({.collective = Collective::send, .inputs = {&bytes, 1}, .peer = root, .label = label});
        }
        if (!wanted) continue;
        int64_t begin = 0;
        for (const auto& [number, box] : sender.boxes) {
            const Runs runs(box, {&box, nullptr, kind.dtype, begin}, {&all, kind.dtype, out.data});
            const int64_t end = begin + box.numel() * item;
            runs.scatter(begin, end, memory.data() + begin);
            begin = end;
        }
    }
}

}  // namespace tsr
