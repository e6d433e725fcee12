#include "parallel/tensor/tensor_parallel.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/round_up.hpp"
#include "comm/fingerprint.hpp"
#include "comm/inner_options.hpp"
#include "device/device.hpp"
#include "parallel/placement.hpp"
#include "parallel/shard_memory.hpp"

namespace tsr {

namespace {

constexpr size_t alignment = 64;                    // of a slice, in bytes: a cache line
constexpr size_t values_at_once = size_t{4} << 20;  // bytes that rank 0 sends to each rank in one operation

// Copies between a whole parameter and the slice of `rank`, which has its ranges one after another.
template <class Copy>
void for_ranges(const TpParam& param, int rank, Copy&& copy) {
    size_t rows = 1;
    size_t item = size_of(param.dtype);
    const int cut = std::max(param.cut, 0);
    for (int d = 0; d < cut; ++d) rows *= static_cast<size_t>(param.shape[d]);
    for (int d = cut + 1; d < param.shape.ndim(); ++d) item *= static_cast<size_t>(param.shape[d]);
    const size_t whole = param.shape.ndim() == 0 ? item : static_cast<size_t>(param.shape[cut]) * item;
    if (param.cut < 0) return copy(0, 0, rows, whole, whole, whole);
    const std::vector<Range> ranges = param.ranges(rank);
    const size_t slice = static_cast<size_t>(param.slice_shape(rank)[cut]) * item;
    size_t at = 0;
    for (const Range& range : ranges) {
        const size_t size = static_cast<size_t>(range.end - range.begin) * item;
        copy(static_cast<size_t>(range.begin) * item, at, rows, size, whole, slice);
        at += size;
    }
}

void cut_slice(DeviceApi& device, const TpParam& param, int rank, const std::byte* whole, std::byte* slice) {
    for_ranges(param, rank, [&](size_t from, size_t to, size_t rows, size_t size, size_t whole_row, size_t slice_row) {
        device.copy_rows({slice + to, slice_row}, {whole + from, whole_row}, rows, size, nullptr);
    });
}

void check_whole(const NamedTensor& param) {
    if (!is_in_shards(param.tensor.data)) return;
    throw Error(Code::invalid_argument,
                fmt::format("parameter \"{}\" is a shard of an FSDP model: create the tensor-parallel model first, of "
                            "whole parameters, and then the FSDP model over its slices (option tp)",
                            param.name));
}

std::vector<TpParam> planned(const DeviceMesh& mesh, std::span<const NamedTensor> registered,
                             std::span<const TpRule> rules, const TpOptions& options, Device& device) {
    TensorParallel::check_mesh(mesh);
    Communicator& comm = *mesh.comm(0);
    std::vector<TpParam> plan = or_refuse_on_all_ranks(comm, Compared::models, [&] {
        std::vector<NamedTensor> params(registered.begin(), registered.end());
        for (NamedTensor& param : params) param.name = without_wrappers(std::move(param.name));
        check_distinct(params);
        for (const NamedTensor& param : params) check_whole(param);
        device = device_of(params, comm.device());
        return plan_slices(params, rules, comm.world_size(), options.sequence_parallel);
    });
    std::vector<std::string> lines = description(plan);
    lines.push_back(fmt::format("sync_values {}", options.sync_values));
    lines.emplace_back(device.type == DeviceType::cpu ? "parameters on the CPU" : "parameters on CUDA devices");
    check_same_on_all_ranks(comm, Compared::models, lines, "the tensor-parallel plans of the ranks differ");
    return plan;
}

}  // namespace

TensorParallel::TensorParallel(const DeviceMesh& mesh, std::span<const NamedTensor> params,
                               std::span<const TpRule> rules, const TpOptions& options)
    : options_(options), plan_(planned(mesh, params, rules, options, device_)), mesh_(mesh), queue_(mesh.comm(0)) {
    for (size_t i = 0; i < plan_.size(); ++i) {
        shapes_.push_back(plan_[i].slice_shape(comm()->rank()));
        at_.push_back(size_);
        size_ = round_up(size_ + slice_size(i, comm()->rank()), alignment);
    }
    allocate_slices();
    if (options_.sync_values) {
        scatter(params);
    } else {
        cut_own(params);
    }
    api().record(nullptr)->wait(Deadline::in(comm()->options().timeout));
}

// A device without memory for them is known on all ranks.
void TensorParallel::allocate_slices() {
    const auto allocate = [&] { slices_ = api().allocate_zeroed(size_); };
    if (device_.type == DeviceType::cpu) return allocate();
    or_refuse_on_all_ranks(*comm(), Compared::models, allocate);
    check_same_on_all_ranks(*comm(), Compared::models, {"memory for slices"}, "the ranks' slices differ");
}

TensorParallel::~TensorParallel() = default;

void TensorParallel::check_mesh(const DeviceMesh& mesh) {
    const MeshShape& shape = mesh.shape();
    if (shape.ndim() == 1) return;
    throw Error(Code::invalid_argument,
                fmt::format("the mesh ({}) has {} dimensions; pass a slice of one, such as \"{}\"", shape.str(),
                            shape.ndim(), shape.name(shape.ndim() - 1)));
}

const TpParam& TensorParallel::param(size_t index) const {
    if (index < plan_.size()) return plan_[index];
    throw no_such("parameter", index, plan_.size());
}

size_t TensorParallel::slice_size(size_t index, int rank) const {
    const TpParam& param = plan_[index];
    return static_cast<size_t>(param.slice_shape(rank).product()) * size_of(param.dtype);
}

Tensor TensorParallel::slice(size_t index) const {
    const TpParam& what = param(index);
    return {slices_.get() + at_[index], shapes_[index], what.dtype, device_};
}

const Dims& TensorParallel::slice_shape(size_t index) const {
    (void)param(index);
    return shapes_[index];
}

Tensor TensorParallel::grad(size_t index) {
    const TpParam& what = param(index);
    if (!is_floating(what.dtype)) {
        throw Error(Code::invalid_state, fmt::format("parameter \"{}\" is {}; only floating-point parameters have a "
                                                     "gradient",
                                                     what.name, name_of(what.dtype)));
    }
    if (!grads_) {
        grads_ = api().allocate_zeroed(size_);
    }
    return {grads_.get() + at_[index], shapes_[index], what.dtype, device_};
}

// --- ranks

int TensorParallel::place_of(int rank) const {
    const MeshShape& all = mesh_.all();
    int place = 0;
    for (const int dim : mesh_.dims_of(0)) place = place * all.size(dim) + all.coordinate(rank, dim);
    return place;
}

int TensorParallel::data_rank_of(int rank) const {
    const MeshShape& all = mesh_.all();
    const std::span<const int> own = mesh_.dims_of(0);
    int data_rank = 0;
    for (int dim = 0; dim < all.ndim(); ++dim) {
        if (std::ranges::find(own, dim) != own.end()) continue;
        data_rank = data_rank * all.size(dim) + all.coordinate(rank, dim);
    }
    return data_rank;
}

void TensorParallel::check_data_ranks(const Communicator& data) const {
    const int own = data_rank_of(mesh_.rank_of_all());
    const int count = mesh_.all().rank_count() / comm()->world_size();
    if (data.world_size() == count && data.rank() == own) return;
    throw Error(
        Code::invalid_argument,
        fmt::format("the communicator '{}', in which this is rank {} of {}, is not that of the {} ranks which hold "
                    "the same slices (this is number {} of them): pass the communicator of the other dimension of "
                    "mesh ({}), or of its other dimensions flattened",
                    data.name(), data.rank(), data.world_size(), count, own, mesh_.all().str()));
}

size_t TensorParallel::find(const std::string& name) const {
    const auto found = std::ranges::find(plan_, name, &TpParam::name);
    if (found != plan_.end()) return static_cast<size_t>(found - plan_.begin());
    throw Error(Code::invalid_argument, fmt::format("parameter \"{}\" is not one of the tensor-parallel model", name));
}

size_t TensorParallel::find_slice(const NamedTensor& slice) const {
    const size_t index = find(slice.name);
    if (slice.tensor.shape == shapes_[index] && slice.tensor.dtype == plan_[index].dtype) return index;
    throw Error(Code::invalid_argument, fmt::format("parameter \"{}\" is {} {}; this rank's slice of it is {} {}",
                                                    slice.name, name_of(slice.tensor.dtype), slice.tensor.shape.str(),
                                                    name_of(plan_[index].dtype), shapes_[index].str()));
}

Held TensorParallel::held(size_t index) const {
    const TpParam& what = param(index);
    const int replica = what.replica(comm()->rank());
    const std::span<const int> dims = mesh_.dims_of(0);
    if (what.layout || (what.cut >= 0 && dims.size() > 1)) {
        const auto whole_slice = [&](int place, int) { return std::vector{Box::whole(what.slice_shape(place))}; };
        return {layout_of(index, whole_slice), mesh_.rank_of_all(), replica};
    }
    std::vector<int> sizes;
    std::vector<Placement> placements;
    for (int dim = 0; dim < mesh_.all().ndim(); ++dim) {
        sizes.push_back(mesh_.all().size(dim));
        placements.push_back(what.cut >= 0 && dim == dims[0] ? Placement::shard(what.cut) : Placement::replicate());
    }
    return {Layout::placed(what.shape, sizes, placements), mesh_.rank_of_all(), replica};
}

Held TensorParallel::held_within(size_t index, int data_replica, PartsOf parts_of) const {
    const int replica = param(index).replica(comm()->rank());
    return {layout_of(index, parts_of), mesh_.rank_of_all(), replica == 0 && data_replica == 0 ? 0 : 1};
}

Layout TensorParallel::layout_of(size_t index, PartsOf parts_of) const {
    const TpParam& what = plan_[index];
    std::vector<Box> boxes;
    std::vector<int> counts;
    for (int rank = 0; rank < mesh_.all().rank_count(); ++rank) {
        const int place = place_of(rank);
        const size_t before = boxes.size();
        for (const Box& part : parts_of(place, data_rank_of(rank))) what.append_whole(boxes, place, part);
        counts.push_back(static_cast<int>(boxes.size() - before));
    }
    return Layout::from_boxes(what.shape, boxes, counts);
}

// --- values

void TensorParallel::cut_own(std::span<const NamedTensor> params) {
    for (size_t i = 0; i < plan_.size(); ++i) {
        if (params[i].tensor.data == nullptr) continue;
        cut_slice(api(), plan_[i], comm()->rank(), params[i].tensor.data, slices_.get() + at_[i]);
    }
}

// Sends the slices of rank 0's values, many small ones together.
void TensorParallel::scatter(std::span<const NamedTensor> params) {
    std::vector<uint8_t> given;
    for (const NamedTensor& param : params) given.push_back(param.tensor.data != nullptr ? 1 : 0);
    const Tensor flags = tensor_of(std::span(given), DType::u8);
    comm()->run({.collective = Collective::broadcast,
                 .inputs = {},
                 .outputs = {&flags, 1},
                 .peer = 0,
                 .label = "which parameters have values"});
    std::vector<size_t> some;
    size_t size = 0;
    const auto flush = [&] {
        if (!some.empty()) scatter_some(params, some);
        some.clear();
        size = 0;
    };
    for (size_t i = 0; i < plan_.size(); ++i) {
        if (given[i] == 0) continue;
        const size_t more = slice_size(i, 0);
        if (size + more > values_at_once) flush();
        some.push_back(i);
        size += more;
    }
    flush();
}

void TensorParallel::scatter_some(std::span<const NamedTensor> params, std::span<const size_t> which) {
    Communicator& comm = *this->comm();
    // Every rank's slices have as much room as the largest.
    size_t room = 0;
    for (int rank = 0; rank < comm.world_size(); ++rank) {
        size_t size = 0;
        for (const size_t i : which) size += slice_size(i, rank);
        room = std::max(room, size);
    }
    if (room == 0) return;
    const auto ranks = static_cast<size_t>(comm.world_size());
    const bool is_root = comm.rank() == 0;
    const std::shared_ptr<std::byte> own = api().allocate(room);
    const std::shared_ptr<std::byte> all = is_root ? api().allocate(room * ranks) : nullptr;
    for (size_t rank = 0; is_root && rank < ranks; ++rank) {
        std::byte* to = all.get() + rank * room;
        for (const size_t i : which) {
            cut_slice(api(), plan_[i], static_cast<int>(rank), params[i].tensor.data, to);
            to += slice_size(i, static_cast<int>(rank));
        }
    }
    const Tensor output{own.get(), Dims{static_cast<int64_t>(room)}, DType::u8, device_};
    const Tensor input{all.get(), Dims{static_cast<int64_t>(room * ranks)}, DType::u8, device_};
    comm.run({.collective = Collective::scatter,
              .inputs = is_root ? std::span(&input, 1) : std::span<const Tensor>{},
              .outputs = {&output, 1},
              .peer = 0,
              .label = "values of rank 0"});
    const std::byte* from = own.get();
    for (const size_t i : which) {
        const size_t size = slice_size(i, comm.rank());
        api().copy(slices_.get() + at_[i], from, size, nullptr);
        from += size;
    }
    api().record(nullptr)->wait(Deadline::in(comm.options().timeout));
}

void TensorParallel::set_stream(StreamHandle stream) {
    api().check_stream(stream);
    api().wait(stream, *api().record(stream_));
    stream_ = stream;
}

// --- activations

void TensorParallel::enter(const Tensor& in, const Tensor& out, int dim, StreamHandle stream, WorkPtr* work) {
    if (dim >= 0) return gather(in, out, dim, stream, work);
    const Reentry once = enter_call();
    moves().check_same(in, out);
    moves().check_places(std::array{in, out}, stream);
    queue_.run([=](TpMoves& moves, StreamHandle on) { moves.copy(in, out, on); }, stream, in.device, work);
}

void TensorParallel::enter_backward(const Tensor& grad, const Tensor& out, int dim, StreamHandle stream,
                                    WorkPtr* work) {
    leave(grad, out, dim, nullptr, stream, work);
}

void TensorParallel::leave(const Tensor& in, const Tensor& out, int dim, const Tensor* bias, StreamHandle stream,
                           WorkPtr* work) {
    const Reentry once = enter_call();
    if (dim >= 0) {
        moves().check_part(in, out, TpMoves::Part::out, dim);
    } else {
        moves().check_same(in, out);
    }
    moves().check_places(std::array{in, out, bias == nullptr ? out : *bias}, stream);
    if (bias != nullptr) check_bias(out, *bias);
    const std::optional<Tensor> added = bias == nullptr ? std::nullopt : std::optional(*bias);
    const auto body = [=](TpMoves& moves, StreamHandle on) {
        if (dim >= 0) {
            moves.sum_scatter(in, out, dim, on);
        } else {
            moves.sum(in, out, on);
        }
        if (added) add_to_rows(out, *added, on);
    };
    queue_.run(body, stream, in.device, work);
}

void TensorParallel::leave_backward(const Tensor& grad, const Tensor& out, int dim, StreamHandle stream,
                                    WorkPtr* work) {
    enter(grad, out, dim, stream, work);
}

void TensorParallel::gather(const Tensor& in, const Tensor& out, int dim, StreamHandle stream, WorkPtr* work) {
    const Reentry once = enter_call();
    moves().check_part(in, out, TpMoves::Part::in, dim);
    moves().check_places(std::array{in, out}, stream);
    queue_.run([=](TpMoves& moves, StreamHandle on) { moves.gather(in, out, dim, on); }, stream, in.device, work);
}

void TensorParallel::split(const Tensor& in, const Tensor& out, int dim, StreamHandle stream) const {
    moves().check_places(std::array{in, out}, stream);
    moves().split(in, out, dim, stream);
}

// --- gradients

void TensorParallel::sum_grads(WorkPtr* work) {
    const Reentry once = enter_call();
    std::vector<Tensor> grads;
    for (size_t i = 0; i < plan_.size(); ++i) {
        if (has_grad_in_parts(i)) grads.push_back(grad(i));
    }
    const auto body = [grads = std::move(grads)](TpMoves& moves, StreamHandle on) {
        sum_over_ranks(*moves.comm(), grads, on);
    };
    queue_.run(body, stream_, device_, work);
    summing_ = work == nullptr || device_.type != DeviceType::cpu ? nullptr : *work;
    ++sums_;
}

std::shared_ptr<GradParts> TensorParallel::grad_parts(std::span<const size_t> of) {
    std::vector<bool> sums;
    for (const size_t index : of) sums.push_back(has_grad_in_parts(index));
    if (std::ranges::find(sums, true) == sums.end()) return nullptr;
    CommOptions options = inner_options(*comm(), "/parts of gradients");
    options.bound = true;
    return std::make_shared<GradParts>(comm()->split(0, comm()->rank(), options), std::move(sums));
}

void TensorParallel::check_idle(const char* what) const {
    if (!summing_ || summing_->done()) return;
    throw Error(Code::invalid_state,
                fmt::format("rank {}: {} while gradients are being summed; wait for the work of the sum first",
                            comm()->rank(), what))
        .with_rank(comm()->rank());
}

void TensorParallel::check_reduced_after(int64_t steps) const {
    check_idle("the optimizer cannot step");
    if (sums_ > steps) return;
    const auto part = std::ranges::find_if(plan_, &TpParam::sums_grad);
    if (part == plan_.end()) return;
    throw Error(
        Code::invalid_state,
        fmt::format("rank {}: each rank has a part of the gradient of \"{}\" ({}), and the parts were not summed since "
                    "the last step; call sum_grads before you clip or step",
                    comm()->rank(), part->name, name_of(part->style)))
        .with_rank(comm()->rank());
}

void TensorParallel::zero_grad() {
    check_idle("gradients cannot be set to zero");
    if (grads_) api().zero(grads_.get(), size_, stream_);
}

}  // namespace tsr
