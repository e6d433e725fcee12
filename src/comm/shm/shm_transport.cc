#include "comm/shm/shm_transport.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.hpp"
#include "base/proc.hpp"
#include "base/round_up.hpp"
#include "comm/disagreement.hpp"
#include "comm/host.hpp"
#include "comm/shm/blocks.hpp"
#include "comm/timed_out.hpp"

namespace tsr {

std::unique_ptr<Transport> make_shm_transport(Bootstrap bootstrap) {
    return std::make_unique<shm::ShmTransport>(std::move(bootstrap));
}

namespace shm {

namespace {

constexpr uint64_t hello_magic = 0x4f4c4c4548525354;
constexpr uint64_t handover_magic = 0x5245564f48525354;

// The first message of a connecting rank.
struct Hello {
    uint64_t magic = hello_magic;
    int64_t rank = 0;
    Nonce endpoint{};  // of that rank, as its record in the rendezvous says
};

// Rank 0's message with a segment: the descriptor goes with it or, to a rank of the same process, a heap-allocated
// shared pointer to the mapping, which the receiver frees.
struct Handover {
    uint64_t magic = handover_magic;
    uint64_t size = 0;
    std::shared_ptr<Segment>* in_process = nullptr;
    int32_t code = 0;  // not 0: rank 0 has no segment; why is in text
    std::array<char, 228> text{};
};

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
    return std::as_bytes(std::span(&value, 1));
}

template <class T>
std::span<std::byte> writable_bytes_of(T& value) {
    return std::as_writable_bytes(std::span(&value, 1));
}

// The outcome of a rank's allocation for a buffer.
constexpr std::byte has_memory{0};
constexpr std::byte lacks_memory{1};
constexpr std::byte is_limited{2};

struct JournalEntry {
    uint64_t sequence = 0;
    bool finished = false;
    Operation operation;
};

JournalEntry read_journal(const Journal& journal) {
    JournalEntry entry;
    for (int attempt = 0; attempt < 1000; ++attempt) {
        const uint64_t before = journal.version.load(std::memory_order_acquire);
        entry.sequence = journal.sequence.load(std::memory_order_acquire);
        entry.finished = journal.finished.load(std::memory_order_acquire) != 0;
        load_words(entry.operation, std::span(journal.operation));
        if (before % 2 == 0 && journal.version.load(std::memory_order_acquire) == before) return entry;
    }
    entry.sequence = 0;  // stopped in mid-write
    return entry;
}

// Where each rank has a core, spinning bridges a wait of some 50 us without a call of the kernel; where ranks share
// cores, a spinning rank keeps the one it waits for from running.
Patience patience_for(const CommOptions& options, size_t world_size) {
    Patience patience;
    if (options.spin_count >= 0) {
        patience.spins = patience.least = patience.most = options.spin_count;
    } else if (world_size <= static_cast<size_t>(usable_cores())) {
        patience.spins = patience.most = 1000;
    }
    return patience;
}

}  // namespace

// --- making it

ShmTransport::ShmTransport(Bootstrap bootstrap)
    : rank_(static_cast<size_t>(bootstrap.rank)),
      peers_(std::move(bootstrap.peers)),
      name_(bootstrap.options.name),
      plan_(peers_.size()),
      watch_(peers_, bootstrap.rank),
      patience_(patience_for(bootstrap.options, peers_.size())),
      sources_(peers_.size()),
      places_(peers_.size()),
      block_(size_t{16} << 10),
      parts_(peers_.size()),
      outboxes_(peers_.size()),
      inboxes_(peers_.size()) {
    if (world() > most_ranks) {
        throw Error(Code::unsupported,
                    fmt::format("rank {}: {} ranks on one host; backend shm supports at most {}, use gloo instead",
                                number(rank_), world(), most_ranks));
    }
    const SliceCheck check = [&] {
        const std::vector<int> dead = watch_.dead();
        if (dead.empty()) return;
        const auto first = static_cast<size_t>(dead[0]);
        throw Error(Code::peer_lost, fmt::format("rank {}: {} ended while the communicator was created", number(rank_),
                                                 name_peer(first)))
            .with_peer(number(first));
    };
    meet(bootstrap.endpoint, bootstrap.deadline, check);
    segment_ = share(plan_.total(), bootstrap.deadline, check);
    if (rank_ == 0) {
        // The first synchronisation point orders these writes before every other rank's reads.
        header().magic = Header::current_magic;
        header().world_size = world();
        header().channel_size = plan_.channel_size;
        header().total_size = plan_.total();
    }
    Operation creation;
    std::memcpy(creation.label.data(), "create", 6);
    const Request nothing;
    Call call{nothing, creation};
    call.deadline = bootstrap.deadline;
    call.timeout = bootstrap.deadline.remaining();
    try {
        sync(call);
    } catch (...) {
        leave(0);
        throw;
    }
    if (header().magic != Header::current_magic || header().world_size != world() ||
        header().channel_size != plan_.channel_size || header().total_size != plan_.total()) {
        throw Error(Code::version, fmt::format("rank {}: rank {} uses a different version of Tessera: its layout of "
                                               "shared memory differs",
                                               number(rank_), number(0)));
    }
}

ShmTransport::~ShmTransport() {
    if (segment_) ShmTransport::leave(0);
}

void ShmTransport::leave(uint64_t launched) {
    RankPage& own = page(rank_);
    if (launched > 0) own.launched.store(launched, std::memory_order_relaxed);
    own.left.store(1, std::memory_order_release);
}

void ShmTransport::meet(const Endpoint& endpoint, Deadline deadline, const SliceCheck& check) {
    // The names of abstract sockets are public (/proc/net/unix): peer_pid() always checks the user.
    const auto pid_matches = [&](const Link& link, const Peer& peer) {
        const pid_t pid = link.peer_pid();
        return peer.pid_namespace != peers_[rank_].pid_namespace || pid == peer.pid;
    };
    if (rank_ != 0) {
        Link link = Endpoint::connect(peers_[0].endpoint);
        while (!link) {
            check();
            poll_interrupt();
            if (deadline.expired()) {
                throw Error(Code::timeout,
                            fmt::format("timed out connecting to the unix socket of rank {}", number(0)));
            }
            ::sched_yield();
            link = Endpoint::connect(peers_[0].endpoint);
        }
        if (!pid_matches(link, peers_[0])) {
            throw Error(Code::permission,
                        fmt::format("a process other than rank {} answers at its unix socket", number(0)));
        }
        link.send(bytes_of(Hello{hello_magic, static_cast<int64_t>(rank_), peers_[rank_].endpoint}), -1, deadline,
                  check);
        links_.push_back(std::move(link));
        return;
    }
    links_.resize(world());
    for (size_t connected = 1; connected < world();) {
        Link link = endpoint.accept(deadline.slice());
        if (link) {
            Hello hello;
            try {
                static_cast<void>(link.peer_pid());  // throws for another user's, without waiting for its message
                static_cast<void>(
                    link.receive(writable_bytes_of(hello), deadline.earlier(Deadline::in(milliseconds{2000})), check));
                const auto rank = static_cast<size_t>(hello.rank);
                const bool known = hello.magic == hello_magic && rank > 0 && rank < world() && !links_[rank] &&
                                   hello.endpoint == peers_[rank].endpoint && pid_matches(link, peers_[rank]);
                if (!known) throw Error(Code::permission, "it is not a rank of this communicator");
                links_[rank] = std::move(link);
                ++connected;
            } catch (const Error& e) {
                if (e.code() == Code::interrupted) throw;
                poll_interrupt();  // by what is no longer needed
                log::warning("rank {} of '{}': refused a connection: {}", number(0), name_, e.what());
            }
            if (!deadline.expired()) continue;
        }
        check();
        poll_interrupt();
        if (!deadline.expired()) continue;
        std::vector<int> missing;
        for (size_t r = 1; r < world(); ++r) {
            if (!links_[r]) missing.push_back(number(r));
        }
        throw Error(Code::timeout, fmt::format("rank {}: {} did not connect in time", number(0), name_ranks(missing)))
            .with_peer(missing.front())
            .with_operation("create");
    }
}

std::shared_ptr<Segment> ShmTransport::share(size_t size, Deadline deadline, const SliceCheck& check) {
    // The link itself does not know whose it is.
    const auto named = [&](const Error& e, size_t rank) {
        return e.code() == Code::peer_lost && e.record()->peer < 0 ? lost(rank, "", false) : e;
    };
    if (rank_ != 0) {
        Handover message;
        Fd memfd;
        try {
            memfd = links_[0].receive(writable_bytes_of(message), deadline, check);
        } catch (const Error& e) {
            throw named(e, 0);
        }
        message.text.back() = '\0';
        if (message.magic != handover_magic)
            throw Error(Code::internal, fmt::format("received an unknown message from rank {}", number(0)));
        if (message.code != 0) throw Error(static_cast<Code>(message.code), message.text.data());
        if (message.in_process != nullptr && peers_[0].same_process(peers_[rank_])) {
            const std::unique_ptr<std::shared_ptr<Segment>> shared(message.in_process);
            return *shared;
        }
        return Segment::attach(memfd, size);
    }
    Handover message;
    message.size = size;
    std::shared_ptr<Segment> segment;
    Fd memfd;
    std::optional<Error> error;
    try {
        const auto available = available_memory();
        if (available && size > *available && size > plan_.total()) {
            throw Error(Code::no_memory, fmt::format("cannot allocate {} bytes of shared memory for all ranks: {} "
                                                     "bytes are available",
                                                     size, *available));
        }
        std::tie(segment, memfd) = Segment::create(size);
    } catch (const Error& e) {
        error = e;
        message.code = static_cast<int32_t>(e.code());
        std::strncpy(message.text.data(), e.what(), message.text.size() - 1);
    }
    for (size_t r = 1; r < world(); ++r) {
        const bool in_process = segment && peers_[r].same_process(peers_[0]);
        auto shared = in_process ? std::make_unique<std::shared_ptr<Segment>>(segment) : nullptr;
        message.in_process = shared.get();
        try {
            links_[r].send(bytes_of(message), in_process ? -1 : memfd.get(), deadline, check);
        } catch (const Error& e) {
            throw named(e, r);
        }
        static_cast<void>(shared.release());
    }
    if (error) throw Error(*error);
    return segment;
}

std::shared_ptr<Buffer> ShmTransport::allocate(size_t size, uint64_t sequence, milliseconds timeout) {
    const Request nothing;
    const Operation allocation = allocation_of(size);
    Call call{nothing, allocation, sequence, timeout};
    begin(call);
    sync(call);
    const size_t stride = round_up(std::max<size_t>(size, 1), page_size);
    Region region{last_buffer_ + 1, nullptr, stride, rank_};
    std::optional<Error> error;
    try {
        size_t total = 0;
        if (stride < size || __builtin_mul_overflow(stride, world(), &total)) {
            throw Error(Code::no_memory, fmt::format("{} bytes per rank exceed the address space", size));
        }
        region.segment = share(total, Deadline::in(timeout), [&] { check(call); });
        prefer_huge_pages(*region.segment);
        populate(region.of_rank(rank_), stride);
    } catch (const Error& e) {
        if (e.code() != Code::no_memory && e.code() != Code::io) throw;
        error = e;
    }
    // All ranks learn whether all succeeded, and none accesses a peer's part before that.
    const bool limited = error && error->record()->native_code == EFBIG;
    next_arrival().payload[0] = !error ? has_memory : limited ? is_limited : lacks_memory;
    sync(call);
    finish(call);
    ++last_buffer_;
    for (size_t r = 0; r < world(); ++r) {
        const std::byte outcome = arrival(r).payload[0];
        if (outcome == has_memory) continue;
        const char* why = outcome == is_limited
                              ? "reached its file size limit (RLIMIT_FSIZE, `ulimit -f`), which also applies to "
                                "shared memory"
                              : "is out of memory";
        const Error base(Code::no_memory,
                         fmt::format("rank {}: cannot allocate a buffer of {} bytes per rank: rank {} {}",
                                     number(rank_), size, number(r), why));
        throw(error ? base.caused_by(*error) : base)
            .with_rank(number(rank_))
            .with_peer(number(r))
            .with_operation("allocate", static_cast<int64_t>(sequence));
    }
    buffers_->add(region);
    return std::make_shared<SharedBuffer>(buffers_, region, size);
}

// --- synchronisation

void ShmTransport::write_journal(Journal& journal, const Operation& operation, uint64_t sequence) {
    const uint64_t version = journal.version.load(std::memory_order_relaxed);
    journal.version.store(version + 1, std::memory_order_relaxed);
    journal.sequence.store(sequence, std::memory_order_release);
    journal.finished.store(0, std::memory_order_release);
    store_words(std::span(journal.operation), operation);
    journal.version.store(version + 2, std::memory_order_release);
}

void ShmTransport::begin(Call& call) {
    write_journal(page(rank_).journal, call.operation, call.sequence);
    if (alarmed()) throw_if_alarmed(headline(call.operation, call.sequence));
}

void ShmTransport::finish(Call& call) {
    static_cast<void>(call);
    page(rank_).journal.finished.store(1, std::memory_order_release);
}

void ShmTransport::sync(Call& call) {
    Arrival& own = next_arrival();
    if (!call.entered) {
        own.fingerprint = call.operation.fingerprint;
        own.input = call.input;
        own.output = call.output;
    }
    ++stamp_;
    own.stamp.store(stamp_, std::memory_order_seq_cst);
    if (const size_t here = first_ranks_here(0); here < world()) {
        await_others(call, here);
    } else {
        // Maybe the last to come (the last in the single order of the stores sees all stamps, so one rank gets here).
        ring(header().bell);
    }
    if (!call.entered) {
        call.entered = true;
        compare_fingerprints(call);
    }
    if (stamp_ % 64 == 0) pulse();
}

size_t ShmTransport::first_ranks_here(size_t known) const {
    const Arrivals here = arrivals();
    const size_t ranks = world();
    const uint64_t point = stamp_;
    while (known < ranks && here[known].stamp.load(std::memory_order_seq_cst) >= point) ++known;
    return known;
}

// Separate from sync(), so that its cost can be distinguished from waiting (benchmarks/instructions.py).
[[gnu::noinline]] void ShmTransport::await_others(Call& call, size_t here) {
    const auto all_here = [&] { return (here = first_ranks_here(here)) == world(); };
    shm::wait(header().bell, patience_, all_here, [this] { return alarmed(); }, [&] { check(call); });
}

void ShmTransport::pulse() {
    poll_interrupt();
    if (alarmed()) throw_if_alarmed("an operation");
}

void ShmTransport::wake() { ring(page(rank_).bell); }

// --- errors

size_t ShmTransport::place_of(int rank) const {
    if (static_cast<size_t>(rank) < world() && number(static_cast<size_t>(rank)) == rank)
        return static_cast<size_t>(rank);
    return static_cast<size_t>(std::ranges::find(peers_, rank, &Peer::rank) - peers_.begin());
}

std::string ShmTransport::name_peer(size_t place) const {
    return fmt::format("rank {} (pid {})", number(place), peers_[place].pid);
}

std::string ShmTransport::last_operation(size_t place) const {
    if (!segment_) return "it had not begun any operation";
    const JournalEntry entry = read_journal(page(place).journal);
    if (entry.sequence == 0) return "it had not begun any operation";
    return fmt::format("its last operation was {}{}", tsr::headline(entry.operation, entry.sequence),
                       entry.finished || is_point_to_point(entry.operation.collective) ? "" : ", not finished");
}

std::string ShmTransport::doing(int rank) const {
    const size_t place = place_of(rank);
    if (!segment_ || place >= world()) return {};
    const RankPage& theirs = page(place);
    if (theirs.left.load(std::memory_order_acquire) != 0) return {};
    const bool failed = theirs.failure.state.load(std::memory_order_acquire) == FailureRecord::told;
    for (const Journal* journal : {&theirs.transfer, &theirs.journal}) {
        const JournalEntry entry = read_journal(*journal);
        if (entry.sequence == 0 || entry.finished) continue;
        // The journal of operations shows where a message began, not where it ended.
        if (journal == &theirs.journal && is_point_to_point(entry.operation.collective)) continue;
        return fmt::format("{} in {}", failed ? "has failed" : "waits", tsr::headline(entry.operation, entry.sequence));
    }
    return {};
}

std::string ShmTransport::whereabouts(size_t place, const Call& call) const {
    const JournalEntry entry = read_journal(page(place).journal);
    if (entry.sequence == call.sequence && entry.operation.collective == call.operation.collective) {
        return "entered it but is not making progress";
    }
    std::string other = doing(number(place));
    if (other.empty() && elsewhere_) other = elsewhere_(number(place));
    if (!other.empty()) return fmt::format("is not in it: it {}", other);
    return fmt::format("never entered it; {}", last_operation(place));
}

Error ShmTransport::lost(size_t place, const std::string& headline, bool ended) const {
    const std::string what = headline.empty() ? std::string() : headline + " failed: ";
    return Error(Code::peer_lost, fmt::format("rank {}: {}{} {}; {}", number(rank_), what, name_peer(place),
                                              ended ? "ended" : "left the communicator", last_operation(place)))
        .with_rank(number(rank_))
        .with_peer(number(place));
}

std::optional<Error> ShmTransport::told_failure(const std::string& headline) const {
    for (size_t r = 0; r < world(); ++r) {
        const FailureRecord& record = page(r).failure;
        if (r == rank_ || record.state.load(std::memory_order_acquire) != FailureRecord::told) continue;
        std::array<char, sizeof record.text> text = record.text;
        text.back() = '\0';
        Code code = static_cast<Code>(record.code);
        const int peer = record.peer >= 0 ? record.peer : number(r);
        // Codes about a third rank, or about all ranks, apply here too; any other error was that rank's alone.
        if (code != Code::timeout && code != Code::peer_lost && code != Code::mismatch) code = Code::aborted;
        const std::string what = headline.empty() ? std::string() : headline + " ended: ";
        return Error(code, fmt::format("rank {}: {}rank {} failed: {}", number(rank_), what, number(r), text.data()))
            .with_rank(number(rank_))
            .with_peer(peer);
    }
    return std::nullopt;
}

void ShmTransport::throw_if_alarmed(const std::string& headline) const {
    if (!alarmed()) return;
    {
        const std::lock_guard lock(failure_mutex_);
        if (failure_) throw Error(*failure_);
    }
    if (const auto dead = first_dead()) throw lost(*dead, headline, true);
    if (const auto told = told_failure(headline)) {
        const std::lock_guard lock(failure_mutex_);
        adopted_ = true;
        throw Error(*told);
    }
}

std::optional<size_t> ShmTransport::first_dead() const {
    for (const int place : watch_.dead()) {
        const RankPage& theirs = page(static_cast<size_t>(place));
        const bool told = theirs.failure.state.load(std::memory_order_acquire) == FailureRecord::told;
        if (!told && theirs.left.load(std::memory_order_acquire) == 0) return static_cast<size_t>(place);
    }
    return std::nullopt;
}

void ShmTransport::look(const std::string& headline, Missing missing) const {
    throw_if_alarmed(headline);
    if (missing == Missing::is_lost) {
        if (const auto dead = first_dead()) throw lost(*dead, headline, true);
    }
}

std::vector<size_t> ShmTransport::late_ranks() const {
    std::vector<size_t> late;
    for (size_t r = 0; r < world(); ++r) {
        if (arrival(r).stamp.load(std::memory_order_seq_cst) < stamp_) late.push_back(r);
    }
    return late;
}

void ShmTransport::check(Call& call) {
    const std::string name = headline(call.operation, call.sequence);
    const auto told = [&](const Error& e) {
        return e.with_rank(number(rank_))
            .with_operation(std::string(name_of(call.operation.collective)), static_cast<int64_t>(call.sequence));
    };
    try {
        throw_if_alarmed(name);
        // Check departures first, then the stamps: a rank that arrived and then left orderly is not missing.
        const auto dead = first_dead();
        std::vector<char> left(world());
        for (size_t r = 0; r < world(); ++r) left[r] = page(r).left.load(std::memory_order_acquire) != 0;
        const std::vector<size_t> late = late_ranks();
        if (late.empty()) return;
        if (dead) throw lost(*dead, name, true);
        for (const size_t place : late) {
            if (left[place]) throw lost(place, name, false);
        }
        if (watch_others_) watch_others_(name);
        poll_interrupt();
        if (!call.deadline) call.deadline = Deadline::in(call.timeout - check_slice);
        if (call.deadline->expired()) throw_timeout(call, late);
    } catch (const Error& e) {
        throw told(e);
    }
}

bool ShmTransport::may_wait(int rank, uint64_t sequence) const {
    const size_t place = place_of(rank);
    return read_journal(page(place).journal).sequence == sequence && !process_is_stopped(peers_[place].pid);
}

void ShmTransport::throw_timeout(const Call& call, const std::vector<size_t>& places) const {
    std::vector<Late> late;
    for (const size_t place : places) {
        late.push_back(
            {number(place), name_peer(place), whereabouts(place, call), process_is_stopped(peers_[place].pid)});
    }
    throw timed_out(number(rank_), headline(call.operation, call.sequence), call.timeout, std::move(late));
}

void ShmTransport::compare_fingerprints(const Call& call) const {
    const Arrivals here = arrivals();
    size_t equal = 0;
    while (equal < world() && here[equal].fingerprint == call.operation.fingerprint) ++equal;
    if (equal == world()) return;
    std::vector<Said> said;
    for (size_t r = 0; r < world(); ++r) {
        said.push_back({read_journal(page(r).journal).operation, {number(r)}});
        said.back().operation.fingerprint = arrival(r).fingerprint;
    }
    throw disagreement(number(rank_), call.sequence, said);
}

void ShmTransport::abort(const Error& error) {
    {
        const std::lock_guard lock(failure_mutex_);
        if (failure_) return;
        failure_ = error;
        if (!adopted_) {
            FailureRecord& record = page(rank_).failure;
            record.code = static_cast<int32_t>(error.code());
            record.peer = error.record()->peer;
            std::strncpy(record.text.data(), error.what(), record.text.size() - 1);
            record.state.store(FailureRecord::told, std::memory_order_release);
        }
    }
    header().alarm.store(1, std::memory_order_seq_cst);
    ring_always(header().bell);
    for (size_t r = 0; r < world(); ++r) ring_always(page(r).bell);
}

std::optional<Error> ShmTransport::peer_error() const {
    if (const auto dead = first_dead()) return lost(*dead, "", true);
    if (!alarmed()) return std::nullopt;
    return told_failure("");
}

std::optional<Error> ShmTransport::absent_from(const Operation& operation, uint64_t sequence) const {
    const std::string own = headline(operation, sequence);
    for (size_t r = 0; r < world(); ++r) {
        if (r == rank_) continue;
        const RankPage& theirs = page(r);
        if (theirs.left.load(std::memory_order_acquire) != 0 &&
            theirs.launched.load(std::memory_order_relaxed) < sequence) {
            return lost(r, own, false);
        }
        const JournalEntry entry = read_journal(theirs.journal);
        if (entry.sequence != sequence || is_point_to_point(entry.operation.collective)) continue;
        return Error(Code::mismatch,
                     fmt::format(
                         "rank {}: {} on a device cannot end: {} is in {} on the CPU instead; all ranks must make "
                         "the same calls in the same order",
                         number(rank_), own, name_peer(r), headline(entry.operation, sequence)))
            .with_rank(number(rank_))
            .with_peer(number(r));
    }
    return std::nullopt;
}

std::vector<int> ShmTransport::departed() const {
    std::vector<int> ranks;
    for (size_t r = 0; r < world(); ++r) {
        if (r == rank_) continue;
        const bool left = page(r).left.load(std::memory_order_acquire) != 0;
        if (left || watch_.is_dead(static_cast<int>(r))) ranks.push_back(number(r));
    }
    return ranks;
}

}  // namespace shm
}  // namespace tsr
