#include "comm/request.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "base/error.hpp"

namespace tsr {

std::string_view name_of(Collective collective) {
    switch (collective) {
        case Collective::barrier: return "barrier";
        case Collective::all_reduce: return "all_reduce";
        case Collective::reduce_scatter: return "reduce_scatter";
        case Collective::all_gather: return "all_gather";
        case Collective::all_gather_v: return "all_gather_v";
        case Collective::broadcast: return "broadcast";
        case Collective::reduce: return "reduce";
        case Collective::gather: return "gather";
        case Collective::scatter: return "scatter";
        case Collective::all_to_all: return "all_to_all";
        case Collective::send: return "send";
        case Collective::recv: return "recv";
        case Collective::allocate: return "allocate";
        case Collective::finalize: return "finalize";
        case Collective::compute: return "compute";
    }
    return "unknown operation";
}

std::string_view name_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::none: return "none";
        case ReduceOp::sum: return "sum";
        case ReduceOp::avg: return "avg";
        case ReduceOp::min: return "min";
        case ReduceOp::max: return "max";
        case ReduceOp::prod: return "prod";
    }
    return "unknown op";
}

namespace {

bool reduces(Collective c) {
    return c == Collective::all_reduce || c == Collective::reduce_scatter || c == Collective::reduce;
}

bool has_root(Collective c) {
    return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather || c == Collective::scatter;
}

template <Code code = Code::invalid_argument, class... Args>
[[noreturn]] void refuse(const Request& request, fmt::format_string<Args...> format, Args&&... args) {
    throw Error(code,
                fmt::format("{}: {}", name_of(request.collective), fmt::format(format, std::forward<Args>(args)...)))
        .with_operation(std::string(name_of(request.collective)));
}

const Tensor& only(const Request& request, std::span<const Tensor> list, const char* what) {
    if (list.size() != 1) refuse(request, "needs one {} tensor, got {}", what, list.size());
    return list[0];
}

void check_device(const Request& request, const Tensor& tensor, const char* what, size_t index,
                  const std::optional<Device>& device) {
    if (tensor.device.type == DeviceType::cpu) return;
    if (tensor.device.type != DeviceType::cuda) {
        refuse(request, "{}[{}] is on a device of unknown type {}", what, index, static_cast<int>(tensor.device.type));
    }
    if (!device) {
        refuse<Code::unsupported>(
            request,
            "{}[{}] is on CUDA device {}, but this communicator has no transport for it; create it with "
            "the backend 'cpu:auto,cuda:nccl'",
            what, index, tensor.device.index);
    }
    if (tensor.device == *device) return;
    refuse(request, "{}[{}] is on CUDA device {}, but this rank communicates from CUDA device {}", what, index,
           tensor.device.index, device->index);
}

// That a request with tensors on a device, or with a stream, can be made in a communicator that has `device`.
void check_places(const Request& request, const std::optional<Device>& device) {
    for (size_t i = 0; i < request.inputs.size(); ++i) check_device(request, request.inputs[i], "input", i, device);
    for (size_t i = 0; i < request.outputs.size(); ++i) check_device(request, request.outputs[i], "output", i, device);
    if (is_on_device(request)) return;
    if (!device) {
        refuse<Code::unsupported>(request, "a CUDA stream was given, but this communicator has no CUDA transport");
    }
    refuse(request, "a stream was passed, but the tensors are on the CPU, which has none");
}

void check_tensor(const Request& request, const Tensor& tensor, const char* what, size_t index, DeviceType place) {
    if (!is_known(tensor.dtype)) {
        refuse(request, "{}[{}] has unknown dtype {}", what, index, static_cast<int>(tensor.dtype));
    }
    if (tensor.device.type != place) {
        refuse(request, "{}[{}] is on another device than the first tensor; all must be on one", what, index);
    }
    if (tensor.data == nullptr && tensor.numel() > 0) refuse(request, "{}[{}] has no data", what, index);
    // Sizes are powers of two: no division in every call.
    if ((reinterpret_cast<uintptr_t>(tensor.data) & (size_of(tensor.dtype) - 1)) != 0) {
        refuse(request, "{}[{}] is not aligned to its {} elements", what, index, name_of(tensor.dtype));
    }
}

void check_same_dtype(const Request& request, DType a, DType b) {
    if (a != b) refuse(request, "tensors have different dtypes, {} and {}", name_of(a), name_of(b));
}

// Input and output may share memory only as the same part of it.
void check_overlap(const Request& request, const Tensor& input, const Tensor& output, size_t allowed_offset,
                   bool may_alias) {
    const auto in = reinterpret_cast<uintptr_t>(input.data);
    const auto out = reinterpret_cast<uintptr_t>(output.data);
    if (input.size_bytes() == 0 || output.size_bytes() == 0) return;
    if (in + input.size_bytes() <= out || out + output.size_bytes() <= in) return;
    const size_t offset = input.size_bytes() > output.size_bytes() ? out - in : in - out;
    if (may_alias && offset == allowed_offset) return;
    refuse(request, "input and output overlap");
}

// The tensors of one list must not overlap: they would be reduced or received twice into the same memory. The i-th
// tensors of several lists belong together, and may share memory.
void check_apart(const Request& request, std::initializer_list<std::span<const Tensor>> lists) {
    if (lists.begin()->size() < 2) return;
    struct Place {
        uintptr_t begin;
        uintptr_t end;
        size_t index;
    };
    std::vector<Place> places;
    for (const auto list : lists) {
        for (size_t i = 0; i < list.size(); ++i) {
            const auto begin = reinterpret_cast<uintptr_t>(list[i].data);
            const size_t size = list[i].size_bytes();
            if (size > 0) places.push_back({begin, begin + size, i});
        }
    }
    std::ranges::sort(places, {}, &Place::begin);
    Place last{};
    for (const Place& place : places) {
        if (place.begin < last.end && place.index != last.index) {
            const auto [first, second] = std::minmax(place.index, last.index);
            refuse(request, "tensors [{}] and [{}] overlap; each must have its own memory", first, second);
        }
        if (place.end > last.end) last = place;
    }
}

void check_counts(const Request& request, const Tensor& whole, const char* whole_name, const Tensor& part,
                  const char* part_name, int world_size) {
    int64_t all = 0;
    const bool fits = !__builtin_mul_overflow(part.numel(), int64_t{world_size}, &all);
    if (fits && whole.numel() == all) return;
    refuse(request, "{} has {} elements, but {} ranks with an {} of {} elements need {}", whole_name, whole.numel(),
           world_size, part_name, part.numel(), fits ? std::to_string(all) : "more than any tensor has");
}

// Of an all_gather or a reduce_scatter of a list: tensors and their parts, one of which is this rank's.
void check_pairs(const Request& request, std::span<const Tensor> wholes, const char* whole_name,
                 std::span<const Tensor> parts, const char* part_name, int rank, int world_size) {
    if (wholes.size() != parts.size() || wholes.empty()) {
        refuse(request, "needs the same number of inputs and outputs, at least one each; got {} and {}",
               request.inputs.size(), request.outputs.size());
    }
    for (size_t i = 0; i < wholes.size(); ++i) {
        check_same_dtype(request, wholes[0].dtype, wholes[i].dtype);
        check_same_dtype(request, wholes[0].dtype, parts[i].dtype);
        check_counts(request, wholes[i], whole_name, parts[i], part_name, world_size);
        check_overlap(request, request.inputs[i], request.outputs[i], parts[i].size_bytes() * static_cast<size_t>(rank),
                      true);
    }
    check_apart(request, {wholes, parts});
}

}  // namespace

