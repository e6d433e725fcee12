#include "comm/host_ranks.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>

#include "base/round_up.hpp"
#include "comm/host.hpp"
#include "comm/inner_options.hpp"

namespace tsr {

namespace {

bool shares_all(const Communicator& comm) { return comm.transport() == "shm" || comm.transport() == "self"; }

// Compares the host ids of all ranks.
std::vector<int> first_ranks(Communicator& comm) {
    const auto world = static_cast<size_t>(comm.world_size());
    std::vector<int> firsts(world);  // all of rank 0
    if (shares_all(comm)) return firsts;
    std::iota(firsts.begin(), firsts.end(), 0);
    if (comm.transport() != "hierarchical") return firsts;
    constexpr std::string_view label = "hosts of the ranks";
    const std::string own = host_id(comm.options().host_id);
    std::array<int64_t, 1> longest{static_cast<int64_t>(own.size())};
    const Tensor length = tensor_of(std::span<int64_t>(longest), DType::i64);
    comm.run({.collective = Collective::all_reduce, .outputs = {&length, 1}, .op = ReduceOp::max, .label = label});
    const size_t each =
        static_cast<size_t>(longest[0]) + 1;  // with a terminating zero, so that no id is a prefix of another
    std::vector<uint8_t> mine(each);
    std::vector<uint8_t> all(each * world);
    std::copy(own.begin(), own.end(), mine.begin());
    const Tensor input = tensor_of(std::span(mine), DType::u8);
    const Tensor output = tensor_of(std::span(all), DType::u8);
    comm.run({.collective = Collective::all_gather, .inputs = {&input, 1}, .outputs = {&output, 1}, .label = label});
    const auto name_of_host = [&](size_t r) {
        return std::string_view(reinterpret_cast<const char*>(all.data()) + r * each, each);
    };
    for (size_t r = 0; r < world; ++r) {
        size_t first = 0;
        while (name_of_host(first) != name_of_host(r)) ++first;
        firsts[r] = static_cast<int>(first);
    }
    return firsts;
}

std::vector<int> of_host(const std::vector<int>& firsts, int first) {
    std::vector<int> ranks;
    for (size_t r = 0; r < firsts.size(); ++r) {
        if (firsts[r] == first) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
}

std::shared_ptr<Communicator> communicator_of(int first, const std::shared_ptr<Communicator>& comm) {
    if (shares_all(*comm)) return comm;
    CommOptions options = inner_options(*comm, "/host");
    options.backend = "auto";
    return comm->split(first, comm->rank(), options);
}

}  // namespace

HostRanks::HostRanks(const std::shared_ptr<Communicator>& comm)
    : comm_(comm),
      firsts_(first_ranks(*comm)),
      ranks_(of_host(firsts_, firsts_[static_cast<size_t>(comm->rank())])),
      host_(communicator_of(ranks_.front(), comm)) {}

void HostRanks::run(const Request& request) {
    try {
        host_->run(request);
    } catch (const Error& error) {
        throw told(error);
    }
}

std::shared_ptr<std::byte> HostRanks::allocate(size_t size) {
    // Each rank contributes whole pages, and the parts are adjacent: together they form one range, of which each rank
    // touches its own share first.
    constexpr size_t page = 4096;
    const auto places = static_cast<size_t>(this->places());
    const size_t share = std::max(page, round_up((size + places - 1) / places, page));
    std::shared_ptr<Buffer> buffer = host_->allocate(share);
    std::byte* const first = buffer->of_rank(0) != nullptr ? buffer->of_rank(0) : buffer->data();
    if (places > 1 && buffer->of_rank(1) != first + share) {
        throw Error(Code::internal, "the parts of a shared allocation are not adjacent");
    }
    return {std::move(buffer), first};
}

Error HostRanks::told(const Error& error) const {
    if (is_alone()) return error;
    std::string names;
    for (size_t place = 0; place < ranks_.size(); ++place) {
        names += fmt::format("{}{} is rank {}", place == 0 ? "" : ", ", place, ranks_[place]);
    }
    const Error told = Error(error.code(), fmt::format("rank {}: between the ranks of its host ({}): {}", comm_->rank(),
                                                       names, error.what()))
                           .with_rank(comm_->rank());
    const auto peer = static_cast<size_t>(error.record()->peer);  // -1 is beyond all
    return peer < ranks_.size() ? told.with_peer(ranks_[peer]).with_launcher_peer(error.record()->launcher_peer) : told;
}

}  // namespace tsr
