// The Communicator over any transport: issue order, the progress thread, poisoning, the flight record.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fork_mark.hpp"
#include "base/meter.hpp"
#include "base/reentry.hpp"
#include "base/ring.hpp"
#include "base/thread.hpp"
#include "comm/communicator.hpp"
#include "comm/device_queue.hpp"
#include "comm/flight_recorder.hpp"
#include "comm/flight_requests.hpp"
#include "comm/plan.hpp"
#include "comm/rendezvous.hpp"
#include "comm/seats.hpp"
#include "comm/transport.hpp"

namespace tsr {

// Throws INVALID_ARGUMENT.
void check_timeout(milliseconds timeout);
void check_options(const CommOptions& options);
void check_place(const std::shared_ptr<Store>& store, int rank, int world_size, const CommOptions& options);
// Adds the launcher's rank of the peer that the error names, if any.
[[nodiscard]] Error of_launcher(const Error& error, const std::vector<int>& launcher_ranks);
// Collective over the peers of `bootstrap`. Chooses the transport.
class Group;
[[nodiscard]] std::shared_ptr<Group> make_group(const std::shared_ptr<Store>& store, Bootstrap bootstrap);
// The same for tensors on the CPU alone: devices come later.
struct HostGroup {
    std::shared_ptr<Group> group;
    int place = 0;  // this rank's among the ranks of its host
};
[[nodiscard]] HostGroup make_host_group(const std::shared_ptr<Store>& store, Bootstrap bootstrap);

class Group final : public Communicator, public std::enable_shared_from_this<Group> {
   public:
    Group(int rank, int world_size, const std::string& id, CommOptions options, std::shared_ptr<Store> store,
          std::unique_ptr<Transport> transport, std::vector<int> launcher_ranks)
        : rank_(rank),
          world_size_(world_size),
          options_(std::move(options)),
          timeout_ms_(options_.timeout.count()),
          store_(std::move(store)),
          transport_(std::move(transport)),
          launcher_ranks_(std::move(launcher_ranks)),
          origin_{options_.name, id, rank, world_size, std::string(transport_->name())} {
        transport_->ask_elsewhere([this](int late) { return doing_elsewhere(late); });
    }

    template <class... Args>
    [[nodiscard]] static std::shared_ptr<Group> make(Args&&... args) {
        const std::shared_ptr<Group> group(new Group(std::forward<Args>(args)...), [](Group* last) { last->let_go(); });
        group->answer_flight_requests();
        group->relatives_->add(group.get(), {});
        return group;
    }

    ~Group() override {
        relatives_->remove(this);
        if (options_.flight_requests) options_.flight_requests->remove(this);
        tell_flight();
        if (thread_.joinable() || device_) Group::leave();
        if (thread_.joinable()) {
            {
                const std::lock_guard lock(mutex_);
                stopping_ = true;
            }
            changed_.notify_all();
            thread_.join();
        }
        device_.reset();  // before what its thread and the progress thread use
    }

    [[nodiscard]] int rank() const override { return rank_; }
    [[nodiscard]] int world_size() const override { return world_size_; }
    [[nodiscard]] int launcher_rank(int rank) const override {
        const auto place = static_cast<size_t>(rank);
        return place < launcher_ranks_.size() ? launcher_ranks_[place] : -1;
    }
    [[nodiscard]] const std::string& name() const override { return options_.name; }
    [[nodiscard]] std::string_view transport() const override { return transport_->name(); }
    [[nodiscard]] std::optional<Device> device() const override { return own_device_; }
    [[nodiscard]] CommOptions options() const override {
        CommOptions now = options_;
        now.timeout = timeout();
        return now;
    }
    void set_timeout(milliseconds timeout) override;

    // Whether tensors may be on devices.
    [[nodiscard]] bool has_devices() const;
    // Connects the ranks' devices too; `place`: this rank's among the ranks of its host. Collective, before anything else.
    void open_device(int place);

    void run(const Request& request) override {
        const Call once(*this, request.of_turn);
        if (validate(request, rank_, world_size_, own_device_)) [[unlikely]]
            return run_on_device(request);
        if (runs_inline()) return run_inline(request);
        await(enqueue(request));
    }

    WorkPtr run_tracked(const Request& request) override;
    WorkPtr track(void* stream, std::string_view label, std::function<void()> verify) override;

    WorkPtr submit(const Request& request) override {
        const Call once(*this, request.of_turn);
        const bool on_device = validate(request, rank_, world_size_, own_device_);
        refuse_own_job();
        throw_if_unusable();
        if (on_device) [[unlikely]]
            return submit_to_device(request);
        return enqueue(request).work;
    }

    std::shared_ptr<Plan> prepare(const Request& request) override;

    void in_one_call(FunctionRef<void()> body) override;
    WorkPtr submit_job(std::function<void()> job) override {
        const Call once = enter();
        refuse_own_job();
        throw_if_unusable();
        Task task;
        task.job = std::make_shared<const std::function<void()>>(std::move(job));
        task.work = std::make_shared<Work>();
        enqueue(task);
        return task.work;
    }