namespace {

// The root, or the other end of a message.
void check_peer(const Request& request, int rank, int world_size) {
    const bool is_known = request.peer >= 0 && request.peer < world_size;
    if (has_root(request.collective) && !is_known) {
        refuse(request, "root {} is not a rank; there are {} ranks", request.peer, world_size);
    }
    if (!is_point_to_point(request.collective)) return;
    if (!is_known) refuse(request, "peer {} is not a rank; there are {} ranks", request.peer, world_size);
    if (request.peer == rank) refuse(request, "rank {} cannot be its own peer", rank);
    if (request.tag < 0) refuse(request, "tag {} is negative", request.tag);
}

void check_reduction(const Request& request, DeviceType place) {
    if (request.op < ReduceOp::sum || request.op > ReduceOp::prod) {
        refuse(request, "unknown reduction {}", static_cast<int>(request.op));
    }
    for (const auto list : {request.inputs, request.outputs}) {
        for (const Tensor& tensor : list) {
            if (can_reduce(tensor.dtype)) continue;
            const bool is_f8 = tensor.dtype == DType::f8_e4m3 || tensor.dtype == DType::f8_e5m2;
            if (is_f8 && place == DeviceType::cuda) continue;  // if the transport can
            refuse<Code::unsupported>(request, "{} cannot be reduced; use f16, bf16, f32, f64, i8, u8, i32 or i64",
                                      name_of(tensor.dtype));
        }
    }
}

void check_all_gather_v(const Request& request, int rank, int world_size) {
    const Tensor& in = only(request, request.inputs, "input");
    if (request.outputs.size() != static_cast<size_t>(world_size)) {
        refuse(request, "needs one output per rank, {} in total, got {}", world_size, request.outputs.size());
    }
    for (size_t r = 0; r < request.outputs.size(); ++r) {
        check_same_dtype(request, in.dtype, request.outputs[r].dtype);
        check_overlap(request, in, request.outputs[r], 0, r == static_cast<size_t>(rank));
    }
    const int64_t expected = request.outputs[static_cast<size_t>(rank)].numel();
    if (in.numel() != expected) {
        refuse(request, "input has {} elements, but outputs[{}] has {}", in.numel(), rank, expected);
    }
    check_apart(request, {request.outputs});
}

}  // namespace

