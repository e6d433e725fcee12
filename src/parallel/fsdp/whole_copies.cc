#include "parallel/fsdp/whole_copies.hpp"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "comm/inner_options.hpp"
#include "parallel/fsdp/unit_place.hpp"
#include "tensor/convert.hpp"

namespace tsr {

namespace {

// For a rank that is alone on its host: still shared pages, which can be mapped at other addresses.
std::shared_ptr<std::byte> own_pages(size_t size) {
    void* const pages = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        throw os_error(fmt::format("cannot allocate {} bytes for unsharded parameters", size), errno);
    ::madvise(pages, size, MADV_HUGEPAGE);  // best effort
    return {static_cast<std::byte*>(pages), [size](std::byte* begin) { ::munmap(begin, size); }};
}

// Bytes of one of `hosts` equal slices of a piece.
size_t slice_bytes(const FsdpPiece& piece, int ranks, int hosts) {
    return static_cast<size_t>(piece.chunk) * static_cast<size_t>(ranks / hosts) * size_of(piece.whole_dtype);
}

// Calls `use` for each piece whose chunk is not all padding, with the chunk's byte offset in the unsharded unit and its
// elements.
template <class Use>
void each_own_chunk(const UnitPlan& unit, int rank, Use&& use) {
    for (const FsdpPiece& piece : unit.pieces) {
        const int64_t begin = rank * piece.chunk;
        const int64_t elements = std::min(piece.elements - begin, piece.chunk);
        if (elements <= 0) continue;
        use(piece, piece.whole_at + static_cast<size_t>(begin) * size_of(piece.whole_dtype), elements);
    }
}

}  // namespace

WholeCopies::WholeCopies(std::shared_ptr<Communicator> comm, std::shared_ptr<const FsdpPlan> plan)
    : comm_(std::move(comm)), plan_(std::move(plan)), host_(comm_) {
    for (const int first : host_.firsts()) {
        if (std::find(hosts_.begin(), hosts_.end(), first) == hosts_.end()) hosts_.push_back(first);
    }
    const int own_first = host_.firsts()[static_cast<size_t>(comm_->rank())];
    host_number_ = static_cast<size_t>(std::find(hosts_.begin(), hosts_.end(), own_first) - hosts_.begin());
    if (hosts_.size() == 1) return;
    const size_t each = host_.firsts().size() / hosts_.size();
    even_ = host_.firsts().size() % hosts_.size() == 0;
    for (size_t r = 0; r < host_.firsts().size(); ++r) {
        even_ = even_ && host_.firsts()[r] == static_cast<int>(r / each * each);
    }
    if (hosts_.size() == host_.firsts().size()) {
        leaders_ = comm_;
        return;
    }
    CommOptions options = inner_options(*comm_, "/leaders");
    options.backend = "auto";
    leaders_ = comm_->split(host_.place() == 0 ? 0 : -1, comm_->rank(), options);
}

template <class Body>
void WholeCopies::together(Body&& body) {
    try {
        body();
    } catch (const std::exception& error) {
        // A failed job is reported over comm_; other ranks may be waiting in the communicators of the host and of the
        // leaders.
        if (!host_.is_alone()) host_.comm()->abort(error.what());
        if (leaders_ && leaders_ != comm_) leaders_->abort(error.what());
        for (const auto& [hosts, keepers] : keepers_) keepers->abort(error.what());
        throw;
    }
}

void WholeCopies::make_whole(size_t unit, size_t slot, WholeMemory& memory, const std::byte* shards,
                             const KeptPart* kept, bool is_left) {
    together([&] {
        const UnitPlan& what = plan_->units[unit];
        if (!agree(unit, slot, !is_left || is_stale(what, memory.memory.get(), shards))) return;
        if (!memory.memory) {
            memory.memory = host_.places() == 1 ? own_pages(memory.size) : host_.allocate(memory.size);
        }
        std::byte* const whole = memory.memory.get();
        if (kept != nullptr) {
            copy_part(what, whole, *kept, [](std::byte* in_whole, const std::byte* in_part, size_t size) {
                std::memcpy(in_whole, in_part, size);
            });
            if (host_.places() > 1) host_.run({.label = "kept parts of whole parameters"});
            if (leaders_) {
                const auto own = static_cast<int>(host_number_) % kept->hosts;
                const std::vector<Tensor> part = slices_of(what, whole, kept->hosts, own, 1);
                const std::vector<Tensor> all = slices_of(what, whole, kept->hosts, 0, kept->hosts);
                if (!part.empty()) {
                    keepers_.at(kept->hosts)
                        ->run({.collective = Collective::all_gather,
                               .inputs = part,
                               .outputs = all,
                               .label = "kept parts of the hosts"});
                }
            }
            if (host_.places() > 1) host_.run({.label = "whole parameters"});
            return;
        }
        each_own_chunk(what, comm_->rank(), [&](const FsdpPiece& piece, size_t at, int64_t elements) {
            convert(shards + piece.shard_at, piece.dtype, whole + at, piece.whole_dtype, elements);
        });
        if (host_.places() > 1) host_.run({.label = "chunks of whole parameters"});
        if (hosts_.size() == 1) return;
        if (leaders_) exchange(what, whole);
        if (host_.places() > 1) host_.run({.label = "whole parameters"});
    });
}

bool WholeCopies::is_stale(const UnitPlan& unit, const std::byte* whole, const std::byte* shards) const {
    constexpr int64_t block = 4096;  // elements
    std::vector<std::byte> converted(static_cast<size_t>(block) * sizeof(double));
    bool differs = false;
    each_own_chunk(unit, comm_->rank(), [&](const FsdpPiece& piece, size_t at, int64_t elements) {
        for (int64_t i = 0; i < elements && !differs; i += block) {
            const int64_t count = std::min(block, elements - i);
            const auto offset = static_cast<size_t>(i);
            const std::byte* now = shards + piece.shard_at + offset * size_of(piece.dtype);
            if (piece.dtype != piece.whole_dtype) {
                convert(now, piece.dtype, converted.data(), piece.whole_dtype, count);
                now = converted.data();
            }
            const size_t size = size_of(piece.whole_dtype);
            differs = std::memcmp(now, whole + at + offset * size, static_cast<size_t>(count) * size) != 0;
        }
    });
    return differs;
}

int WholeCopies::prepare_to_keep(int ranks) {
    const auto all = static_cast<int>(hosts_.size());
    if (ranks >= comm_->world_size()) return 0;
    if (all == 1) return 1;
    if (!even_) return 0;
    const int each = comm_->world_size() / all;
    const int hosts = (ranks + each - 1) / each;
    if (hosts == all || all % hosts != 0) return 0;
    if (hosts > 1 && leaders_ && !keepers_.contains(hosts)) {
        CommOptions options = inner_options(*leaders_, fmt::format("/{}_hosts", hosts));
        options.bound = true;
        keepers_[hosts] = leaders_->split(static_cast<int>(host_number_) / hosts, leaders_->rank(), options);
    }
    return hosts;
}

void WholeCopies::keep(size_t unit, const WholeMemory& memory, KeptPart& kept) {
    together([&] {
        const UnitPlan& what = plan_->units[unit];
        if (!kept.memory) {
            size_t size = 0;
            for (const FsdpPiece& piece : what.pieces) size += slice_bytes(piece, plan_->ranks, kept.hosts);
            size = std::max<size_t>(size, 1);
            kept.memory = host_.places() == 1 ? own_pages(size) : host_.allocate(size);
        }
        copy_part(what, memory.memory.get(), kept, [](const std::byte* in_whole, std::byte* in_part, size_t size) {
            std::memcpy(in_part, in_whole, size);
        });
    });
}

std::vector<Tensor> WholeCopies::slices_of(const UnitPlan& unit, std::byte* whole, int hosts, int first,
                                           int count) const {
    std::vector<Tensor> slices;
    for (const FsdpPiece& piece : unit.pieces) {
        const auto size = static_cast<int64_t>(slice_bytes(piece, plan_->ranks, hosts));
        if (size == 0) continue;
        slices.push_back({whole + piece.whole_at + first * size, Dims{count * size}, DType::u8, {}});
    }
    return slices;
}

template <class Copy>
void WholeCopies::copy_part(const UnitPlan& unit, std::byte* whole, const KeptPart& kept, Copy&& copy) const {
    std::byte* part = kept.memory.get();
    const auto places = static_cast<size_t>(host_.places());
    const auto place = static_cast<size_t>(host_.place());
    for (const Tensor& slice : slices_of(unit, whole, kept.hosts, static_cast<int>(host_number_) % kept.hosts, 1)) {
        const size_t size = slice.size_bytes();
        const size_t begin = size * place / places;
        const size_t end = size * (place + 1) / places;
        if (begin < end) copy(slice.data + begin, part + begin, end - begin);
        part += size;
    }
}

// First among the ranks of the host, which is also the meeting after which the memory may be written; then among the
// hosts; finally, a host without a stale copy learns about the others.
bool WholeCopies::agree(size_t unit, size_t slot, bool is_stale) {
    constexpr size_t words = 3;
    const auto ask = [&](auto&& run, int places, const auto& rank_of) {
        std::vector<int64_t> all(static_cast<size_t>(places) * words);
        std::array<int64_t, words> own{static_cast<int64_t>(unit), static_cast<int64_t>(slot), is_stale ? 1 : 0};
        const Tensor input = tensor_of(std::span<int64_t>(own), DType::i64);
        const Tensor output = tensor_of(std::span<int64_t>(all), DType::i64);
        run(Request{.collective = Collective::all_gather,
                    .inputs = {&input, 1},
                    .outputs = {&output, 1},
                    .label = "next unit to unshard"});
        for (size_t place = 0; place < static_cast<size_t>(places); ++place) {
            const int64_t* const one = &all[words * place];
            is_stale = is_stale || one[2] != 0;
            if (one[0] == own[0] && one[1] == own[1]) continue;
            throw unshards_another(*plan_, comm_->rank(), unit, rank_of(place), static_cast<size_t>(one[0]));
        }
    };
    const auto ask_host = [&] {
        if (host_.places() == 1) return;
        ask([&](const Request& request) { host_.run(request); }, host_.places(),
            [&](size_t place) { return host_.ranks()[place]; });
    };
    ask_host();
    const bool knows = is_stale || hosts_.size() == 1;
    if (leaders_) {
        ask([&](const Request& request) { leaders_->run(request); }, leaders_->world_size(),
            [&](size_t place) { return hosts_[place]; });
    }
    if (!knows) ask_host();
    return is_stale;
}

// The chunks of `count` consecutive ranks, as bytes, without empty ones.
std::vector<Tensor> WholeCopies::chunks_of(const UnitPlan& unit, std::byte* whole, int first_rank, int count) const {
    std::vector<Tensor> chunks;
    for (const FsdpPiece& piece : unit.pieces) {
        const int64_t size = piece.chunk * static_cast<int64_t>(size_of(piece.whole_dtype));
        if (size == 0) continue;
        chunks.push_back({whole + piece.whole_at + first_rank * size, Dims{count * size}, DType::u8, {}});
    }
    return chunks;
}

void WholeCopies::exchange(const UnitPlan& unit, std::byte* whole) {
    constexpr const char* label = "chunks of the hosts";
    if (even_) {
        const std::vector<Tensor> own = chunks_of(unit, whole, comm_->rank(), host_.places());
        const std::vector<Tensor> all = chunks_of(unit, whole, 0, comm_->world_size());
        if (own.empty()) return;
        return leaders_->run({.collective = Collective::all_gather, .inputs = own, .outputs = all, .label = label});
    }
    for (size_t host = 0; host < hosts_.size(); ++host) {
        std::vector<Tensor> theirs;
        for (size_t r = 0; r < host_.firsts().size(); ++r) {
            if (host_.firsts()[r] != hosts_[host]) continue;
            for (const Tensor& chunk : chunks_of(unit, whole, static_cast<int>(r), 1)) theirs.push_back(chunk);
        }
        if (theirs.empty()) return;  // then no host has any
        leaders_->run(
            {.collective = Collective::broadcast, .outputs = theirs, .peer = static_cast<int>(host), .label = label});
    }
}

}  // namespace tsr
