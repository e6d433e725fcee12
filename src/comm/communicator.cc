// Communicator over any transport: issue order, the progress thread, poison, splitting.
#include "comm/communicator.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/reentry.hpp"
#include "comm/backend.hpp"
#include "comm/host.hpp"
#include "comm/rendezvous.hpp"
#include "comm/transport.hpp"

namespace tsr {

namespace {

constexpr int max_world_size = 4096;
constexpr size_t max_name_size = 128;

// A far deadline, for waits that end by themselves: the operation waited for has its own.
Deadline no_deadline() { return Deadline::in(std::chrono::hours{24 * 365}); }

class Group final : public Communicator {
   public:
    Group(int rank, int world_size, CommOptions options, std::shared_ptr<Store> store,
          std::unique_ptr<Transport> transport)
        : rank_(rank),
          world_size_(world_size),
          options_(std::move(options)),
          store_(std::move(store)),
          transport_(std::move(transport)) {}

    template <class... Args>
    [[nodiscard]] static std::shared_ptr<Communicator> make(Args&&... args) {
        return std::shared_ptr<Group>(new Group(std::forward<Args>(args)...), [](Group* group) { group->let_go(); });
    }

    ~Group() override {
        if (!thread_.joinable()) return;
        Group::leave();
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    [[nodiscard]] int rank() const override { return rank_; }
    [[nodiscard]] int world_size() const override { return world_size_; }
    [[nodiscard]] const std::string& name() const override { return options_.name; }
    [[nodiscard]] std::string_view transport() const override { return transport_->name(); }
    [[nodiscard]] const CommOptions& options() const override { return options_; }

    void run(const Request& request) override {
        const Reentry once = enter();
        validate(request, rank_, world_size_);
        refuse_own_thread();
        throw_if_unusable();
        if (unfinished_.load(std::memory_order_acquire) == 0) return run_inline(request);
        await(enqueue(request));
    }

    WorkPtr submit(const Request& request) override {
        const Reentry once = enter();
        validate(request, rank_, world_size_);
        throw_if_unusable();
        return enqueue(request).work;
    }

    std::shared_ptr<Communicator> split(int color, int key, const CommOptions& options) override;
    std::shared_ptr<Buffer> allocate(size_t size) override;
    void finalize() override;
    void abort(const std::string& reason) override;
    void leave() override;
    [[nodiscard]] std::optional<Error> error() const override;

   private:
    struct Task {
        std::shared_ptr<const OwnedRequest> request;
        WorkPtr work;
    };
    struct ActiveTransfer {
        Task task;
        uint64_t sequence = 0;
        std::unique_ptr<Transfer> transfer;
    };

    void let_go();
    [[nodiscard]] Reentry enter() const { return {this, "communicator", options_.name}; }
    void refuse_own_thread() const;
    void run_inline(const Request& request);
    void transfer_inline(const Request& request);
    Task enqueue(const Request& request);
    void await(const Task& task);
    void await_queue();

    void progress();
    void progress_transfers(std::vector<ActiveTransfer>& active);
    void start_queued_transfers(std::vector<ActiveTransfer>& active);
    void complete(const Task& task, std::optional<Error> error);
    void fail_everything(std::vector<ActiveTransfer>& active, const Error& cause);

    // Keeps the first error of the communicator and tells the peers.
    void poison(const Error& error);
    void throw_if_unusable() const;
    [[nodiscard]] Error aborted_by(const Error& cause) const;
    [[nodiscard]] Error named(const Error& error, const Request& request, uint64_t sequence) const;

    const int rank_;
    const int world_size_;
    const CommOptions options_;
    const std::shared_ptr<Store> store_;
    const std::unique_ptr<Transport> transport_;

    // Counted by whichever thread issues to the transport: the issuer while nothing is unfinished, else the progress
    // thread.
    uint64_t collectives_ = 0;
    uint64_t transfers_ = 0;
    uint64_t splits_ = 0;

    std::atomic<bool> poisoned_{false};
    std::atomic<bool> finalized_{false};
    std::atomic<bool> left_{false};
    // Tasks queued or in progress. The progress thread counts down after its last touch of a task (release); the issuer
    // that reads 0 (acquire) may use the transport itself.
    std::atomic<size_t> unfinished_{0};
    std::atomic<bool> queued_{false};  // something is in queue_; ends a wait of the progress thread for transfers

    mutable std::mutex mutex_;  // guards all below
    std::condition_variable changed_;
    std::deque<Task> queue_;
    std::optional<Error> first_error_;
    bool stopping_ = false;
    std::thread thread_;

    const pid_t owner_ = ::getpid();
    static thread_local const Group* progressing_;  // the group whose progress thread this is
    bool orphaned_ = false;                         // the progress thread's: the last reference went away on it
};

thread_local const Group* Group::progressing_ = nullptr;

// The last reference is gone. In a completion callback the progress thread cannot end itself at once: it does so when it
// comes back to its loop. A forked child has no progress thread and must not tell the peers that this rank has left: what
// it holds is its parent's, and goes with the process.
void Group::let_go() {
    if (owner_ != ::getpid()) return;
    if (progressing_ == this) {
        orphaned_ = true;
    } else {
        delete this;
    }
}

void Group::refuse_own_thread() const {
    if (progressing_ != this) return;
    throw Error(Code::invalid_state,
                fmt::format("rank {}: a blocking call on communicator '{}' in a completion callback of "
                            "its own work would never return; make it on another thread",
                            rank_, options_.name))
        .with_rank(rank_);
}

// --- issuing

void Group::run_inline(const Request& request) {
    if (is_point_to_point(request.collective)) return transfer_inline(request);
    const uint64_t sequence = ++collectives_;
    try {
        transport_->run(request, sequence, options_.timeout);
    } catch (...) {
        const Error error = named(current_error(), request, sequence);
        poison(error);
        throw error;
    }
}

void Group::transfer_inline(const Request& request) {
    const uint64_t sequence = ++transfers_;
    try {
        const auto transfer = transport_->start(request, sequence, Deadline::in(options_.timeout));
        Transfer* const waiting[] = {transfer.get()};
        const std::atomic<bool> woken{false};
        while (true) {
            const auto progress = transfer->advance();
            if (progress == Transfer::Progress::done) return;
            if (progress == Transfer::Progress::stuck) transport_->wait(waiting, woken);
        }
    } catch (...) {
        const Error error = named(current_error(), request, sequence);
        poison(error);
        throw error;
    }
}

Group::Task Group::enqueue(const Request& request) {
    Task task{std::make_shared<const OwnedRequest>(request), std::make_shared<Work>()};
    {
        const std::lock_guard lock(mutex_);
        if (!thread_.joinable()) thread_ = std::thread([this] { progress(); });
        queue_.push_back(task);
        unfinished_.fetch_add(1, std::memory_order_relaxed);
        queued_.store(true, std::memory_order_seq_cst);
    }
    changed_.notify_all();
    transport_->wake();
    return task;
}

// A synchronous call behind asynchronous ones. The caller's memory must not be touched after it has returned, so an
// interrupted wait ends the communicator and then waits for the progress thread to let go.
void Group::await(const Task& task) {
    try {
        task.work->wait(no_deadline());
    } catch (const Error& e) {
        if (task.work->done()) throw;
        poison(e.with_rank(rank_));
        try {
            task.work->wait(no_deadline());
        } catch (const Error&) {
            // Its error is the interruption that is thrown below.
        }
        while (!task.work->done()) std::this_thread::yield();
        throw;
    }
}

void Group::await_queue() {
    wait_until([this] { return unfinished_.load(std::memory_order_acquire) == 0; }, no_deadline(), "issued work");
}

// --- the progress thread

void Group::progress() {
    ::pthread_setname_np(::pthread_self(), "tessera-comm");
    progressing_ = this;
    std::vector<ActiveTransfer> active;
    while (true) {
        if (orphaned_) {
            if (unfinished_.load(std::memory_order_acquire) > 0)
                abort("the communicator was destroyed while it had work");
            if (const auto cause = error()) fail_everything(active, *cause);
            thread_.detach();
            delete this;
            return;
        }
        Task task;
        {
            std::unique_lock lock(mutex_);
            if (active.empty()) changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (stopping_ && queue_.empty() && active.empty()) return;
            if (active.empty() && !is_point_to_point(queue_.front().request->view().collective)) {
                task = std::move(queue_.front());
                queue_.pop_front();
            }
        }
        if (poisoned_.load(std::memory_order_acquire)) {
            const Error cause = *error();
            if (task.work) complete(task, aborted_by(cause));
            fail_everything(active, cause);
            continue;
        }
        if (task.work) {
            std::optional<Error> error;
            try {
                run_inline(task.request->view());
            } catch (...) {
                error = current_error();
            }
            complete(task, std::move(error));
            continue;
        }
        try {
            start_queued_transfers(active);
            progress_transfers(active);
        } catch (...) {
            const Error cause = current_error();
            poison(cause);
            fail_everything(active, cause);
        }
    }
}

// Sends and receives at the head of the queue go on together, so that two ranks that both send first do not wait for
// each other for ever. A collective waits until those before it are done.
void Group::start_queued_transfers(std::vector<ActiveTransfer>& active) {
    queued_.store(false, std::memory_order_seq_cst);
    while (true) {
        Task task;
        {
            const std::lock_guard lock(mutex_);
            if (queue_.empty() || !is_point_to_point(queue_.front().request->view().collective)) return;
            task = std::move(queue_.front());
            queue_.pop_front();
        }
        const Request request = task.request->view();
        const uint64_t sequence = ++transfers_;
        active.push_back({std::move(task), sequence, nullptr});
        try {
            active.back().transfer = transport_->start(request, sequence, Deadline::in(options_.timeout));
        } catch (...) {
            const Error error = named(current_error(), request, sequence);
            complete(active.back().task, error);
            active.pop_back();
            throw error;
        }
    }
}

void Group::progress_transfers(std::vector<ActiveTransfer>& active) {
    bool moved = false;
    for (size_t i = 0; i < active.size();) {
        Transfer::Progress progress{};
        try {
            progress = active[i].transfer->advance();
        } catch (...) {
            const Error error = named(current_error(), active[i].task.request->view(), active[i].sequence);
            const Task task = std::move(active[i].task);
            active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
            poison(error);
            complete(task, error);
            throw error;
        }
        moved = moved || progress != Transfer::Progress::stuck;
        if (progress != Transfer::Progress::done) {
            ++i;
            continue;
        }
        const Task task = std::move(active[i].task);
        active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
        complete(task, std::nullopt);
    }
    if (moved || active.empty()) return;
    std::vector<Transfer*> waiting;
    for (const ActiveTransfer& a : active) waiting.push_back(a.transfer.get());
    try {
        transport_->wait(waiting, queued_);
    } catch (...) {
        const Error error = named(current_error(), active.front().task.request->view(), active.front().sequence);
        poison(error);
        for (ActiveTransfer& a : active) {
            a.transfer.reset();
            complete(a.task, error);
        }
        active.clear();
        throw error;
    }
}

void Group::complete(const Task& task, std::optional<Error> error) {
    // First the count, so that a waiter that returns finds the queue empty and runs its next call inline.
    unfinished_.fetch_sub(1, std::memory_order_release);
    task.work->finish(std::move(error));
}

void Group::fail_everything(std::vector<ActiveTransfer>& active, const Error& cause) {
    for (ActiveTransfer& a : active) {
        a.transfer.reset();
        complete(a.task, aborted_by(cause));
    }
    active.clear();
    std::deque<Task> queue;
    {
        const std::lock_guard lock(mutex_);
        queue.swap(queue_);
    }
    for (const Task& task : queue) complete(task, aborted_by(cause));
}

// --- errors

void Group::poison(const Error& error) {
    {
        const std::lock_guard lock(mutex_);
        if (!first_error_) first_error_ = error;
    }
    poisoned_.store(true, std::memory_order_release);
    transport_->abort(error);
}

Error Group::aborted_by(const Error& cause) const {
    return Error(Code::aborted, fmt::format("rank {}: communicator '{}' is out of use since an earlier error: {}",
                                            rank_, options_.name, cause.what()))
        .with_rank(rank_)
        .with_peer(cause.record()->peer)
        .caused_by(cause);
}

void Group::throw_if_unusable() const {
    if (poisoned_.load(std::memory_order_acquire)) {
        const std::lock_guard lock(mutex_);
        throw aborted_by(*first_error_);
    }
    if (finalized_.load(std::memory_order_acquire)) {
        throw Error(Code::invalid_state, fmt::format("rank {}: communicator '{}' was finalized", rank_, options_.name));
    }
    if (left_.load(std::memory_order_acquire)) {
        throw Error(Code::invalid_state, fmt::format("rank {}: communicator '{}' was destroyed", rank_, options_.name));
    }
}

Error Group::named(const Error& error, const Request& request, uint64_t sequence) const {
    Error result = error;
    if (result.record()->rank < 0) result = result.with_rank(rank_);
    if (result.record()->operation.empty()) {
        result = result.with_operation(std::string(name_of(request.collective)), static_cast<int64_t>(sequence));
    }
    return result;
}

void Group::abort(const std::string& reason) {
    poison(Error(Code::aborted, fmt::format("rank {} aborted communicator '{}'{}{}", rank_, options_.name,
                                            reason.empty() ? "" : ": ", reason))
               .with_rank(rank_));
}

void Group::leave() {
    if (owner_ != ::getpid()) return;  // a forked child's copy: its parent stays
    if (unfinished_.load(std::memory_order_acquire) > 0) abort("the communicator was destroyed while it had work");
    left_.store(true, std::memory_order_release);
    transport_->leave();
}

std::optional<Error> Group::error() const {
    {
        const std::lock_guard lock(mutex_);
        if (first_error_) return first_error_;
    }
    return finalized_.load(std::memory_order_acquire) ? std::nullopt : transport_->peer_error();
}

// --- collective objects

void Group::finalize() {
    if (finalized_.load(std::memory_order_acquire)) {
        throw Error(Code::invalid_state,
                    fmt::format("rank {}: communicator '{}' was finalized before", rank_, options_.name));
    }
    Request request;
    request.collective = Collective::finalize;
    run(request);
    finalized_.store(true, std::memory_order_release);
}

std::shared_ptr<Buffer> Group::allocate(size_t size) {
    const Reentry once = enter();
    refuse_own_thread();
    throw_if_unusable();
    await_queue();
    throw_if_unusable();
    const uint64_t sequence = ++collectives_;
    try {
        return transport_->allocate(size, sequence, options_.timeout);
    } catch (...) {
        Request request;
        request.collective = Collective::allocate;
        const Error error = named(current_error(), request, sequence);
        // All ranks know that there is no memory and go on.
        if (error.code() != Code::no_memory) poison(error);
        throw error;
    }
}

std::shared_ptr<Communicator> make_group(const std::shared_ptr<Store>& store, Bootstrap bootstrap);

void check_options(const CommOptions& options) {
    if (options.timeout.count() <= 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("the timeout is {} ms; it must be positive", options.timeout.count()));
    }
    if (options.backend.size() >= Peer{}.backend.size()) {
        throw Error(Code::invalid_argument, fmt::format("the name of a backend has {} bytes; {} are possible",
                                                        options.backend.size(), Peer{}.backend.size() - 1));
    }
    if (options.name.empty() || options.name.size() > max_name_size) {
        throw Error(Code::invalid_argument, fmt::format("a communicator's name has 1 to {} bytes", max_name_size));
    }
}

std::shared_ptr<Communicator> Group::split(int color, int key, const CommOptions& options) {
    check_options(options);
    throw_if_unusable();
    const Deadline deadline = Deadline::in(options.timeout);
    Endpoint endpoint;
    Peer own = make_peer(rank_, world_size_, options, endpoint);
    own.color = color;
    own.key = key;
    std::vector<Peer> all(static_cast<size_t>(world_size_));
    const auto bytes_of = [](Peer* peers, size_t n) {
        return tensor_of(std::span(reinterpret_cast<uint8_t*>(peers), n * sizeof(Peer)), DType::u8);
    };
    const Tensor input = bytes_of(&own, 1);
    const Tensor output = bytes_of(all.data(), all.size());
    Request request;
    request.collective = Collective::all_gather;
    request.inputs = std::span(&input, 1);
    request.outputs = std::span(&output, 1);
    request.label = "split";
    run(request);
    const uint64_t number = ++splits_;
    if (color < 0) return nullptr;

    std::vector<Peer> members;
    std::copy_if(all.begin(), all.end(), std::back_inserter(members), [&](const Peer& p) { return p.color == color; });
    std::stable_sort(members.begin(), members.end(), [](const Peer& a, const Peer& b) { return a.key < b.key; });
    Bootstrap bootstrap{0, {}, std::move(endpoint), nullptr, options, deadline};
    for (size_t r = 0; r < members.size(); ++r) {
        if (members[r].rank == rank_) bootstrap.rank = static_cast<int>(r);
    }
    // Rank 0's random name makes the keys unique; the number is only for people who look into the store.
    if (store_) bootstrap.store = prefixed(store_, fmt::format("split/{}/{}/", hex(members[0].endpoint), number));
    for (size_t r = 0; r < members.size(); ++r) members[r].rank = static_cast<int>(r);
    bootstrap.peers = std::move(members);
    return make_group(store_, std::move(bootstrap));
}

// --- making one

bool asks_for(const Peer& peer, std::string_view backend) {
    try {
        return cpu_backend(peer.backend.data()) == backend;
    } catch (const Error&) {  // the peer says what is wrong with it
        return false;
    }
}

// A backend that cannot be had is told only now that all ranks have met, so that they learn it together.
std::unique_ptr<Transport> make_transport(Bootstrap bootstrap) {
    const std::string backend = cpu_backend(bootstrap.options.backend);
    for (const Peer& peer : bootstrap.peers) {
        if (asks_for(peer, backend)) continue;
        throw Error(Code::mismatch, fmt::format("rank {} asks for backend '{}', rank {} for '{}'", bootstrap.rank,
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
    if (bootstrap.world_size() == 1) return make_self_transport();
    if (backend == "gloo" || elsewhere != nullptr) return make_gloo_transport(std::move(bootstrap));
    return make_shm_transport(std::move(bootstrap));
}

std::shared_ptr<Communicator> make_group(const std::shared_ptr<Store>& store, Bootstrap bootstrap) {
    const int rank = bootstrap.rank;
    const int world_size = bootstrap.world_size();
    CommOptions options = bootstrap.options;
    return Group::make(rank, world_size, std::move(options), store, make_transport(std::move(bootstrap)));
}

}  // namespace

CommOptions CommOptions::from_environment() {
    CommOptions options;
    if (const char* text = std::getenv("TESSERA_TIMEOUT_MS"); text != nullptr && *text != '\0') {
        char* end = nullptr;
        const long value = std::strtol(text, &end, 10);
        if (*end != '\0' || value <= 0 || value > INT32_MAX) {
            throw Error(Code::invalid_argument,
                        fmt::format("TESSERA_TIMEOUT_MS is '{}'; a number of milliseconds is expected", text));
        }
        options.timeout = milliseconds{value};
    }
    if (const char* text = std::getenv("TESSERA_BACKEND"); text != nullptr && *text != '\0') options.backend = text;
    return options;
}

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Store> store, int rank, int world_size,
                                                   const CommOptions& options, const Departures& departures) {
    check_options(options);
    if (world_size < 1 || world_size > max_world_size) {
        throw Error(Code::invalid_argument,
                    fmt::format("world size {}; 1 to {} are possible", world_size, max_world_size));
    }
    if (rank < 0 || rank >= world_size) {
        throw Error(Code::invalid_argument, fmt::format("rank {} of a world of {}", rank, world_size));
    }
    if (!store) throw Error(Code::invalid_argument, "the store is null");
    const Deadline deadline = Deadline::in(options.timeout);
    const auto own_store = next_communicator(store, rank, options.name, deadline);
    Endpoint endpoint;
    const Peer own = make_peer(rank, world_size, options, endpoint);
    Bootstrap bootstrap{
        rank, exchange_peers(*own_store, own, departures, deadline), std::move(endpoint), own_store, options, deadline};
    auto group = make_group(store, std::move(bootstrap));
    forget_peers(*own_store, own);
    return group;
}

std::shared_ptr<Communicator> Communicator::self() {
    CommOptions options = CommOptions::from_environment();
    return Group::make(0, 1, std::move(options), nullptr, make_self_transport());
}

}  // namespace tsr
