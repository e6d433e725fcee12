#include "parallel/fsdp/device_units.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.hpp"
#include "base/round_up.hpp"
#include "device/convert.hpp"
#include "parallel/placement.hpp"

namespace tsr {

namespace {

constexpr milliseconds after_abort{10000};

class DeviceBuffer final : public Buffer {
   public:
    DeviceBuffer(std::shared_ptr<std::byte> memory, size_t size) : memory_(std::move(memory)), size_(size) {}
    [[nodiscard]] std::byte* data() const override { return memory_.get(); }
    [[nodiscard]] size_t size() const override { return size_; }

   private:
    const std::shared_ptr<std::byte> memory_;
    const size_t size_;
};

}  // namespace

void DeviceUnits::Lanes::each(FunctionRef<void(DeviceLane&)> use) {
    for (DeviceLane* lane : {&gathers, &scatters, &replicas}) {
        if (lane->is_open()) use(*lane);
    }
    for (auto& [parts, lane] : keepers) use(lane);
}

void DeviceUnits::Lanes::abort(const std::string& reason) {
    each([&](DeviceLane& lane) { lane.comm().abort(reason); });
    hosts->abort(reason);
}

Error DeviceUnits::Lanes::cause_of(const Error& error) {
    if (error.code() != Code::aborted) return error;
    std::optional<Error> cause = hosts->error();
    each([&](DeviceLane& lane) {
        if (!cause || cause->code() == Code::aborted) cause = lane.comm().error();
    });
    return cause && cause->code() != Code::aborted ? *cause : error;
}

DeviceUnits::DeviceUnits(std::shared_ptr<const FsdpPlan> plan, Device device, ShardMemory shards)
    : plan_(std::move(plan)), device_(device), api_(device_api(device)), shards_(std::move(shards)) {
    size_t largest = 0;  // of the slots that a unit may be shown in: the driver shows all of a slot's pages
    for (const UnitPlan& unit : plan_->units) largest = std::max(largest, unit.whole_size);
    for (size_t i = 0; i < plan_->units.size(); ++i) units_.push_back({.range = api_.reserve(largest)});
}

void DeviceUnits::connect(Communicator& comm, int group, int place, const ScatterOptions& options,
                          std::shared_ptr<GradParts> /*parts: of the CPU alone*/) {
    lanes_ = std::make_unique<Lanes>();
    lanes_->hosts = own_communicator(comm, "order", 0, Reach::cpu);
    lanes_->gathers.open(own_communicator(comm, "parameters", group, Reach::all), api_);
    lanes_->scatters.open(own_communicator(comm, "gradients", group, Reach::all), api_);
    for (size_t unit = 0; unit < units_.size(); ++unit) lanes_->gathers.reserve(room_for(unit, plan_->ranks));
    if (plan_->ranks < comm.world_size()) {
        lanes_->replicas.open(own_communicator(comm, "replicas", place, Reach::all), api_);
    }
    scatter_.emplace(plan_, device_, options, shards_.grads.get(), lanes_->scatters, lanes_->replicas);
}

Deadline DeviceUnits::deadline() const { return Deadline::in(lanes_->hosts->options().timeout + after_timeout); }

template <class Body>
auto DeviceUnits::together(Body&& body) {
    try {
        return body();
    } catch (...) {
        Error error = current_error();
        if (error.code() == Code::interrupted) throw;
        error = lanes_->cause_of(error);
        lanes_->abort(error.what());
        throw error;
    }
}

WorkPtr DeviceUnits::submit_job(std::function<void()> job) {
    last_job_ = lanes_->hosts->submit_job(std::move(job));
    return last_job_;
}

void DeviceUnits::await(const Work& work, Deadline deadline) {
    together([&] { work.order(stream_, deadline); });
}

// --- unsharded parameters

// The driver does not wait for the device when it maps other pages, so this does. A unit stays in its slot as long as the order
// of the calls leaves it free.
void DeviceUnits::move_to(Unit& unit, SlotId slot) {
    if (unit.slot == slot.number) return;
    if (unit.released) unit.released->wait(deadline());
    slots_.resize(std::max(slots_.size(), slot.number + 1));
    std::shared_ptr<void>& pages = slots_[slot.number];
    if (!pages) pages = api_.allocate_pages(slot.size);
    unit.range->show(pages);
    unit.slot = slot.number;
}

Tensor DeviceUnits::bytes(std::byte* data, size_t size) const {
    return {data, Dims{static_cast<int64_t>(size)}, DType::u8, device_};
}

size_t DeviceUnits::part_size(const FsdpPiece& piece, int parts) const {
    return static_cast<size_t>(piece.chunk) * static_cast<size_t>(plan_->ranks / parts) * size_of(piece.whole_dtype);
}

// For gather_together().
size_t DeviceUnits::room_for(size_t unit, int parts) const {
    size_t size = 0;
    for (const FsdpPiece& piece : plan_->units[unit].pieces) size += round_up(part_size(piece, parts), fsdp_alignment);
    return plan_->units[unit].pieces.size() > 1 && parts > 1 ? size * static_cast<size_t>(parts) : 0;
}

std::vector<DeviceUnits::Moved> DeviceUnits::moved(size_t unit, From from) const {
    const Unit& one = units_[unit];
    const bool is_kept = from == From::kept;
    std::vector<Moved> all;
    std::byte* kept = one.kept.memory.get();
    for (const FsdpPiece& piece : plan_->units[unit].pieces) {
        const size_t size = part_size(piece, is_kept ? one.kept.parts : plan_->ranks);
        if (size == 0) continue;
        std::byte* const part = is_kept ? std::exchange(kept, kept + size) : shards_.params.get() + piece.shard_at;
        all.push_back(
            {&piece, part, one.range->data() + piece.whole_at, size, !is_kept && piece.dtype != piece.whole_dtype});
    }
    return all;
}

WorkPtr DeviceUnits::gather(size_t unit, From from) {
    const std::vector<Moved> pieces = moved(unit, from);
    if (pieces.empty()) return nullptr;
    DeviceLane& lane = from == From::kept ? lanes_->keepers.at(units_[unit].kept.parts) : lanes_->gathers;
    lane.follow(stream_);
    const bool is_direct = pieces.size() == 1 || lane.comm().world_size() == 1;
    return is_direct ? gather_directly(pieces, lane) : gather_together(pieces, lane);
}

// What needs a conversion is converted into its place in the unit, and gathered from there.
WorkPtr DeviceUnits::gather_directly(std::span<const Moved> pieces, DeviceLane& lane) {
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;
    Conversions conversions;
    for (const Moved& one : pieces) {
        std::byte* part = one.part;
        if (one.converts) {
            part = one.whole + static_cast<size_t>(lane.comm().rank()) * one.size;
            conversions[{one.piece->dtype, one.piece->whole_dtype}].push_back(
                {one.part, part, static_cast<size_t>(one.piece->chunk)});
        }
        inputs.push_back(bytes(part, one.size));
        outputs.push_back(bytes(one.whole, one.size * static_cast<size_t>(lane.comm().world_size())));
    }
    convert_on(api_, conversions, lane.stream());
    return lane.run(
        {.collective = Collective::all_gather, .inputs = inputs, .outputs = outputs, .label = "parameters of a unit"});
}

WorkPtr DeviceUnits::gather_together(std::span<const Moved> pieces, DeviceLane& lane) {
    const auto ranks = static_cast<size_t>(lane.comm().world_size());
    std::vector<size_t> places;  // in a rank's part
    size_t size = 0;
    for (const Moved& one : pieces) {
        places.push_back(size);
        size += round_up(one.size, fsdp_alignment);
    }
    std::byte* const all = lane.room();
    std::byte* const own = all + static_cast<size_t>(lane.comm().rank()) * size;
    Conversions conversions;
    for (size_t i = 0; i < pieces.size(); ++i) {
        const Moved& one = pieces[i];
        if (one.converts) {
            conversions[{one.piece->dtype, one.piece->whole_dtype}].push_back(
                {one.part, own + places[i], static_cast<size_t>(one.piece->chunk)});
        } else {
            api_.copy(own + places[i], one.part, one.size, lane.stream());
        }
    }
    convert_on(api_, conversions, lane.stream());
    const Tensor input = bytes(own, size);
    const Tensor output = bytes(all, size * ranks);
    (void)lane.run({.collective = Collective::all_gather,
                    .inputs = {&input, 1},
                    .outputs = {&output, 1},
                    .label = "parameters of a unit"});
    for (size_t i = 0; i < pieces.size(); ++i) {
        const Moved& one = pieces[i];
        api_.copy_rows({one.whole, one.size}, {all + places[i], size}, ranks, one.size, lane.stream());
    }
    return lane.point();
}

// In the background. Once it is done, all ranks have launched the same.
WorkPtr DeviceUnits::compare(size_t unit, SlotId slot) {
    return submit_job([lanes = lanes_.get(), plan = plan_, unit, number = slot.number] {
        try {
            Communicator& hosts = *lanes->hosts;
            std::array<int64_t, 2> own{static_cast<int64_t>(unit), static_cast<int64_t>(number)};
            std::vector<int64_t> all(own.size() * static_cast<size_t>(hosts.world_size()));
            const Tensor input = tensor_of(std::span<int64_t>(own), DType::i64);
            const Tensor output = tensor_of(std::span<int64_t>(all), DType::i64);
            hosts.run({.collective = Collective::all_gather,
                       .inputs = {&input, 1},
                       .outputs = {&output, 1},
                       .label = "next unit to unshard"});
            for (int rank = 0; rank < hosts.world_size(); ++rank) {
                const int64_t* const theirs = &all[own.size() * static_cast<size_t>(rank)];
                if (theirs[0] == own[0] && theirs[1] == own[1]) continue;
                throw unshards_another(*plan, hosts.rank(), unit, rank, static_cast<size_t>(theirs[0]));
            }
        } catch (const Error& error) {
            lanes->each([&](DeviceLane& lane) {
                lane.comm().abort(error.what());  // they would wait for each other for ever
            });
            throw;
        }
    });
}

WorkPtr DeviceUnits::unshard(size_t unit, SlotId slot, From from) {
    return together([&] {
        move_to(units_[unit], slot);
        units_[unit].gather = gather(unit, from);
        return compare(unit, slot);
    });
}

void DeviceUnits::show(size_t unit, SlotId /*slot*/) {
    if (const WorkPtr gather = std::exchange(units_[unit].gather, nullptr)) await(*gather, deadline());
}

void DeviceUnits::hide(size_t unit) {
    together([&] { units_[unit].released = api_.record(stream_); });
}

int DeviceUnits::prepare_to_keep(size_t unit, int ranks) {
    if (ranks >= plan_->ranks) return 0;
    units_[unit].kept.parts = ranks;
    DeviceLane& keepers = lanes_->keepers[ranks];
    Communicator& group = lanes_->gathers.comm();
    if (!keepers.is_open()) {
        keepers.open(own_communicator(group, fmt::format("{}_keepers", ranks), group.rank() / ranks, Reach::all), api_);
    }
    keepers.reserve(room_for(unit, ranks));
    return ranks;
}

void DeviceUnits::keep(size_t unit, SlotId /*slot*/) {
    together([&] {
        Unit& one = units_[unit];
        Kept& kept = one.kept;
        const std::vector<FsdpPiece>& pieces = plan_->units[unit].pieces;
        if (!kept.memory) {
            size_t size = 0;
            for (const FsdpPiece& piece : pieces) size += part_size(piece, kept.parts);
            kept.memory = api_.allocate(size);
        }
        const auto place = static_cast<size_t>(lanes_->keepers.at(kept.parts).comm().rank());
        std::byte* at = kept.memory.get();
        for (const FsdpPiece& piece : pieces) {
            const size_t size = part_size(piece, kept.parts);
            api_.copy(at, one.range->data() + piece.whole_at + place * size, size, stream_);
            at += size;
        }
    });
}

// --- gradients

// Memory that is replaced is kept for others: to free it would make the host wait for the device. The trainer's stream has
// waited for its last reduction, so whoever gets it comes after that.
WorkPtr DeviceUnits::allocate(const std::shared_ptr<GradMemory>& memory, size_t size) {
    together([&] {
        if (memory->buffer) spare_.push_back(std::move(memory->buffer));
        std::shared_ptr<Buffer>* fit = nullptr;
        for (std::shared_ptr<Buffer>& spare : spare_) {
            if (spare->size() >= size && (fit == nullptr || spare->size() < (*fit)->size())) fit = &spare;
        }
        if (fit == nullptr) {
            memory->buffer = std::make_shared<DeviceBuffer>(api_.allocate(size), size);
        } else {
            memory->buffer = std::move(*fit);
            std::erase(spare_, nullptr);
        }
    });
    return nullptr;
}

WorkPtr DeviceUnits::reduce(size_t unit, const std::shared_ptr<GradMemory>& memory, Into into) {
    return together([&] {
        lanes_->scatters.follow(stream_);
        return scatter_->reduce(unit, memory->buffer->data(), into == Into::old_grads);
    });
}

WorkPtr DeviceUnits::reduce_partly(size_t unit, const std::shared_ptr<GradMemory>& memory) {
    return together([&] {
        lanes_->scatters.follow(stream_);
        return scatter_->reduce_partly(unit, memory->buffer->data());
    });
}

WorkPtr DeviceUnits::share(const std::shared_ptr<std::vector<uint8_t>>& flags) {
    return together([&] {
        return submit_job([lanes = lanes_.get(), flags] {
            const Tensor tensor = tensor_of(std::span(*flags), DType::u8);
            lanes->hosts->run({.collective = Collective::all_reduce,
                               .outputs = {&tensor, 1},
                               .op = ReduceOp::max,
                               .label = "used parameters"});
        });
    });
}

void DeviceUnits::zero(std::byte* data, size_t size) {
    together([&] { api_.zero(data, size, stream_); });
}

void DeviceUnits::require_kernels_for(const char* what) const { tsr::require_kernels_for(what, device_); }

// --- streams, errors, the end

void DeviceUnits::set_stream(StreamHandle stream) {
    api_.check_stream(stream);
    api_.wait(stream, *api_.record(stream_));
    stream_ = stream;
}

void DeviceUnits::check() {
    together([&] {
        lanes_->each([](DeviceLane& lane) {
            if (!lane.last() || !lane.last()->done()) return;
            if (const auto error = lane.last()->error()) throw Error(*error);
        });
    });
}

// Pages must stay where they are as long as the device uses them. One that has failed for good uses nothing more.
void DeviceUnits::end(bool is_idle) noexcept {
    try {
        if (is_idle) {
            try {
                lanes_->each([this](DeviceLane& lane) {
                    if (lane.last()) lane.last()->wait(deadline());
                });
            } catch (...) {
                is_idle = false;
            }
        }
        if (!is_idle) lanes_->abort("the model was destroyed in the middle of a step");
        lanes_->each([](DeviceLane& lane) { lane.drain(Deadline::in(after_abort)); });
        api_.record(stream_)->wait(Deadline::in(after_abort));
    } catch (...) {
        const bool uses_them = current_error().code() != Code::cuda;
        for (Unit& unit : units_) {
            if (uses_them) static_cast<void>(unit.range.release());
        }
    }
    try {
        if (last_job_) wait_until([this] { return last_job_->done(); }, deadline(), "jobs of the model");
    } catch (...) {
        static_cast<void>(lanes_.release());  // NOLINT(bugprone-unused-return-value): the job has it
    }
}

}  // namespace tsr
