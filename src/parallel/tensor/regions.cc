#include "parallel/tensor/regions.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/reentry.hpp"
#include "comm/reduce.hpp"
#include "device/launch.hpp"
#include "parallel/placement.hpp"
#include "parallel/tensor/cut.hpp"
#include "tensor/arithmetic.hpp"

namespace tsr {

namespace {

void refuse_capture(Device device, StreamHandle stream) {
    if (!device_api(device).is_captured(stream)) return;
    throw Error(Code::invalid_state,
                fmt::format("{}: the stream is being captured into a CUDA graph, which can have only tensor-parallel "
                            "operations that need no memory of the model: without a dimension, or along the outermost "
                            "one if its size divides by the number of ranks",
                            device_api(device).name()));
}

Tensor flat(std::byte* data, size_t size, const Tensor& like) {
    return {data, Dims{static_cast<int64_t>(size / size_of(like.dtype))}, like.dtype, like.device};
}

Tensor flat(const Tensor& tensor) { return flat(tensor.data, tensor.size_bytes(), tensor); }

[[noreturn]] void refuse(const Tensor& in, const Tensor& out, const std::string& why) {
    throw Error(Code::invalid_argument, fmt::format("an activation {} {} cannot become {} {}: {}", name_of(in.dtype),
                                                    in.shape.str(), name_of(out.dtype), out.shape.str(), why));
}

void check_alike(const Tensor& in, const Tensor& out) {
    if (in.dtype != out.dtype) refuse(in, out, "the dtypes differ");
    if (in.device != out.device) refuse(in, out, "the devices differ");
    for (const Tensor& tensor : {in, out}) {
        if (reinterpret_cast<uintptr_t>(tensor.data) % size_of(tensor.dtype) == 0) continue;
        refuse(in, out, "their memory is not aligned to the elements");
    }
}

std::byte* at_least(size_t size, GrowingMemory& memory, Device device) {
    memory.reserve(std::bit_ceil(std::max(size, size_t{1})), device_api(device));
    return memory.data();
}

template <class T>
void add_row_on_device(const Tensor& out, const Tensor& bias, StreamHandle stream) {
    const auto width = static_cast<size_t>(bias.numel());
    launch(device_api(out.device),
           kernels::AddRow<T>{out.data, bias.data, static_cast<size_t>(out.numel()) / width, width}, stream);
}

void add_to_rows_on_device(const Tensor& out, const Tensor& bias, StreamHandle stream) {
    switch (out.dtype) {
        case DType::f16: return add_row_on_device<Half>(out, bias, stream);
        case DType::bf16: return add_row_on_device<BFloat>(out, bias, stream);
        case DType::f32: return add_row_on_device<float>(out, bias, stream);
        default: return add_row_on_device<double>(out, bias, stream);
    }
}

}  // namespace

void add_to_rows(const Tensor& out, const Tensor& bias, StreamHandle stream) {
    if (out.numel() == 0) return;
    if (out.device.type != DeviceType::cpu) [[unlikely]]
        return add_to_rows_on_device(out, bias, stream);
    Tensor row = bias;
    const size_t size = bias.size_bytes();
    const size_t rows = out.size_bytes() / size;
    for (size_t i = 0; i < rows; ++i) {
        row.data = out.data + i * size;
        add(row, bias);
    }
}

void check_bias(const Tensor& out, const Tensor& bias) {
    const int64_t features = out.shape.ndim() == 0 ? 1 : out.shape[out.shape.ndim() - 1];
    if (bias.device.type != out.device.type) {
        throw Error(Code::invalid_argument, "the bias is on another device than the activation to which it is added");
    }
    if (bias.dtype == out.dtype && bias.numel() == features && is_floating(out.dtype)) {
        if (out.device.type != DeviceType::cpu) require_kernels_for("a bias", out.device);
        return;
    }
    throw Error(
        Code::invalid_argument,
        fmt::format("the bias {} {} cannot be added to {} {}: it must have the last dimension's {} elements, of "
                    "the same floating-point dtype",
                    name_of(bias.dtype), bias.shape.str(), name_of(out.dtype), out.shape.str(), features));
}

void TpMoves::check_places(std::span<const Tensor> tensors, StreamHandle stream) const {
    bool is_on_device = false;
    for (const Tensor& tensor : tensors) {
        if (tensor.device.type == DeviceType::cpu) continue;
        check_on_device(tensor, "a tensor", comm_->device());
        is_on_device = true;
    }
    if (is_on_device) device_api(*comm_->device()).check_stream(stream);
}

void TpMoves::check_same(const Tensor& in, const Tensor& out) const {
    check_alike(in, out);
    if (in.shape != out.shape) refuse(in, out, "the shapes differ");
}

void TpMoves::check_part(const Tensor& in, const Tensor& out, Part part, int dim) const {
    check_alike(in, out);
    const Dims& whole = part == Part::in ? out.shape : in.shape;
    if (dim < 0 || dim >= whole.ndim()) {
        refuse(
            in, out,
            fmt::format("there is no dimension {}; a tensor of {} has 0 to {}", dim, whole.ndim(), whole.ndim() - 1));
    }
    Dims expected = whole;
    const Range range = chunk(whole[dim], comm_->world_size(), comm_->rank());
    expected[dim] = range.end - range.begin;
    if ((part == Part::in ? in.shape : out.shape) == expected) return;
    refuse(in, out,
           fmt::format("along dimension {}, rank {} of {} has {} of the {} elements, so its part must be {}", dim,
                       comm_->rank(), comm_->world_size(), expected[dim], whole[dim], expected.str()));
}

std::byte* TpMoves::scratch(size_t size) {
    // The old memory goes when all ranks have come here, so that nobody reads it any more.
    if (!scratch_ || scratch_->size() < size) scratch_ = comm_->allocate(std::bit_ceil(size));
    return scratch_->data();
}

std::byte* TpMoves::scratch(size_t size, Device device, StreamHandle stream) {
    if (device.type == DeviceType::cpu) return scratch(size);
    refuse_capture(device, stream);
    return at_least(size, scratch_on_device_, device);
}

std::vector<std::byte*> TpMoves::shared_scratch(size_t size, Device device) {
    if (device.type != DeviceType::cpu) return {};
    static_cast<void>(scratch(size));
    for (int r = 0; r < comm_->world_size(); ++r) {
        if (scratch_->of_rank(r) == nullptr) return {};
    }
    static_cast<void>(scratch(2 * size));
    const size_t half = ++turn_ % 2 * (scratch_->size() / 2);
    std::vector<std::byte*> parts;
    for (int r = 0; r < comm_->world_size(); ++r) parts.push_back(scratch_->of_rank(r) + half);
    return parts;
}

void TpMoves::meet(std::string_view what, const Cut& cut) {
    const std::string label = fmt::format("{} {}x{}x{}", what, cut.outer, cut.length, cut.item);
    comm_->run({.collective = Collective::barrier, .label = label});
}

Tensor TpMoves::temporary(const Dims& shape, DType dtype, Device device, StreamHandle stream) {
    Tensor tensor{nullptr, shape, dtype, device};
    if (device.type != DeviceType::cpu) {
        refuse_capture(device, stream);
        tensor.data = at_least(tensor.size_bytes(), temporary_on_device_, device);
        return tensor;
    }
    if (!temporary_ || temporary_size_ < tensor.size_bytes()) {
        temporary_.reset();
        temporary_ = device_api(device).allocate(tensor.size_bytes());
        temporary_size_ = tensor.size_bytes();
    }
    tensor.data = temporary_.get();
    return tensor;
}

void TpMoves::copy(const Tensor& in, const Tensor& out, StreamHandle stream) const {
    check_same(in, out);
    if (in.data != out.data) device_api(in.device).copy(out.data, in.data, in.size_bytes(), stream);
}

void TpMoves::sum(const Tensor& in, const Tensor& out, StreamHandle stream) {
    copy(in, out, stream);
    comm_->run({.collective = Collective::all_reduce,
                .inputs = {},
                .outputs = {&out, 1},
                .op = ReduceOp::sum,
                .label = "sum of activations",
                .stream = stream});
}

void TpMoves::gather(const Tensor& in, const Tensor& out, int dim, StreamHandle stream) {
    check_part(in, out, Part::in, dim);
    if (out.numel() == 0) return;  // on every rank
    const Cut cut(out, dim, comm_->world_size());
    const auto gather = [&](Collective how, const Tensor& part, std::span<const Tensor> whole) {
        comm_->run({.collective = how,
                    .inputs = {&part, 1},
                    .outputs = whole,
                    .label = "gather of activations",
                    .stream = stream});
    };
    const Tensor whole = flat(out);
    if (cut.is_outermost() && cut.is_even()) return gather(Collective::all_gather, flat(in), {&whole, 1});
    if (cut.is_outermost()) {
        std::vector<Tensor> parts;
        for (size_t r = 0; r < cut.ranks; ++r) parts.push_back(flat(cut.in(out.data, r).data, cut.row(r), out));
        return gather(Collective::all_gather_v, flat(in), parts);
    }
    DeviceApi& device = device_api(in.device);
    const auto own = static_cast<size_t>(comm_->rank());
    if (const auto shared = shared_scratch(cut.part_size(), in.device); !shared.empty()) {
        device.copy(shared[own], in.data, in.size_bytes(), stream);
        meet("gather", cut);
        for (size_t r = 0; r < cut.ranks; ++r) {
            const std::byte* from = r == own ? in.data : shared[r];
            device.copy_rows(cut.in(out.data, r), {from, cut.row(r)}, cut.outer, cut.row(r), stream);
        }
        return;
    }
    std::byte* const parts = scratch(cut.ranks * cut.part_size(), in.device, stream);
    const auto part_of = [&](size_t r) { return ByteRows{parts + r * cut.part_size(), cut.padded() * cut.item}; };
    device.copy_rows(part_of(own), {in.data, cut.row(own)}, cut.outer, cut.row(own), stream);
    const Tensor all = flat(parts, cut.ranks * cut.part_size(), in);
    gather(Collective::all_gather, flat(part_of(own).data, cut.part_size(), in), {&all, 1});
    for (size_t r = 0; r < cut.ranks; ++r) {
        device.copy_rows(cut.in(out.data, r), part_of(r), cut.outer, cut.row(r), stream);
    }
}

void TpMoves::sum_scatter(const Tensor& in, const Tensor& out, int dim, StreamHandle stream) {
    check_part(in, out, Part::out, dim);
    if (in.numel() == 0) return;  // on every rank
    const Cut cut(in, dim, comm_->world_size());
    const auto reduce = [&](const Tensor& whole, const Tensor& part) {
        comm_->run({.collective = Collective::reduce_scatter,
                    .inputs = {&whole, 1},
                    .outputs = {&part, 1},
                    .op = ReduceOp::sum,
                    .label = "sum of activations",
                    .stream = stream});
    };
    if (cut.is_outermost() && cut.is_even()) return reduce(flat(in), flat(out));
    DeviceApi& device = device_api(in.device);
    const auto own = static_cast<size_t>(comm_->rank());
    if (const auto shared = shared_scratch(cut.ranks * cut.part_size(), in.device); !shared.empty()) {
        std::vector<const std::byte*> addends;
        for (size_t r = 0; r < cut.ranks; ++r) {
            const ByteRows part{shared[own] + r * cut.part_size(), cut.row(r)};
            device.copy_rows(part, cut.in(in.data, r), cut.outer, cut.row(r), stream);
            addends.push_back(shared[r] + own * cut.part_size());
        }
        meet("sum_scatter", cut);
        return tsr::reduce(out.data, addends, static_cast<size_t>(out.numel()), out.dtype, ReduceOp::sum);
    }
    std::byte* const parts = scratch(cut.ranks * cut.part_size(), in.device, stream);
    const auto part_of = [&](size_t r) { return ByteRows{parts + r * cut.part_size(), cut.padded() * cut.item}; };
    for (size_t r = 0; r < cut.ranks; ++r) {
        if (cut.row(r) < part_of(r).stride) device.zero(part_of(r).data, cut.part_size(), stream);
        device.copy_rows(part_of(r), cut.in(in.data, r), cut.outer, cut.row(r), stream);
    }
    reduce(flat(parts, cut.ranks * cut.part_size(), in), flat(part_of(own).data, cut.part_size(), in));
    device.copy_rows({out.data, cut.row(own)}, part_of(own), cut.outer, cut.row(own), stream);
}

void TpMoves::split(const Tensor& in, const Tensor& out, int dim, StreamHandle stream) const {
    check_part(in, out, Part::out, dim);
    if (in.numel() == 0) return;
    const Cut cut(in, dim, comm_->world_size());
    const auto own = static_cast<size_t>(comm_->rank());
    device_api(in.device).copy_rows({out.data, cut.row(own)}, cut.in(in.data, own), cut.outer, cut.row(own), stream);
}

void TpMoves::share_part(const Tensor& in, const Tensor& part, const Tensor& out, int dim, int place,
                         StreamHandle stream) {
    const Cut cut(out, dim, comm_->world_size());
    DeviceApi& device = device_api(out.device);
    if (comm_->rank() == place && part.data != in.data) {
        device.copy(part.data, in.data, in.size_bytes(), stream);
    }
    const Tensor bytes = flat(part);
    comm_->run({.collective = Collective::broadcast,
                .outputs = {&bytes, 1},
                .peer = place,
                .label = "a part of an activation",
                .stream = stream});
    if (cut.is_outermost()) return;
    const auto rank = static_cast<size_t>(place);
    device.copy_rows(cut.in(out.data, rank), {part.data, cut.row(rank)}, cut.outer, cut.row(rank), stream);
}

void TpMoves::sum_part(const Tensor& part, const Tensor& out, int place, StreamHandle stream) {
    const Tensor input = flat(part);
    const Tensor sum = flat(out);
    const std::span<const Tensor> outputs{&sum, comm_->rank() == place ? 1U : 0U};
    comm_->run({.collective = Collective::reduce,
                .inputs = {&input, 1},
                .outputs = outputs,
                .op = ReduceOp::sum,
                .peer = place,
                .label = "a part of an activation",
                .stream = stream});
}

void TpQueue::run(Body body, StreamHandle stream, Device device, WorkPtr* work, std::function<void()> verify) {
    Communicator& comm = *moves_->comm();
    const Reentry once(this, "the model of communicator", comm.name());  // a callback while this waits for `last_`
    if (device.type != DeviceType::cpu) [[unlikely]] {
        return run_on_device(device, [&](TpMoves& moves, TpStreams& streams) {
            const StreamHandle on = work == nullptr ? stream : streams.own();
            if (work != nullptr) streams.order(on, stream);
            streams.begin(on);
            body(moves, on);
            streams.end(on);
            if (work == nullptr && !verify) return;
            WorkPtr made = comm.track(on, "tensor-parallel operation", std::move(verify));
            if (work != nullptr) *work = std::move(made);
        });
    }
    if (work == nullptr) {
        // Jobs use the same scratch memory.
        if (last_ && !last_->done()) last_->wait(Deadline::in(no_timeout));
        last_.reset();
        return comm.in_one_call([&] { body(*moves_, stream); });
    }
    cpu_device().check_stream(stream);
    last_ = comm.submit_job([body = std::move(body), moves = moves_] { body(*moves, nullptr); });
    *work = last_;
}

TpStreams& TpQueue::streams_of(Device device) {
    if (!streams_) {
        const milliseconds longest = moves_->comm()->options().timeout + after_timeout;
        streams_ = std::make_unique<TpStreams>(device_api(device), longest);
    }
    return *streams_;
}

void TpQueue::run_on_device(Device device, FunctionRef<void(TpMoves& moves, TpStreams& streams)> body) {
    Communicator& comm = *moves_->comm();
    TpStreams& streams = streams_of(device);
    try {
        comm.in_one_call([&] { body(*moves_, streams); });
    } catch (const Error& error) {
        // Peers would wait for this rank.
        if (error.code() == Code::cuda || error.code() == Code::no_memory) comm.abort(error.what());
        throw;
    }
}

}  // namespace tsr
