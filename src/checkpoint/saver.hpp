// Writes checkpoints under one root and loads the newest: the collective side of checkpoint/. A save is: agree on the
// state (nothing is written if ranks differ), make the directory, write rank files, vote, and, when all voted yes, rank
// 0 writes the manifest. Until then the checkpoint does not exist and the one before it is untouched.
//
// Used by one thread. A save in the background has the private communicator and the staging memory to itself: every
// other call waits for it first.
#pragma once

#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "base/reentry.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/native/lease.hpp"
#include "checkpoint/native/plan.hpp"
#include "checkpoint/native/writer.hpp"
#include "checkpoint/peers.hpp"
#include "comm/communicator.hpp"
#include "comm/work.hpp"

namespace tsr {

// How saves are written. torch_dcp: an unmodified PyTorch reads the save's directory by torch.distributed.checkpoint.
enum class SaveFormat { native, torch_dcp };

struct SaverOptions {
    int keep_latest = 0;  // 0: all
    SaveFormat format = SaveFormat::native;
    milliseconds timeout{600000};
    Writer writer;
    FileSystem* files = nullptr;  // nullptr: the operating system's
    LeaseTimes lease;
    PlanOptions plan;
    WriteOptions write;
};

class Saver {
   public:
    // Collective; `comm` may be nullptr (one rank). A private communicator is split off.
    Saver(const std::shared_ptr<Communicator>& comm, std::string root, SaverOptions options);
    ~Saver();
    Saver(const Saver&) = delete;
    Saver& operator=(const Saver&) = delete;

    // Returns when the checkpoint is committed; every rank throws the same error else.
    void save(int64_t step, const State& state);
    // Copies what this rank writes and returns; the work is done when the checkpoint is committed.
    [[nodiscard]] WorkPtr save_async(int64_t step, const State& state);
    // Waits for the save in the background, if there is one; throws its error, once.
    void wait();
    // Loads the newest committed checkpoint; its step, or 0 if there is none.
    [[nodiscard]] int64_t resume(State& state);

    [[nodiscard]] const std::string& root() const { return root_; }

   private:
    struct Job;

    [[nodiscard]] Reentry enter() const { return {this, "saver of", root_}; }
    void finish_former();
    [[nodiscard]] std::unique_ptr<Job> prepare(int64_t step, const State& state, bool stage);
    // Copies the data into the staging memory, each at a multiple of 4096; where it begins.
    [[nodiscard]] const std::byte* stage(std::span<const ByteRuns> data);
    void agree_on_state(Job& job, const State& state, const Values& values, std::optional<Error> error);
    void run(Job& job);
    [[nodiscard]] std::string write_files(Job& job);  // this rank's; the report to rank 0
    void commit(Job& job, const std::vector<std::string>& reports);
    void tidy(const std::string& newest);
    void abandon(const Job& job) noexcept;
    // Whether the caller is the thread of the save in the background: a completion callback.
    [[nodiscard]] bool in_background() const;

    SaverOptions options_;
    FileSystem& files_;
    std::string root_;
    std::string id_;
    Peers peers_;
    std::unique_ptr<Lease> lease_;  // rank 0's
    AlignedBuffer staging_;         // kept from save to save, so that its pages are touched once
    std::thread background_;
    pid_t owner_ = ::getpid();
    WorkPtr in_flight_;  // until its error has been told
};

}  // namespace tsr