    std::shared_ptr<Communicator> split(int color, int key, const CommOptions& options) override;
    [[noreturn]] void refuse_split(const Error& why) override;
    std::shared_ptr<Communicator> shrink(const CommOptions& options) override;
    std::shared_ptr<Communicator> grow(const CommOptions& options);  // seats.hpp
    void set_seats(Seats seats) { seats_ = std::move(seats); }
    std::shared_ptr<Buffer> allocate(size_t size) override;
    void finalize() override;
    void abort(const std::string& reason) override;
    void leave() override;
    void check_usable() const override { throw_if_unusable(); }
    void refuse_in_turn(std::string_view what) const override;
    [[nodiscard]] std::string doing_elsewhere(int rank) const override { return relatives_->doing(this, rank); }
    [[nodiscard]] std::optional<Error> error() const override;
    void record(std::string_view label, FunctionRef<void()> body) override;
    void write_trace(const std::string& path) const override;

   private:
    class Prepared;
    class PreparedOnDevice;
    struct DeviceRequest;
    // A communicator of this rank and all those split from it: another of them may show where a late rank is.
    class Relatives {
       public:
        // `numbers`: the group's ranks as numbered in the root communicator; empty for the root itself.
        void add(const Group* group, std::vector<int> numbers);
        void remove(const Group* group);
        [[nodiscard]] std::vector<int> numbers_of(const Group* group) const;
        // What rank `late` of `group` does in another one: "waits in barrier #3 of communicator 'dp'"; empty if
        // unknown.
        [[nodiscard]] std::string doing(const Group* group, int late) const;
        // Another one in the turn of a rank that `group` has too, besides ranks that wait in it: that rank's number there, and
        // the communicator's name.
        [[nodiscard]] std::optional<std::pair<int, std::string>> turn_elsewhere(const Group* group) const;

       private:
        struct Relative {
            const Group* group;
            std::vector<int> numbers;
        };
        mutable std::mutex mutex_;  // guards members_; holding it keeps the groups alive
        std::vector<Relative> members_;
    };
    // A request or a job.
    struct Task {
        std::shared_ptr<const OwnedRequest> request;
        WorkPtr work;
        Operation operation;
        uint64_t ticket = 0;  // in the flight recorder
        std::shared_ptr<const std::function<void()>> job;
        milliseconds timeout{0};  // when the task was queued
        [[nodiscard]] bool is_transfer() const {
            return request && !request->is_on_device() && is_point_to_point(request->view().collective);
        }
    };
    struct ActiveTransfer {
        Task task;
        uint64_t sequence = 0;
        std::unique_ptr<Transfer> transfer;
    };

    [[nodiscard]] milliseconds timeout() const { return milliseconds{timeout_ms_.load(std::memory_order_relaxed)}; }
    void let_go();
    // Marks that the caller's thread uses the transport or the queue; no other thread may.
    class Issuing {
       public:
        explicit Issuing(const Group& group);
        ~Issuing();
        Issuing(const Issuing&) = delete;
        Issuing& operator=(const Issuing&) = delete;

       private:
        const Group* group_;  // null: a job of the progress thread, which may run beside an issuer; or in_one_call
    };
    class Call {
       public:
        explicit Call(const Group& group, bool of_turn = false)
            : once_(&group, "communicator", group.options_.name), issuing_(group) {
            if (group.turn_of() >= 0 && !of_turn) [[unlikely]]
                group.refuse_in_turn();
        }

