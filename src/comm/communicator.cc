// How communicators are made: by the ranks of a store, or by splitting one.
#include "comm/communicator.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "base/env.hpp"
#include "base/log.hpp"
#include "comm/backend.hpp"
#include "comm/fingerprint.hpp"
#include "comm/group.hpp"
#include "comm/host.hpp"
#include "comm/inner_options.hpp"
#include "comm/rendezvous.hpp"
#include "comm/transport.hpp"
#include "store/tls.hpp"

namespace tsr {

namespace {

constexpr size_t max_name_size = 128;

// None: the peer reports its own error.
std::optional<Backends> backends_of_peer(const Peer& peer) {
    try {
        return backends_of(peer.backend.data());
    } catch (const Error&) {
        return std::nullopt;
    }
}

// Some two of the ranks are on one host.
bool have_company(const std::vector<Peer>& peers) {
    std::vector<std::string_view> hosts;
    for (const Peer& peer : peers) hosts.emplace_back(peer.host_id.data());
    std::ranges::sort(hosts);
    return std::ranges::adjacent_find(hosts) != hosts.end();
}

// An impossible backend is reported only here, after all ranks have met, so that they all fail together.
std::unique_ptr<Transport> make_transport(Bootstrap bootstrap) {
    const Backends backends = backends_of(bootstrap.options.backend);
    const std::string& backend = backends.cpu;
    for (const Peer& peer : bootstrap.peers) {
        if (backends_of_peer(peer) == backends) continue;
        throw Error(Code::mismatch, fmt::format("rank {} requests backend '{}', rank {} '{}'", bootstrap.rank,
                                                bootstrap.options.backend, peer.rank, peer.backend.data()))
            .with_peer(peer.rank);
    }
    const Peer* elsewhere = nullptr;
    for (const Peer& peer : bootstrap.peers) {
        if (!peer.same_host(bootstrap.self())) elsewhere = &peer;
    }
    if (backend == "shm" && elsewhere != nullptr) {
        throw Error(Code::unsupported,
                    fmt::format("backend shm needs all ranks on one host; rank {} is on '{}', rank {} on "
                                "'{}'. Use auto or gloo",
                                bootstrap.rank, bootstrap.self().host_name.data(), elsewhere->rank,
                                elsewhere->host_name.data()))
            .with_peer(elsewhere->rank);
    }
    // All ranks of a store with TLS have it set: they would not have met otherwise.
    if (elsewhere != nullptr && TlsOptions::from_environment().kind != TlsOptions::Kind::off) {
        throw Error(
            Code::unsupported,
            fmt::format("TESSERA_TLS (`tessera run --encrypt`) asks for encryption, but rank {} is on '{}' and rank "
                        "{} on '{}', and between hosts data would travel unencrypted: {}. Run the job on one host, "
                        "or unset TESSERA_TLS on all ranks if you trust the network between the hosts",
                        bootstrap.rank, bootstrap.self().host_name.data(), elsewhere->rank, elsewhere->host_name.data(),
                        backends.nccl ? "NCCL has no TLS, and Gloo is used without" : "Gloo is used without TLS"))
            .with_peer(elsewhere->rank);
    }
    if (bootstrap.world_size() == 1) return make_self_transport();
    if (backend == "gloo") return make_gloo_transport(std::move(bootstrap));
    if (elsewhere == nullptr) return make_shm_transport(std::move(bootstrap));
    if (have_company(bootstrap.peers)) return make_hierarchical_transport(std::move(bootstrap));
    return make_gloo_transport(std::move(bootstrap));
}

// Whether the communicator has all ranks of the launcher's job, with the launcher's numbers.
bool is_of_whole_job(const Peer& own) {
    return own.launcher_rank == own.rank && env_number("TESSERA_WORLD_SIZE", 1, INT32_MAX) == own.world_size;
}

}  // namespace

void Communicator::begin_turn(int rank) {
    int open = -1;
    if (turn_of_.compare_exchange_strong(open, rank, std::memory_order_relaxed)) return;
    throw Error(
        Code::invalid_state,
        fmt::format("rank {}: a turn of rank {} begins inside the turn of rank {} of communicator '{}'; end that "
                    "one first",
                    this->rank(), rank, open, name()))
        .with_rank(this->rank());
}

Error of_launcher(const Error& error, const std::vector<int>& launcher_ranks) {
    const auto rank = static_cast<size_t>(error.record()->rank);  // -1 is beyond all
    const auto peer = static_cast<size_t>(error.record()->peer);
    const Error result = rank < launcher_ranks.size() ? error.with_launcher_rank(launcher_ranks[rank]) : error;
    return peer < launcher_ranks.size() ? result.with_launcher_peer(launcher_ranks[peer]) : result;
}

void check_timeout(milliseconds timeout) {
    if (timeout.count() > 0) return;
    throw Error(Code::invalid_argument, fmt::format("the timeout is {} ms; it must be positive", timeout.count()));
}

void check_options(const CommOptions& options) {
    check_timeout(options.timeout);
    if (options.heartbeat.count() < 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("the heartbeat timeout is {} ms; it must be positive, or 0 for none",
                                options.heartbeat.count()));
    }
    if (options.backend.size() >= Peer{}.backend.size()) {
        throw Error(Code::invalid_argument, fmt::format("backend name has {} bytes; at most {} are allowed",
                                                        options.backend.size(), Peer{}.backend.size() - 1));
    }
    if (options.name.empty() || options.name.size() > max_name_size) {
        throw Error(Code::invalid_argument, fmt::format("a communicator name must have 1 to {} bytes", max_name_size));
    }
}

