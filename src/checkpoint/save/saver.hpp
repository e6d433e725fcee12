// Writes checkpoints under one root and loads the newest: the collective side of checkpoint/. A save is: agree on the
// state (nothing is written if ranks differ), make the directory, write rank files, vote, and, when all voted yes, rank
// 0 writes the manifest. Until then the checkpoint does not exist and the one before it is untouched.
//
// Used by one thread. Saves in the background run one after the other on a thread of their own, which has the private
// communicator to itself; what the caller's thread has to compare meanwhile goes over a second one.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
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
    replace = 2,  // one waits behind the one that runs; a newer one takes its place
};
enum class Priority { normal, low };
// When save_async copies what an optimizer of the state owns: before it returns, or late, at last when the optimizer's next
// step is about to change it.
enum class Copies { at_once, on_demand };

struct SaverOptions {
    Retention retention;
    SaveFormat format = SaveFormat::native;
    milliseconds timeout{600000};
    WhenBusy when_busy = WhenBusy::wait;
    Priority priority = Priority::normal;  // of saves in the background
    Copies copies = Copies::at_once;
    CheckReplicas check_replicas = CheckReplicas::no;
    int64_t staging_bytes = 0;  // bound of the memory for copies of the state; 0: what it needs
    StagingPool::FreeMemory free_memory = available_memory;  // of this host, for all ranks on it
    int64_t write_bytes_per_s = 0;                           // of this rank; 0: no limit
    ProgressFn progress;  // WRITE and COMMIT of a save in the background: on its thread; all else: on the caller's
    WrittenBy writer;
    FileSystem* files = nullptr;  // nullptr: the operating system's
    LeaseTimes lease;
    PlanOptions plan;
    WriteOptions write;
    int64_t least_shared_bytes = LoadOptions{}.least_shared_bytes;  // of a resume
};

class Saver {
   public:
    // Collective; `comm` may be nullptr (one rank). A private communicator is split off.
    Saver(const std::shared_ptr<Communicator>& comm, std::string root, SaverOptions options);
    ~Saver();
    Saver(const Saver&) = delete;
    Saver& operator=(const Saver&) = delete;

    // Returns when the checkpoint is committed; every rank throws the same error else.
    // It takes the state's metrics, and so does save_async, whatever comes of it.
    void save(int64_t step, State& state);
    // Copies what this rank writes and returns; the work is done when the checkpoint is committed. If the staging memory
    // is bounded below the state's size, a part is written before this returns.
    [[nodiscard]] std::shared_ptr<SaveWork> save_async(int64_t step, State& state);
    // Waits for the saves in the background; throws the first error that was not told yet, once.
    void wait();
    // Collective, at each step: whether any rank was told to stop. True on every rank from the same step on.
    [[nodiscard]] bool should_stop(int64_t step, bool told);
    // Loads the newest committed checkpoint; its step, or 0 if there is none.
    [[nodiscard]] int64_t resume(State& state);
    // Whoever destroys a saver calls it before. In a callback of one of its calls or saves progress is told no more from
    // here on, and `self` is kept until the save that runs in the background has ended: nobody there can wait for it.
    // In a callback of its storage on any other thread, one of a background's or the lease's, it is destroyed when that
    // callback has returned.
    void keep_while_running(std::shared_ptr<const void> self) noexcept;
    // Frees the staging memory that no save in flight uses.
    void trim();
    [[nodiscard]] int64_t staging_size() const;  // bytes

    [[nodiscard]] const std::string& root() const { return root_; }

   private:
    [[nodiscard]] Reentry enter() const;
    void finish_former();
    void admit();
    [[nodiscard]] Peers& caller_peers();
    // Agrees with the others on the state, then lays out this rank's files.
    void prepare(Peers& peers, SaveJob& job, const State& state);
    void run(SaveJob& job);
    void write_files(SaveJob& job);
    // Of the files that all ranks reported.
    [[nodiscard]] Manifest finish_files(SaveJob& job, const std::vector<std::string>& reports);
    bool tell_of_commit(const SaveJob& job, const std::optional<Error>& error);
    [[nodiscard]] Error not_resumed(const Error& why) const;

    SaverOptions options_;
    FileSystem& files_;
    std::string root_;
    std::shared_ptr<Communicator> comm_;
    Peers peers_;  // over comm_; of the save that runs
    std::shared_ptr<Communicator> caller_comm_;
    std::optional<Peers> caller_peers_;  // over caller_comm_; from when it is needed
    PlanCache plans_;
    uint64_t ranks_here_ = 1;  // on this host
    std::shared_ptr<StagingPool> pool_;
    std::unique_ptr<Pace> pace_;
    std::unique_ptr<RootWriter> writer_;  // rank 0's
    uint64_t generation_ = 0;             // of what is staged: counts the saves in the background
    bool stop_agreed_ = false;
    std::atomic<bool> silent_{false};
    pid_t owner_ = ::getpid();
    std::unique_ptr<SaveQueue> queue_;
};

}  // namespace tsr