namespace {

[[gnu::always_inline]] inline void check_request(const Request& request, int rank, int world_size, DeviceType place) {
    const Collective c = request.collective;
    for (size_t i = 0; i < request.inputs.size(); ++i) check_tensor(request, request.inputs[i], "input", i, place);
    for (size_t i = 0; i < request.outputs.size(); ++i) {
        check_tensor(request, request.outputs[i], "output", i, place);
    }
    check_peer(request, rank, world_size);
    if (reduces(c)) check_reduction(request, place);
    const bool is_root = rank == request.peer;
    const auto own_part = [&](const Tensor& part) { return part.size_bytes() * static_cast<size_t>(rank); };
    switch (c) {
        case Collective::barrier:
        case Collective::finalize:
        case Collective::allocate:
        case Collective::compute: return;
        case Collective::all_reduce:
        case Collective::broadcast:
            if (request.outputs.size() > 1) check_apart(request, {request.outputs});
            for (const Tensor& tensor : request.outputs) {
                check_same_dtype(request, request.outputs[0].dtype, tensor.dtype);
            }
            return;
        case Collective::reduce_scatter:
            return check_pairs(request, request.inputs, "input", request.outputs, "output", rank, world_size);
        case Collective::all_gather:
            return check_pairs(request, request.outputs, "output", request.inputs, "input", rank, world_size);
        case Collective::all_gather_v: return check_all_gather_v(request, rank, world_size);
        case Collective::reduce: {
            const Tensor& in = only(request, request.inputs, "input");
            if (!is_root) return;
            const Tensor& out = only(request, request.outputs, "output");
            check_same_dtype(request, in.dtype, out.dtype);
            if (in.numel() != out.numel()) {
                refuse(request, "input has {} elements, but output has {}", in.numel(), out.numel());
            }
            return check_overlap(request, in, out, 0, true);
        }
        case Collective::gather: {
            const Tensor& in = only(request, request.inputs, "input");
            if (!is_root) return;
            const Tensor& out = only(request, request.outputs, "output");
            check_same_dtype(request, in.dtype, out.dtype);
            check_counts(request, out, "output", in, "input", world_size);
            return check_overlap(request, in, out, own_part(in), true);
        }
        case Collective::scatter: {
            const Tensor& out = only(request, request.outputs, "output");
            if (!is_root) return;
            const Tensor& in = only(request, request.inputs, "input");
            check_same_dtype(request, in.dtype, out.dtype);
            check_counts(request, in, "input", out, "output", world_size);
            return check_overlap(request, in, out, own_part(out), true);
        }
        case Collective::all_to_all: {
            const Tensor& in = only(request, request.inputs, "input");
            const Tensor& out = only(request, request.outputs, "output");
            check_same_dtype(request, in.dtype, out.dtype);
            if (in.numel() != out.numel()) {
                refuse(request, "input has {} elements, but output has {}", in.numel(), out.numel());
            }
            if (in.numel() % world_size != 0) {
                refuse(request, "{} elements are not divisible by {} ranks", in.numel(), world_size);
            }
            return check_overlap(request, in, out, 0, false);
        }
        case Collective::send: only(request, request.inputs, "input"); return;
        case Collective::recv: only(request, request.outputs, "output"); return;
    }
    refuse(request, "unknown operation {}", static_cast<int>(c));
}

}  // namespace

