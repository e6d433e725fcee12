// Writes checkpoints under one root and loads the newest: the collective side of checkpoint/. A save agrees on the
// state (nothing is written if ranks differ), creates the directory, writes the rank files and votes. If all ranks vote
// yes, rank 0 writes the manifest. Until then the checkpoint does not exist and the previous one is untouched.
//
// Not thread-safe: use a saver from one thread. Background saves run one after the other on their own thread, which has
// the private communicator to itself. What the caller's thread has to compare meanwhile goes over a second one.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/meter.hpp"
#include "base/reentry.hpp"
#include "checkpoint/formats/save_writer.hpp"
#include "checkpoint/io/pace.hpp"
#include "checkpoint/io/progress.hpp"
#include "checkpoint/io/stream.hpp"
#include "checkpoint/load/checkpoint.hpp"
#include "checkpoint/model/plan.hpp"
#include "checkpoint/root/root_writer.hpp"
#include "checkpoint/save/replicas.hpp"
#include "checkpoint/save/save_queue.hpp"
#include "checkpoint/save/staging.hpp"
#include "comm/communicator.hpp"
#include "comm/peers.hpp"
#include "comm/work.hpp"

namespace tsr {

struct SaveJob;

// What save_async does while another save is in flight.
enum class WhenBusy : int32_t {
    wait = 0,
    refuse = 1,   // throws NOT_READY
    replace = 2,  // one save waits behind the running one; a newer one replaces it
};
enum class Priority { normal, low };
// When save_async copies memory that an optimizer of the state owns: before it returns, or later, at the latest when
// the optimizer's next step is about to change it.
enum class Copies { at_once, on_demand };

struct SaverOptions {
    Retention retention;
    SaveFormat format = SaveFormat::native;
    milliseconds timeout{600000};
    WhenBusy when_busy = WhenBusy::wait;
    Priority priority = Priority::normal;  // of saves in the background
    Copies copies = Copies::at_once;
    CheckReplicas check_replicas = CheckReplicas::no;
    int64_t staging_bytes = 0;  // limit of the memory for copies of the state; 0: as much as needed
    StagingPool::FreeMemory free_memory = available_memory;  // of this host, shared by all its ranks
    int64_t write_bytes_per_s = 0;                           // of this rank; 0: no limit
    ProgressFn progress;  // WRITE and COMMIT of a background save: on its thread; everything else: on the caller's
    WrittenBy writer;
    FileSystem* files = nullptr;  // nullptr: the operating system
    LeaseTimes lease;
    PlanOptions plan;
    WriteOptions write;
    int64_t least_shared_bytes = LoadOptions{}.least_shared_bytes;  // of a resume
};

class Saver {
   public:
    // Collective. Splits a private communicator off `comm`, which may be nullptr (one rank).
    Saver(const std::shared_ptr<Communicator>& comm, std::string root, SaverOptions options);
    ~Saver();
    Saver(const Saver&) = delete;
    Saver& operator=(const Saver&) = delete;

    // Returns when the checkpoint is committed; otherwise every rank throws the same error. Like save_async, takes the
    // state's metrics in any case.
    void save(int64_t step, State& state);
    // Copies what this rank writes and returns. The work is done when the checkpoint is committed. If the staging
    // memory is smaller than the state, part of it is written before this returns.
    [[nodiscard]] std::shared_ptr<SaveWork> save_async(int64_t step, State& state);
    // Waits for the background saves. Throws the first error that was not reported yet, once.
    void wait();
    // Collective, once per step: whether any rank passed `told`. True on every rank from the same step on.
    [[nodiscard]] bool should_stop(int64_t step, bool told);
    // Loads the newest committed checkpoint. Returns its step, or 0 if there is none.
    [[nodiscard]] int64_t resume(State& state);
    // Call before destroying a saver. In a callback of one of its calls or saves, this stops progress reports and keeps
    // `self` until the running background save has ended, as the callback cannot wait for it. In a callback of its
    // storage on another thread (of a background save or of the lease), the saver is destroyed after that callback has
    // returned.
    void keep_while_running(std::shared_ptr<const void> self) noexcept;
    // Frees the staging memory that no save in flight uses.
    void trim();
    [[nodiscard]] int64_t staging_size() const;  // bytes

    [[nodiscard]] const std::string& root() const { return root_; }

   private:
    [[nodiscard]] Reentry enter() const;
    // Of a call that needs all ranks.
    [[nodiscard]] Reentry enter_together() const;
    void finish_former();
    void admit();
    [[nodiscard]] Peers& caller_peers();
    // Agrees with the others on the state, then lays out this rank's files.
    void prepare(Peers& peers, SaveJob& job, const State& state);
    void run(SaveJob& job);
    void write_and_commit(SaveJob& job);
    void write_files(SaveJob& job);
    // The manifest of the files that all ranks reported.
    [[nodiscard]] Manifest finish_files(SaveJob& job, const std::vector<std::string>& reports);
    bool tell_of_commit(const SaveJob& job, const std::optional<Error>& error);
    [[nodiscard]] Error not_resumed(const Error& why) const;

    SaverOptions options_;
    FileSystem& files_;
    std::string root_;
    std::weak_ptr<Communicator> parent_;  // of comm_
    std::shared_ptr<Communicator> comm_;
    Peers peers_;  // over comm_; of the save that runs
    std::shared_ptr<Communicator> caller_comm_;
    std::optional<Peers> caller_peers_;  // over caller_comm_; set on first use
    CopyStreams copies_;                 // outlives the staging memory
    PlanCache plans_;
    uint64_t ranks_here_ = 1;  // on this host
    std::shared_ptr<StagingPool> pool_;
    std::unique_ptr<Pace> pace_;
    std::unique_ptr<RootWriter> writer_;  // rank 0's
    uint64_t generation_ = 0;             // counts the background saves; stamped on staged chunks
    bool stop_agreed_ = false;
    StepCounter counter_{StepCounter::Of::loop};
    std::atomic<bool> silent_{false};
    pid_t owner_ = ::getpid();
    std::unique_ptr<SaveQueue> queue_;
};

}  // namespace tsr