std::shared_ptr<Group> make_group(const std::shared_ptr<Store>& store, Bootstrap bootstrap) {
    const HostGroup made = make_host_group(store, std::move(bootstrap));
    if (made.group->has_devices()) made.group->open_device(made.place);
    return made.group;
}

HostGroup make_host_group(const std::shared_ptr<Store>& store, Bootstrap bootstrap) {
    const int rank = bootstrap.rank;
    const int world_size = bootstrap.world_size();
    // Rank 0's random name is unique.
    const std::string id = hex(bootstrap.peers[0].endpoint).substr(0, 8);
    CommOptions options = bootstrap.options;
    const auto before = std::span(bootstrap.peers).first(static_cast<size_t>(rank));
    const auto place_on_host =
        std::ranges::count_if(before, [&](const Peer& peer) { return peer.same_host(bootstrap.self()); });
    std::vector<int> launcher_ranks;
    for (const Peer& peer : bootstrap.peers) launcher_ranks.push_back(static_cast<int>(peer.launcher_rank));
    std::unique_ptr<Transport> transport;
    try {
        transport = make_transport(std::move(bootstrap));
    } catch (...) {
        const Error error = of_launcher(current_error(), launcher_ranks);
        if (options.on_failure) options.on_failure(error.record().get());
        throw error;
    }
    if (options.on_failure) options.on_failure(nullptr);
    return {
        Group::make(rank, world_size, id, std::move(options), store, std::move(transport), std::move(launcher_ranks)),
        static_cast<int>(place_on_host)};
}

// The records of all ranks for a split: `own` is this rank's, `why` its error if it failed.
std::vector<Peer> Group::peers_of_split(const Peer& own, const std::string& why) {
    std::vector<Peer> mine{own};
    std::vector<Peer> all(static_cast<size_t>(world_size_));
    const auto bytes_of = [](std::vector<Peer>& peers) {
        return tensor_of(std::span(reinterpret_cast<uint8_t*>(peers.data()), peers.size() * sizeof(Peer)), DType::u8);
    };
    const Tensor input = bytes_of(mine);
    const Tensor output = bytes_of(all);
    Request request;
    request.collective = Collective::all_gather;
    request.inputs = std::span(&input, 1);
    request.outputs = std::span(&output, 1);
    request.label = "split";
    run(request);
    const auto bad = std::ranges::find_if(all, [](const Peer& peer) { return peer.failed != 0; });
    if (bad == all.end()) return all;
    const auto rank = static_cast<int>(bad - all.begin());
    throw_refusal(*this, "split", rank, static_cast<Code>(bad->failed), bad->why_length, why);
}

void Group::refuse_split(const Error& why) {
    const std::string text = why.what();
    Peer own;
    own.rank = rank_;
    own.failed = static_cast<int32_t>(why.code());
    own.why_length = static_cast<uint32_t>(text.size());
    try {
        static_cast<void>(peers_of_split(own, text));
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): whatever the others say, this is why it ends here
    }
    throw of_launcher(why.with_rank(rank_), launcher_ranks_);
}

CommOptions Group::with_own_place(CommOptions options) const {
    if (options.host_id.empty()) options.host_id = options_.host_id;
    if (options.device < 0 && device_) options.device = device_->device().index;
    return options;
}