bool validate(const Request& request, int rank, int world_size, const std::optional<Device>& device) {
    const Tensor* const first = !request.outputs.empty()  ? request.outputs.data()
                                : !request.inputs.empty() ? request.inputs.data()
                                                          : nullptr;
    const DeviceType place = first == nullptr ? DeviceType::cpu : first->device.type;
    if (place != DeviceType::cpu || request.stream != nullptr) [[unlikely]]
        check_places(request, device);
    check_request(request, rank, world_size, place);
    return place != DeviceType::cpu;
}

uint64_t Operation::size_bytes() const {
    return count * size_of(static_cast<DType>(dtype));  // 0 without a dtype
}

namespace {

// The fingerprint also covers `label` bytes of the operation's label, so that a collective that the library issues for
// itself, such as that of a split, does not match the same collective of a program.
uint64_t fingerprint_of(const Request& request, const Operation& operation, size_t label) {
    uint64_t hash = 0x9e3779b97f4a7c15;
    const auto mix = [&hash](uint64_t word) {
        hash = (hash ^ word) * 0xff51afd7ed558ccd;
        hash ^= hash >> 32;
    };
    mix(static_cast<uint64_t>(operation.collective) << 48 | static_cast<uint64_t>(operation.op) << 40 |
        static_cast<uint64_t>(operation.dtype) << 32 | static_cast<uint32_t>(operation.peer));
    mix(operation.count);
    mix(operation.tensors);
    for (size_t at = 0; at < label; at += sizeof(uint64_t)) {
        uint64_t word = 0;
        std::memcpy(&word, operation.label.data() + at, sizeof word);
        mix(word);
    }
    if (operation.tensors > 1) {
        for (const Tensor& tensor : request.outputs) mix(static_cast<uint64_t>(tensor.numel()));
    }
    return hash;
}

// Returns the length of what has room.
size_t set_label(Operation& operation, std::string_view label) {
    const size_t size = std::min(label.size(), operation.label.size() - 1);
    if (size > 0) std::memcpy(operation.label.data(), label.data(), size);  // an empty view may be NULL
    return size;
}

std::string label_of(const Operation& operation) {
    return {operation.label.data(), strnlen(operation.label.data(), operation.label.size())};
}

}  // namespace

