// Regions that are entered and left one rank's part after the other, so that the trainer multiplies one part while the
// next ones are on their way. The parts move as jobs of the communicator, in the order of ranks on every rank: an
// all-gather as a broadcast of each part, a reduce-scatter as a reduction of each to its rank. On a device they move on the
// model's own stream, and events order it with the trainer's, on which the parts are multiplied; the host waits for neither.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/attempt.hpp"
#include "base/error.hpp"
#include "parallel/tensor/cut.hpp"
#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr {

namespace {

// The parts of an activation, one per rank.
class Parts {
   public:
    Parts(const Tensor& whole, int dim, int ranks) : whole_(whole), dim_(dim), cut_(whole, dim, ranks) {}

    [[nodiscard]] int count() const { return static_cast<int>(cut_.ranks); }
    [[nodiscard]] bool in_place() const { return cut_.is_outermost(); }
    [[nodiscard]] size_t largest_bytes() const { return cut_.part_size(); }
    [[nodiscard]] std::byte* begin(std::byte* whole, int place) const {
        return cut_.in(whole, static_cast<size_t>(place)).data;
    }
    [[nodiscard]] int64_t first(int place) const { return cut_.range(static_cast<size_t>(place)).begin; }
    [[nodiscard]] Tensor part(int place, std::byte* memory) const {
        Tensor part{memory, whole_.shape, whole_.dtype, whole_.device};
        const Range range = cut_.range(static_cast<size_t>(place));
        part.shape[dim_] = range.end - range.begin;
        return part;
    }

   private:
    Tensor whole_;
    int dim_;
    Cut cut_;
};

// Waits for all, since their memory is the caller's; an aborted communicator ends them at once.
void settle(Communicator& comm, const std::vector<WorkPtr>& works) {
    for (const WorkPtr& work : works) {
        while (work && !work->done()) {
            const auto failed = attempt([&] { work->wait(Deadline::in(no_timeout)); });
            if (failed && !work->done()) comm.abort(failed->what());  // interrupted
        }
    }
}

constexpr int buffers = 2;  // of leave_parts: one is computed while the other is reduced

std::string computed_none(const Communicator& comm, const Error& why) {
    return fmt::format("rank {} computed no part of an activation: {}", comm.rank(), why.what());
}

}  // namespace

std::byte* TensorParallel::part_memory(size_t size) {
    if (!parts_ || parts_size_ < size) {
        parts_.reset();
        parts_ = cpu_device().allocate(size);
        parts_size_ = size;
    }
    return parts_.get();
}

void TensorParallel::enter_parts(const Tensor& in, const Tensor& out, int dim, StreamHandle stream, PartFn compute) {
    const Reentry once = enter_call();
    moves().check_part(in, out, TpMoves::Part::in, dim);
    moves().check_places(std::array{in, out}, stream);
    if (in.device.type != DeviceType::cpu) [[unlikely]]
        return enter_parts_on_device(in, out, dim, stream, compute);
    const Parts parts(out, dim, comm()->world_size());
    std::vector<WorkPtr> works(static_cast<size_t>(parts.count()));
    std::byte* const packed = parts.in_place() ? nullptr : part_memory(works.size() * parts.largest_bytes());
    const auto memory = [=](int place) {
        return parts.in_place() ? parts.begin(out.data, place)
                                : packed + static_cast<size_t>(place) * parts.largest_bytes();
    };
    for (int place = 0; place < parts.count(); ++place) {
        const Tensor part = parts.part(place, memory(place));
        if (part.numel() == 0) continue;
        queue_.run([=](TpMoves& moves, StreamHandle on) { moves.share_part(in, part, out, dim, place, on); }, stream,
                   in.device, &works[static_cast<size_t>(place)]);
    }
    const auto failed = attempt([&] {
        for (int place = 0; place < parts.count(); ++place) {
            const WorkPtr& work = works[static_cast<size_t>(place)];
            if (!work) continue;
            work->wait(Deadline::in(no_timeout));
            compute(place, parts.first(place), parts.part(place, memory(place)));
        }
    });
    settle(*comm(), works);
    if (failed) throw Error(*failed);
}