std::shared_ptr<Communicator> Group::split(int color, int key, const CommOptions& asked) {
    CommOptions options = with_own_place(asked);
    throw_if_unusable();
    std::optional<Endpoint> endpoint;
    Peer own;
    try {
        check_options(options);
        own = make_peer(rank_, world_size_, options, endpoint.emplace());
    } catch (...) {
        refuse_split(current_error());
    }
    const Deadline deadline = Deadline::in(options.timeout);
    own.color = color;
    own.key = key;
    const std::vector<Peer> all = peers_of_split(own, {});
    const uint64_t number = ++splits_made_;
    const bool for_devices = device_ && std::ranges::any_of(all, [](const Peer& peer) {
                                 const auto backends = backends_of_peer(peer);
                                 return peer.color >= 0 && backends && backends->nccl;
                             });
    if (color < 0) {
        if (for_devices) connect_parts(color, {}, {}, options.timeout);
        return nullptr;
    }
    std::vector<Peer> members;
    std::copy_if(all.begin(), all.end(), std::back_inserter(members), [&](const Peer& p) { return p.color == color; });
    std::stable_sort(members.begin(), members.end(), [](const Peer& a, const Peer& b) { return a.key < b.key; });
    Bootstrap bootstrap{0, {}, std::move(*endpoint), nullptr, options, deadline};
    for (size_t r = 0; r < members.size(); ++r) {
        if (members[r].rank == rank_) bootstrap.rank = static_cast<int>(r);
    }
    // Rank 0's random name makes the keys unique; the number is only for people who inspect the store.
    if (store_) bootstrap.store = prefixed(store_, fmt::format("split/{}/{}/", hex(members[0].endpoint), number));
    std::vector<int> numbers;
    for (const Peer& member : members) numbers.push_back(member.rank);
    for (size_t r = 0; r < members.size(); ++r) members[r].rank = static_cast<int>(r);
    bootstrap.peers = std::move(members);
    HostGroup made;
    std::optional<Error> failure;
    try {
        made = make_host_group(store_, std::move(bootstrap));
    } catch (...) {
        if (!for_devices) throw;
        failure = current_error();
    }
    if (for_devices) {
        connect_parts(color, made, failure, options.timeout);
    } else if (made.group->has_devices()) {
        made.group->open_device(made.place);
    }
    const std::shared_ptr<Group> group = std::move(made.group);
    const std::vector<int> own_numbers = relatives_->numbers_of(this);
    if (!own_numbers.empty()) {
        for (int& rank : numbers) rank = own_numbers[static_cast<size_t>(rank)];
    }
    group->relatives_ = relatives_;
    relatives_->add(group.get(), std::move(numbers));
    const std::lock_guard lock(mutex_);
    std::erase_if(splits_, [](const auto& split) { return split.expired(); });
    splits_.push_back(group);
    return group;
}

CommOptions CommOptions::from_environment() {
    log::check_environment();
    CommOptions options;
    if (const auto ms = env_number("TESSERA_TIMEOUT_MS", 1, INT32_MAX)) options.timeout = milliseconds{*ms};
    if (const auto ms = env_number("TESSERA_HEARTBEAT_TIMEOUT_MS", 0, INT32_MAX)) options.heartbeat = milliseconds{*ms};
    if (const char* text = std::getenv("TESSERA_BACKEND"); text != nullptr && *text != '\0') options.backend = text;
    return options;
}

CommOptions inner_options(const Communicator& parent, std::string_view suffix) {
    CommOptions options = parent.options();
    options.name.resize(std::min(options.name.size(), max_name_size - std::min(max_name_size, suffix.size())));
    options.name += suffix;
    options.backend = backends_of(options.backend).cpu;
    return options;
}

void check_place(const std::shared_ptr<Store>& store, int rank, int world_size, const CommOptions& options) {
    check_options(options);
    if (world_size < 1 || world_size > max_world_size) {
        throw Error(Code::invalid_argument,
                    fmt::format("world size is {}; it must be between 1 and {}", world_size, max_world_size));
    }
    if (rank < 0 || rank >= world_size) {
        throw Error(Code::invalid_argument, fmt::format("rank {} is out of range for world size {}; ranks are 0 to {}",
                                                        rank, world_size, world_size - 1));
    }
    if (!store) throw Error(Code::invalid_argument, "the store is null");
}

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Store> store, int rank, int world_size,
                                                   const CommOptions& options, const Departures& departures) {
    check_place(store, rank, world_size, options);
    const Deadline deadline = Deadline::in(options.timeout);
    const auto own_store = next_communicator(store, rank, options.name, deadline);
    Endpoint endpoint;
    const Peer own = make_peer(rank, world_size, options, endpoint);
    try {
        Bootstrap bootstrap{
            rank,    exchange_peers(*own_store, own, departures, deadline), std::move(endpoint), own_store, options,
            deadline};
        auto group = make_group(store, std::move(bootstrap));
        forget_peers(*own_store, own);
        return group;
    } catch (const Error& error) {
        if (error.record()->launcher_peer >= 0 || !is_of_whole_job(own)) throw;
        const Error told = error.with_launcher_peer(error.record()->peer);
        if (options.on_failure) options.on_failure(told.record().get());
        throw told;
    }
}

WorkPtr Communicator::run_tracked(const Request& request) {
    run(request);
    auto work = std::make_shared<Work>();
    work->finish(std::nullopt);
    return work;
}

WorkPtr Communicator::track(void* /*stream*/, std::string_view label, std::function<void()> /*verify*/) {
    throw Error(Code::internal, fmt::format("{}: communicator '{}' has no device", label, name()));
}

std::shared_ptr<Communicator> Communicator::self() {
    CommOptions options = CommOptions::from_environment();
    return Group::make(0, 1, hex(random_nonce()).substr(0, 8), std::move(options), nullptr, make_self_transport(),
                       std::vector<int>{});
}

}  // namespace tsr
