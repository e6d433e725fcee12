// Where the shards and their gradients are stored, and the initial values of the shards.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <vector>

#include "parallel/fsdp/device_units.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/fsdp/host_units.hpp"
#include "parallel/shard_memory.hpp"

namespace tsr {

namespace {

constexpr size_t together = size_t{64} << 20;  // bytes of small pieces that are sent together, over all ranks

// Which parameters rank 0 has values for: no rank needs memory for a full parameter that gets its values later.
std::vector<uint8_t> given_by_rank_zero(Communicator& comm, const std::vector<FsdpUnit>& units) {
    std::vector<uint8_t> given;
    for (const FsdpUnit& unit : units) {
        for (const NamedTensor& param : unit.params) given.push_back(param.tensor.data != nullptr ? 1 : 0);
    }
    const Tensor tensor = tensor_of(std::span<uint8_t>(given), DType::u8);
    comm.run({.collective = Collective::broadcast, .outputs = {&tensor, 1}, .peer = 0, .label = "what has values"});
    return given;
}

}  // namespace

// Allocates the shards. All ranks learn whether all succeeded.
void Fsdp::take_memory() {
    std::array<uint8_t, 1> lacks{0};
    try {
        if (device_.type == DeviceType::cpu) {
            shards_ = {allocate_shards(plan_->shard_size, fsdp_alignment),
                       allocate_shards(plan_->shard_grad_size, fsdp_alignment)};
            place_ = std::make_unique<HostUnits>(plan_, shards_);
        } else {
            DeviceApi& api = device_api(device_);
            shards_ = {api.allocate_zeroed(plan_->shard_size), api.allocate_zeroed(plan_->shard_grad_size)};
            place_ = std::make_unique<DeviceUnits>(plan_, device_, shards_);
        }
    } catch (const std::exception&) {
        lacks[0] = 1;
    }
    std::vector<uint8_t> all(static_cast<size_t>(comm_->world_size()));
    const Tensor input = tensor_of(std::span<uint8_t>(lacks), DType::u8);
    const Tensor output = tensor_of(std::span<uint8_t>(all), DType::u8);
    comm_->run({.collective = Collective::all_gather,
                .inputs = {&input, 1},
                .outputs = {&output, 1},
                .label = "memory for shards"});
    const auto found = std::find(all.begin(), all.end(), uint8_t{1});
    if (found == all.end()) return;
    const auto peer = static_cast<int>(found - all.begin());
    throw refusal(Code::no_memory,
                  fmt::format("rank {} does not have enough memory for its shards ({} bytes) and their gradients "
                              "({} bytes); shard the model over more ranks",
                              peer, plan_->shard_size, plan_->shard_grad_size))
        .with_peer(peer);
}

// Each rank keeps its part of rank 0's values, or of its own. Without values, shards are zero.
void Fsdp::take_values(const std::vector<FsdpUnit>& units) {
    const std::vector<uint8_t> given =
        options_.sync_values ? given_by_rank_zero(*comm_, units) : std::vector<uint8_t>{};
    DeviceApi& api = device_api(device_);
    for (size_t u = 0; u < units.size(); ++u) {
        if (options_.sync_values) {
            std::map<size_t, std::vector<size_t>> pieces;  // each with its parameters that have values
            for (size_t i = 0; i < units[u].params.size(); ++i) {
                const size_t p = plan_->units[u].params[i];
                if (given[p] != 0) pieces[param(p).piece].push_back(i);
            }
            // Consecutive small pieces are sent together.
            for (auto piece = pieces.begin(); piece != pieces.end();) {
                Range run{static_cast<int64_t>(piece->first), static_cast<int64_t>(piece->first) + 1};
                std::vector<size_t> params = std::move(piece->second);
                while (++piece != pieces.end() && static_cast<int64_t>(piece->first) == run.end) {
                    if (scattered(u, {run.begin, run.end + 1}) * static_cast<size_t>(comm_->world_size()) > together)
                        break;
                    params.insert(params.end(), piece->second.begin(), piece->second.end());
                    ++run.end;
                }
                scatter_values(units[u], u, run, params);
            }
            continue;
        }
        for (size_t i = 0; i < units[u].params.size(); ++i) {
            const Tensor own = shard(plan_->units[u].params[i]);
            const std::byte* const values = units[u].params[i].tensor.data;
            if (values == nullptr || own.size_bytes() == 0) continue;
            const auto begin = static_cast<size_t>(param(plan_->units[u].params[i]).elements.begin);
            api.copy(own.data, values + begin * size_of(own.dtype), own.size_bytes(), nullptr);
        }
    }
    api.record(nullptr)->wait(Deadline::in(comm_->options().timeout));
}

// Bytes of a rank's shards from the first to the last of these pieces of the unit.
size_t Fsdp::scattered(size_t unit, Range pieces) const {
    const auto& all = plan_->units[unit].pieces;
    const FsdpPiece& last = all[static_cast<size_t>(pieces.end) - 1];
    return last.shard_at + static_cast<size_t>(last.chunk) * size_of(last.dtype) -
           all[static_cast<size_t>(pieces.begin)].shard_at;
}

// Scatters rank 0's values of the pieces that contain these parameters of the unit: to each rank its part, in every
// replica.
void Fsdp::scatter_values(const FsdpUnit& unit, size_t number, Range pieces, const std::vector<size_t>& params) {
    const size_t each = scattered(number, pieces);
    if (each == 0) return;
    const size_t begin = plan_->units[number].pieces[static_cast<size_t>(pieces.begin)].shard_at;
    DeviceApi& api = device_api(device_);
    const bool is_root = comm_->rank() == 0;
    const size_t size_of_all = is_root ? each * static_cast<size_t>(comm_->world_size()) : 0;
    std::shared_ptr<std::byte> all;
    if (is_root) {
        all = api.allocate_zeroed(size_of_all);
        for (const size_t i : params) {
            const FsdpParam& param = this->param(plan_->units[number].params[i]);
            const FsdpPiece& piece = plan_->units[number].pieces[param.piece];
            const size_t size = size_of(piece.dtype);
            for (int r = 0; r < comm_->world_size(); ++r) {
                const int place = r % shard_ranks();
                const Range part = elements_of(*plan_, param, place);
                if (part.begin == part.end) continue;
                api.copy(all.get() + each * static_cast<size_t>(r) + piece.shard_at - begin +
                             place_in_chunk(*plan_, param, place) * size,
                         unit.params[i].tensor.data + static_cast<size_t>(part.begin) * size,
                         static_cast<size_t>(part.end - part.begin) * size, nullptr);
            }
        }
    }
    const Tensor input = tensor_at(all.get(), Dims{static_cast<int64_t>(size_of_all)}, DType::u8);
    const Tensor output = tensor_at(shards_.params.get() + begin, Dims{static_cast<int64_t>(each)}, DType::u8);
    const Request request{.collective = Collective::scatter,
                          .inputs = {&input, is_root ? size_t{1} : size_t{0}},
                          .outputs = {&output, 1},
                          .peer = 0,
                          .label = "parameters"};
    if (device_.type == DeviceType::cpu) return comm_->run(request);
    comm_->submit(request)->wait(Deadline::in(comm_->options().timeout + milliseconds{10000}));
}

}  // namespace tsr