void TensorParallel::leave_parts(const Tensor& out, int64_t size, int dim, const Tensor* bias, StreamHandle stream,
                                 PartFn compute) {
    const Reentry once = enter_call();
    Tensor whole = out;
    if (dim < 0 || dim >= out.shape.ndim()) {
        throw Error(Code::invalid_argument, fmt::format("there is no dimension {} in {}", dim, out.shape.str()));
    }
    whole.shape[dim] = size;
    check_shape(whole.shape, whole.dtype, "the activation");
    moves().check_part(whole, out, TpMoves::Part::out, dim);
    moves().check_places(std::array{out, bias == nullptr ? out : *bias}, stream);
    if (bias != nullptr) check_bias(out, *bias);
    if (out.device.type != DeviceType::cpu) [[unlikely]]
        return leave_parts_on_device(whole, out, dim, bias, stream, compute);
    const Parts parts(whole, dim, comm()->world_size());
    std::byte* const memory = part_memory(buffers * parts.largest_bytes());
    std::vector<WorkPtr> works(static_cast<size_t>(parts.count()));
    const auto failed = attempt([&] {
        for (int place = 0; place < parts.count(); ++place) {
            const Tensor part =
                parts.part(place, memory + static_cast<size_t>(place % buffers) * parts.largest_bytes());
            if (part.numel() == 0) continue;
            if (place >= buffers && works[static_cast<size_t>(place - buffers)]) {
                works[static_cast<size_t>(place - buffers)]->wait(Deadline::in(no_timeout));
            }
            compute(place, parts.first(place), part);
            queue_.run([=](TpMoves& moves, StreamHandle on) { moves.sum_part(part, out, place, on); }, stream,
                       out.device, &works[static_cast<size_t>(place)]);
        }
        for (const WorkPtr& work : works) {
            if (work) work->wait(Deadline::in(no_timeout));
        }
        if (bias != nullptr) add_to_rows(out, *bias, stream);
    });
    if (failed) comm()->abort(computed_none(*comm(), *failed));
    settle(*comm(), works);
    if (failed) throw Error(*failed);
}

// All parts are on their way before the first is computed with.
void TensorParallel::enter_parts_on_device(const Tensor& in, const Tensor& out, int dim, StreamHandle stream,
                                           PartFn compute) {
    const Parts parts(out, dim, comm()->world_size());
    std::optional<Error> failed;
    queue_.run_on_device(in.device, [&](TpMoves& moves, TpStreams& streams) {
        const StreamHandle own = streams.own();
        streams.order(own, stream);
        streams.begin(own);
        const Dims packed{static_cast<int64_t>(static_cast<size_t>(parts.count()) * parts.largest_bytes())};
        std::byte* const memory = parts.in_place() ? nullptr : moves.temporary(packed, DType::u8, in.device, own).data;
        std::vector<Tensor> all;
        std::vector<std::unique_ptr<DeviceEvent>> here;
        for (int place = 0; place < parts.count(); ++place) {
            all.push_back(parts.part(place, parts.in_place()
                                                ? parts.begin(out.data, place)
                                                : memory + static_cast<size_t>(place) * parts.largest_bytes()));
            if (all.back().numel() > 0) moves.share_part(in, all.back(), out, dim, place, own);
            here.push_back(streams.api().record(own));
        }
        failed = attempt([&] {
            for (int place = 0; place < parts.count(); ++place) {
                const auto number = static_cast<size_t>(place);
                if (all[number].numel() == 0) continue;
                streams.api().wait(stream, *here[number]);
                compute(place, parts.first(place), all[number]);
            }
        });
        streams.order(stream, own);
        streams.end(stream);
    });
    if (failed) throw Error(*failed);
}

void TensorParallel::leave_parts_on_device(const Tensor& whole, const Tensor& out, int dim, const Tensor* bias,
                                           StreamHandle stream, PartFn compute) {
    const Parts parts(whole, dim, comm()->world_size());
    std::optional<Error> failed;
    queue_.run_on_device(out.device, [&](TpMoves& moves, TpStreams& streams) {
        const StreamHandle own = streams.own();
        streams.begin(stream);
        const Dims packed{static_cast<int64_t>(buffers * parts.largest_bytes())};
        std::byte* const memory = moves.temporary(packed, DType::u8, out.device, stream).data;
        std::vector<std::unique_ptr<DeviceEvent>> reduced(static_cast<size_t>(parts.count()));
        for (int place = 0; place < parts.count() && !failed; ++place) {
            const auto number = static_cast<size_t>(place);
            const Tensor part = parts.part(place, memory + number % buffers * parts.largest_bytes());
            if (part.numel() == 0) continue;
            if (place >= buffers && reduced[number - buffers]) streams.api().wait(stream, *reduced[number - buffers]);
            failed = attempt([&] { compute(place, parts.first(place), part); });
            if (failed) continue;
            streams.order(own, stream);
            moves.sum_part(part, out, place, own);
            reduced[number] = streams.api().record(own);
        }
        streams.order(stream, own);
        if (bias != nullptr && !failed) add_to_rows(out, *bias, stream);
        streams.end(stream);
    });
    if (!failed) return;
    comm()->abort(computed_none(*comm(), *failed));
    throw Error(*failed);
}

}  // namespace tsr