Operation operation_of(const Request& request) {
    Operation result;
    result.collective = request.collective;
    if (reduces(request.collective)) result.op = request.op;
    if (has_root(request.collective) || is_point_to_point(request.collective)) result.peer = request.peer;
    if (is_point_to_point(request.collective)) result.tag = request.tag;
    const auto told = [&](std::span<const Tensor> list) {
        result.tensors = static_cast<uint32_t>(list.size());
        for (const Tensor& tensor : list) result.count += static_cast<uint64_t>(tensor.numel());
        if (!list.empty()) result.dtype = static_cast<int32_t>(list[0].dtype);
    };
    switch (request.collective) {
        case Collective::barrier:
        case Collective::finalize:
        case Collective::allocate: break;
        case Collective::all_reduce:
        case Collective::all_gather_v:
        case Collective::broadcast:
        case Collective::scatter:
        case Collective::recv: told(request.outputs); break;
        default: told(request.inputs); break;
    }
    const size_t label = set_label(result, request.label);
    result.fingerprint = fingerprint_of(request, result, label);
    return result;
}

std::vector<Tensor> gathered_parts(const Tensor& input, const Tensor& output, size_t ranks) {
    std::vector<Tensor> parts(ranks, input);
    for (size_t r = 0; r < ranks; ++r) parts[r].data = output.data + r * parts[r].size_bytes();
    return parts;
}

Operation allocation_of(size_t size) {
    Operation result;
    result.collective = Collective::allocate;
    result.count = size;
    result.fingerprint = fingerprint_of({}, result, 0);
    return result;
}

Operation computation_of(std::string_view label) {
    Operation result;
    result.collective = Collective::compute;
    set_label(result, label);
    return result;
}

std::string describe(const Operation& operation) {
    if (operation.collective == Collective::compute) return label_of(operation);
    std::string text(name_of(operation.collective));
    if (operation.collective == Collective::barrier || operation.collective == Collective::finalize) return text;
    if (operation.collective == Collective::allocate) return text + fmt::format(" of {} bytes", operation.count);
    const auto dtype = static_cast<DType>(operation.dtype);
    text += fmt::format(" of {} {}", operation.count, is_known(dtype) ? name_of(dtype) : "elements");
    if (operation.tensors != 1) text += fmt::format(" in {} tensors", operation.tensors);
    if (operation.op != ReduceOp::none) text += fmt::format(" ({})", name_of(operation.op));
    if (has_root(operation.collective)) text += fmt::format(" with root {}", operation.peer);
    if (operation.collective == Collective::send) text += fmt::format(" to rank {}", operation.peer);
    if (operation.collective == Collective::recv) text += fmt::format(" from rank {}", operation.peer);
    if (is_point_to_point(operation.collective)) text += fmt::format(" with tag {}", operation.tag);
    return text;
}

namespace {

std::string human_size(uint64_t bytes) {
    if (bytes < 1024) return fmt::format("{} B", bytes);
    if (bytes < (uint64_t{1} << 20)) return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / 1024);
    if (bytes < (uint64_t{1} << 30)) return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
    return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1 << 30));
}

}  // namespace

std::string headline(const Operation& operation, uint64_t sequence) {
    if (operation.collective == Collective::compute) return label_of(operation);
    std::string text = fmt::format("{} #{}", name_of(operation.collective), sequence);
    std::string detail = label_of(operation);
    if (is_point_to_point(operation.collective)) {
        if (!detail.empty()) detail += ", ";
        detail += fmt::format("{} rank {}, tag {}", operation.collective == Collective::send ? "to" : "from",
                              operation.peer, operation.tag);
    }
    if (operation.dtype != 0) detail += (detail.empty() ? "" : ", ") + human_size(operation.size_bytes());
    return detail.empty() ? text : fmt::format("{} ({})", text, detail);
}

OwnedRequest::OwnedRequest(const Request& request)
    : fields_(request),
      inputs_(request.inputs.begin(), request.inputs.end()),
      outputs_(request.outputs.begin(), request.outputs.end()),
      on_device_(tsr::is_on_device(request)) {}

Request OwnedRequest::view() const {
    Request result = fields_;
    result.inputs = inputs_;
    result.outputs = outputs_;
    return result;
}

}  // namespace tsr