       private:
        const Reentry once_;
        const Issuing issuing_;
    };
    [[nodiscard]] Call enter() const { return Call(*this); }
    void refuse_in_child() const;
    void refuse_own_thread() const;
    void refuse_own_job() const;
    void refuse_in_turn() const;
    [[nodiscard]] bool is_in_turn() const;
    [[nodiscard]] bool in_own_job() const { return progressing_ == this && in_job_; }
    // Whether a blocking call runs on this thread: in a job of the queue, or with an empty queue. Throws if it must not
    // run.
    [[nodiscard]] bool runs_inline() const {
        const bool progressing = progressing_ == this;
        if (progressing && !in_job_) refuse_own_thread();
        throw_if_unusable();
        return progressing || unfinished_.load(std::memory_order_acquire) == 0;
    }
    [[nodiscard]] std::vector<Peer> peers_of_split(const Peer& own, const std::string& why);
    // The host and the device of this rank, unless others are given.
    [[nodiscard]] CommOptions with_own_place(CommOptions options) const;
    // Collective over the ranks of this communicator: connects the devices of those that a split puts together. `part` has
    // this rank's group, unless it is in none; `failure` is why it could not be made. `limit`: of the split.
    void connect_parts(int color, const HostGroup& part, const std::optional<Error>& failure, milliseconds limit);
    [[nodiscard]] bool all_agree(bool agrees, milliseconds timeout);  // collective
    void use(std::unique_ptr<DeviceTransport> transport);
    [[nodiscard]] CommOptions begin_remaking(const CommOptions& asked, std::string_view how);
    [[nodiscard]] Error store_is_lost(const Error& why, std::string_view operation, std::string_view participle) const;
    [[nodiscard]] size_t place_among(const std::vector<Peer>& members, const Peer& own) const;
    void run_inline(const Request& request);
    // Returns the ticks that it took.
    uint64_t run_collective(const Request& request, const Operation& operation, uint64_t sequence, uint64_t ticket,
                            milliseconds timeout);
    // Of a call that runs on its caller's thread, unless that is the progress thread in a job.
    void count_inline(uint64_t bytes, uint64_t took) const {
        constexpr uint64_t worth_a_look = 20000;  // ticks: asking which thread this is takes longer than short calls do
        Meter& page = meter();
        add_to(page.bytes, bytes);
        if (in_job_ || (took > worth_a_look && is_library_thread)) return;
        add_to(page.waited, took);
    }
    void transfer_inline(const Request& request);
    // Of requests on a device, which are not part of the CPU's calls.
    [[gnu::cold]] void run_on_device(const Request& request, const WorkPtr& work = nullptr);
    [[gnu::cold]] WorkPtr submit_to_device(const Request& request);
    [[nodiscard]] std::shared_ptr<Plan> prepare_on_device(const Request& request);
    void check_memory(const Request& request);
    void on_device(Collective collective, FunctionRef<void(DeviceApi&)> body);
    void launch(const Request& request, const Task& task, const DeviceEvent* after, const WorkPtr& work);
    void launch(const Task& task);
    [[gnu::cold]] static void fail_on_device(const Task& task, const Error& error);
    void run_job(const std::function<void()>& job);
    Task enqueue(const Request& request);
    void enqueue(Task task);
    void await(const Task& task);
    void await_queue();

    void progress();
    void progress_transfers(std::vector<ActiveTransfer>& active);
    void start_queued_transfers(std::vector<ActiveTransfer>& active);
    void complete(Task& task, std::optional<Error> error);
    void fail_everything(std::vector<ActiveTransfer>& active, const Error& cause);

    // Keeps the first error of the communicator and tells the peers.
    void poison(const Error& error);
    enum class Splits { all, bound };
    void abort_splits(const std::string& reason, Splits which);  // recursively
    // Writes the flight record to TESSERA_TRACE_DIR, once: at the first failure, else at the end.
    void tell_flight() noexcept;
    void tell_flight(const std::string& directory) const noexcept;
    void answer_flight_requests();
    void throw_if_unusable() const;
    [[nodiscard]] Error aborted_by(const Error& cause) const;
    [[nodiscard]] Error named(const Error& error, const Request& request, uint64_t sequence) const;

    const int rank_;
    const int world_size_;
    const CommOptions options_;
    std::atomic<milliseconds::rep> timeout_ms_;
    const std::shared_ptr<Store> store_;
    const std::unique_ptr<Transport> transport_;
    const std::vector<int> launcher_ranks_;  // by rank
    const FlightOrigin origin_;
    std::shared_ptr<Relatives> relatives_ = std::make_shared<Relatives>();
    FlightRecorder flight_;
    std::atomic<bool> flight_told_{false};
    std::optional<Device> own_device_;     // none: for tensors on the CPU alone
    std::unique_ptr<DeviceQueue> device_;  // of it

    // Counted by the thread that issues to the transport: the issuer while nothing is unfinished, else the progress
    // thread.
    uint64_t collectives_ = 0;
    uint64_t transfers_ = 0;
    uint64_t splits_made_ = 0;

    std::optional<Seats> seats_;  // of a job that replaces ranks that die

    std::atomic<bool> poisoned_{false};
    std::atomic<bool> finalized_{false};
    std::atomic<bool> left_{false};
    // Tasks queued or in progress. The progress thread decrements after its last access to a task (release); an issuer
    // that reads 0 (acquire) may use the transport itself.
    std::atomic<size_t> unfinished_{0};
    std::atomic<bool> queued_{false};  // queue_ is not empty; ends the progress thread's wait for transfers

    mutable std::mutex mutex_;  // guards all below
    std::condition_variable changed_;
    Ring<Task> queue_;
    std::optional<Error> first_error_;
    std::vector<std::weak_ptr<Group>> splits_;
    bool stopping_ = false;
    std::thread thread_;

    const ForkMark fork_;
    // A thread is in a call.
    mutable std::atomic<bool> issuing_{false};
    const char several_ = 0;                                  // its address stands for in_one_call
    static constinit thread_local const Group* progressing_;  // the group whose progress thread this is
    bool in_job_ = false;                                     // the progress thread's: inside a job
    bool orphaned_ = false;                                   // the progress thread's: it dropped the last reference
};

}  // namespace tsr
