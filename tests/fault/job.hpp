// A job of one or several ranks that saves into a file system in memory, and may fail or die at any of its file
// operations. Ranks are threads that take turns: only one of them runs at a time, and a seed says which goes on after
// each file operation. So the same plan always does the same in the same order, whatever the machine does meanwhile.
// What lies on the disk afterwards is looked at by the functions below, as a new process would.
#pragma once

#include <gtest/gtest.h>

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/export/export.hpp"
#include "checkpoint/fixture.hpp"
#include "checkpoint/formats/torch_dcp/writer.hpp"
#include "checkpoint/formats/torch_dcp/zip.hpp"
#include "checkpoint/root/retention.hpp"
#include "checkpoint/root/root.hpp"
#include "fault/faulty_files.hpp"
#include "fault/memory_files.hpp"
#include "patience.hpp"
#include "sanitized.hpp"

namespace tsr::testing {

inline const std::string root = "/data/root";

// Where ranks meet for a collective, and who runs. A rank that waits in a meeting gives its turn away.
class Turns final : public Meeting {
   public:
    Turns(int ranks, uint64_t seed) : Meeting(ranks), states_(static_cast<size_t>(ranks)), random_(seed) {}

    void begin(int rank) {
        std::unique_lock lock(mutex_);
        wait_for_turn(lock, rank);
    }
    // Between two file operations: another rank may go on first.
    void pause(int rank) {
        std::unique_lock lock(mutex_);
        pass_on();
        wait_for_turn(lock, rank);
    }
    std::vector<std::string> meet(int rank, std::string mine) override {
        std::unique_lock lock(mutex_);
        State& state = at(rank);
        if (state.dead) {
            lose(rank);
            throw Error(Code::aborted, "this rank is dead");
        }
        if (lost_ >= 0) throw_lost();
        state.brought = std::move(mine);
        state.waits = true;
        bool all = true;
        for (const State& one : states_) all = all && one.waits;
        if (all) {
            result_.clear();
            for (State& one : states_) {
                result_.push_back(one.brought);
                one.waits = false;
                one.met = true;
            }
        }
        pass_on();
        wait_for_turn(lock, rank);
        if (!state.met) throw_lost();
        state.met = false;
        return result_;  // the next meeting needs this rank, so it is still of this one
    }
    void leave(int rank) override {
        const std::lock_guard lock(mutex_);
        lose(rank);
    }
    void end(int rank, bool lost) {
        const std::lock_guard lock(mutex_);
        if (lost) lose(rank);
        at(rank).ended = true;
        pass_on();
    }
    // From now on `rank` (-1: every rank) reads, writes and tells nothing any more.
    void kill(int rank) {
        const std::lock_guard lock(mutex_);
        for (size_t i = 0; i < states_.size(); ++i) {
            if (rank < 0 || i == static_cast<size_t>(rank)) states_[i].dead = true;
        }
    }
    bool is_dead(int rank) {
        const std::lock_guard lock(mutex_);
        return at(rank).dead;
    }

   private:
    struct State {
        bool waits = false;  // in a meeting that is not complete
        bool met = false;    // the meeting it waited for took place
        bool ended = false;
        bool dead = false;
        std::string brought;
        std::condition_variable called;  // it is this rank's turn
    };
    State& at(int rank) { return states_[static_cast<size_t>(rank)]; }
    void lose(int rank) {
        if (lost_ < 0) lost_ = rank;
        for (State& one : states_) one.waits = false;
    }
    [[noreturn]] void throw_lost() const {
        throw Error(Code::peer_lost, "rank " + std::to_string(lost_) + " is gone").with_peer(lost_);
    }
    void pass_on() {
        std::vector<int> able;
        for (size_t i = 0; i < states_.size(); ++i) {
            if (!states_[i].waits && !states_[i].ended) able.push_back(static_cast<int>(i));
        }
        if (able.empty()) return;
        running_ = able[random_() % able.size()];
        at(running_).called.notify_all();  // it alone wakes
    }
    void wait_for_turn(std::unique_lock<std::mutex>& lock, int rank) {
        if (!at(rank).called.wait_for(lock, patience(std::chrono::seconds(60)), [&] { return running_ == rank; })) {
            throw Error(Code::timeout, "the other ranks never came to a meeting");
        }
    }

    std::mutex mutex_;  // guards all below
    std::vector<State> states_;
    std::vector<std::string> result_;
    std::mt19937_64 random_;
    int running_ = 0;
    int lost_ = -1;
};

// What a rank of a job has in hand.
struct Seat {
    int rank;
    int ranks;
    std::shared_ptr<Communicator> comm;  // nullptr if it is alone
    FileSystem& files;
};

class Job {
   public:
    // Says what becomes of a call: its number among those of all ranks, in the order of turns, and whose it is.
    using Judge = std::function<Verdict(Job& job, int64_t number, int rank, const FaultyFiles::Call& call)>;

    Job(FileSystem& files, int ranks, uint64_t schedule, Judge judge = {})
        : files_(files), ranks_(ranks), turns_(std::make_shared<Turns>(ranks, schedule)), judge_(std::move(judge)) {}

    Outcomes run(const std::function<void(const Seat& seat)>& body) {
        return run_threads(ranks_, [&](int rank) {
            FaultyFiles own(files_, [this, rank](const FaultyFiles::Call& call) { return before(rank, call); });
            const auto comm = ranks_ > 1 ? std::make_shared<MeetingComm>(turns_, rank, ranks_) : nullptr;
            turns_->begin(rank);
            try {
                body({rank, ranks_, comm, own});
            } catch (...) {
                turns_->end(rank, true);
                throw;
            }
            turns_->end(rank, turns_->is_dead(rank));
        });
    }
    void kill(int rank) { turns_->kill(rank); }
    [[nodiscard]] int64_t calls() const { return calls_; }
    [[nodiscard]] bool is_dead(int rank) { return turns_->is_dead(rank); }

   private:
    Verdict before(int rank, const FaultyFiles::Call& call) {
        turns_->pause(rank);
        if (turns_->is_dead(rank)) return {-EIO, 0};
        const int64_t number = calls_++;
        return judge_ ? judge_(*this, number, rank, call) : Verdict{};
    }
    FileSystem& files_;
    int ranks_;
    std::shared_ptr<Turns> turns_;
    Judge judge_;
    std::atomic<int64_t> calls_{0};
};

// Sharded, replicated and split tensors, values of the job and of each rank. `salt` is the step that it is saved at. A
// save in the background copies the bias at once, and late what belongs to the barrier, as to an optimizer's.
inline void build(OwnedState& owned, int rank, int ranks) {
    owned.add_whole({"model.bias", DType::f64, {5}});
    owned.add_whole({"optim.moment", DType::f32, {1100}});  // split over its replicas
    const Spec weight{"model.weight", DType::f32, {30, 50}};
    if (ranks > 1) {
        const Placement rows = Placement::shard(0);
        owned.add_sharded(weight, Layout::placed(weight.shape, std::span(&ranks, 1), std::span(&rows, 1)), rank);
    } else {
        owned.add_whole(weight);
    }
    std::vector<Memory> late;
    for (const char* name : {"optim.moment", "model.weight"}) {
        const StateTensor& tensor = owned.state.tensors().find(name)->second;
        for (size_t i = 0; i < tensor.memory.size(); ++i) {
            late.emplace_back(tensor.memory[i], tensor.piece(i).size_bytes());
        }
    }
    owned.state.add_barrier(std::make_shared<WriteBarrier>(std::move(late)));
}

inline void set_content(OwnedState& owned, int rank, int64_t step) {
    owned.fill(static_cast<uint64_t>(step));
    owned.state.set_value("epoch", Json(step));
    owned.state.set_value("rank/" + std::to_string(rank) + "/position", Json(step * 100 + rank));
}

inline bool has_content(OwnedState& owned, int rank, int64_t step) {
    return owned.differences(static_cast<uint64_t>(step)) == 0 && owned.state.value("epoch").as_int() == step &&
           owned.state.value("rank/" + std::to_string(rank) + "/position").as_int() == step * 100 + rank;
}

inline SaverOptions job_options(FileSystem& files, int keep_latest) {
    SaverOptions options = saver_options();
    options.files = &files;
    options.retention.latest = keep_latest;
    options.copies = Copies::on_demand;
    options.write.threads = 1;  // so that calls come in the same order in every run
    options.plan.pack_bytes = 1000;
    options.plan.split_bytes = 4000;
    return options;
}

enum class Mode { sync, async };

inline void save_step(Saver& saver, OwnedState& owned, int rank, int64_t step, Mode mode) {
    set_content(owned, rank, step);
    if (mode == Mode::sync) {
        saver.save(step, owned.state);
    } else {
        (void)saver.save_async(step, owned.state);
        for (const auto& barrier : owned.state.barriers()) barrier->before_write_all();
        owned.poison();
        saver.wait();
    }
}

// The newest checkpoint, as one rank without a saver sees it: its step, 0 if the root holds none, or what is wrong with
// it, above all content that is not that of one save.
struct Found {
    int64_t step = 0;
    std::string fault;
};
inline Found find_newest(FileSystem& files) {
    OwnedState owned;
    build(owned, 0, 1);
    set_content(owned, 0, 99);
    owned.poison();
    Found found;
    try {
        const auto checkpoint = Checkpoint::open(root, files);
        (void)checkpoint->load(owned.state);
        found.step = checkpoint->manifest().step;
    } catch (const Error& error) {
        if (error.code() != Code::not_found) found.fault = error.what();
        return found;
    }
    if (!has_content(owned, 0, found.step)) {
        found.fault = "the checkpoint of step " + std::to_string(found.step) + " holds something else";
    }
    return found;
}
inline int64_t newest_content(FileSystem& files) {
    const Found found = find_newest(files);
    EXPECT_EQ(found.fault, "");
    return found.fault.empty() ? found.step : -1;
}

// --- between two lives ---

// Nobody lives any more who left a lease behind: those of this process were of one that is gone, or, after a power loss,
// of the machine before it was started again.
enum class Afterwards { process_is_gone, machine_was_restarted };
inline void bury(Disk& disk, Afterwards how) {
    disk.for_each_file([&](const std::string& path, const std::string& text) {
        const std::string_view name = name_in_path(path);
        if (!name.starts_with(owner_name) && !name.starts_with(writing_name)) return text;
        try {
            Holder holder = Holder::parse(text);
            if (how == Afterwards::process_is_gone) {
                holder.start_time -= 1;
            } else {
                holder.machine = "a boot before this one";
            }
            return holder.dump();
        } catch (const Error&) {
            return text;  // cut short
        }
    });
}

// A minute and more: whoever has renewed nothing meanwhile is dead on any machine.
inline constexpr std::chrono::seconds lease_runs_out{61};

// The names of everything below the root that a sound root does not hold.
inline std::set<std::string> leftovers(FileSystem& files) {
    std::set<std::string> found;
    std::vector<std::string> names;
    if (files.list(root, names) < 0) return found;
    const std::vector<SavedStep> saves = scan_root(files, root);
    for (const std::string& name : names) {
        if (name != latest_name && name != best_name && !is_step_directory_name(name)) found.insert(name);
    }
    for (const SavedStep& save : saves) {
        if (!save.committed) found.insert(save.directory);
        (void)files.list(join(root, save.directory), names);
        for (const std::string& name : names) {
            // A lease beside a manifest is one that a crash kept from being removed; it goes with its save.
            const bool belongs = is_rank_file_name(name) || is_dcp_file_name(name) || name == dcp_metadata_name;
            if (!belongs && name != manifest_name && name != writing_name) {
                found.insert(join(save.directory, name));
            }
        }
    }
    return found;
}

// A new job on what a crash left: it resumes from the newest content, and saves. When leases have run out, a second one
// collects all that the dead left. Returns the step that was resumed from.
inline int64_t go_on(MemoryFiles& files, int64_t next_step, int keep_latest) {
    const int64_t found = newest_content(files);
    OwnedState owned;
    build(owned, 0, 1);
    set_content(owned, 0, 99);
    int64_t resumed = -1;
    {
        Saver saver(nullptr, root, job_options(files, keep_latest));
        resumed = saver.resume(owned.state);
        EXPECT_EQ(resumed, found);
        EXPECT_TRUE(resumed <= 0 || has_content(owned, 0, resumed));
        save_step(saver, owned, 0, next_step, Mode::sync);
    }
    EXPECT_EQ(newest_content(files), next_step);
    return resumed;
}

inline void expect_collected(MemoryFiles& files, int64_t next_step, int keep_latest) {
    {
        OwnedState owned;
        build(owned, 0, 1);
        Saver saver(nullptr, root, job_options(files, keep_latest));
        save_step(saver, owned, 0, next_step, Mode::sync);
    }
    EXPECT_EQ(newest_content(files), next_step);
    EXPECT_EQ(leftovers(files), std::set<std::string>{});
    EXPECT_EQ(scan_root(files, root).size(), static_cast<size_t>(keep_latest));
    EXPECT_EQ(files.open_files(), 0);
}

// --- where a save begins ---

enum class Before {
    nothing,  // an empty file system: the first save makes root, lease and all
    saves,    // steps 1 and 2 are there and 2 are kept, and a writer on another machine died long ago
};

inline Disk disk_before(Before before, int ranks) {
    MemoryFiles files;
    if (before == Before::nothing) return files.disk();
    Job job(files, ranks, 0);
    expect_all_well(job.run([](const Seat& seat) {
        OwnedState owned;
        build(owned, seat.rank, seat.ranks);
        Saver saver(seat.comm, root, job_options(seat.files, 2));
        save_step(saver, owned, seat.rank, 1, Mode::sync);
        save_step(saver, owned, seat.rank, 2, Mode::sync);
    }));
    const std::string left = join(root, "step-00000002-deadbeef");
    if (files.make_directory(left) < 0) throw std::runtime_error("mkdir");
    Holder elsewhere = Holder::this_process("another");
    elsewhere.machine = "elsewhere";
    write_new_text(files, join(left, writing_name), elsewhere.dump());
    write_new_text(files, join(left, "rank-00000.safetensors"), "half of it");
    write_new_text(files, join(left, "manifest.json.tmp-deadbeef"), "{");
    sync_directory(files, left);
    sync_directory(files, root);
    Disk disk = files.disk();
    disk.pass(lease_runs_out);
    return disk;
}

// The saves that are made to fail or to die.
struct SaveCase {
    int ranks;
    Mode mode;
    Before before;
    SaveFormat format = SaveFormat::native;
    [[nodiscard]] int64_t old_step() const { return before == Before::saves ? 2 : 0; }
    [[nodiscard]] std::string str() const {
        return fmt::format("{} rank{}, {}, {}{}", ranks, ranks > 1 ? "s" : "", mode == Mode::sync ? "sync" : "async",
                           before == Before::saves ? "a later save" : "the first save",
                           format == SaveFormat::torch_dcp ? ", as torch_dcp" : "");
    }
};

inline const std::vector<SaveCase>& all_save_cases() {
    static const std::vector<SaveCase> cases = [] {
        std::vector<SaveCase> list;
        for (const int ranks : {1, 3}) {
            for (const Mode mode : {Mode::sync, Mode::async}) {
                for (const Before before : {Before::nothing, Before::saves}) list.push_back({ranks, mode, before});
            }
        }
        return list;
    }();
    return cases;
}

inline std::vector<SaveCase> save_cases_in(SaveFormat format) {
    std::vector<SaveCase> cases = all_save_cases();
    for (SaveCase& one : cases) one.format = format;
    return cases;
}

// --- exports of a save ---

inline const std::string exported = "/data/out";
inline constexpr ExportFormat export_formats[] = {ExportFormat::safetensors, ExportFormat::torch_dcp,
                                                  ExportFormat::torch_save, ExportFormat::npz};

// Of the newest save, which is read without faults: a rank reads by several threads.
inline void export_newest(const Seat& seat, FileSystem& sound, ExportFormat format) {
    ExportOptions options;
    options.format = format;
    options.batch_bytes = 3000;  // several a rank
    Peers peers(seat.comm);
    (void)export_checkpoint(*Checkpoint::open(root, sound), peers, exported, options, seat.files);
}

inline std::string bytes_of(const Checkpoint& checkpoint, const std::string& name) {
    const SavedTensor& tensor = *checkpoint.manifest().find(name);
    std::string bytes(static_cast<size_t>(tensor.size_bytes()), '\0');
    checkpoint.read(name, {reinterpret_cast<std::byte*>(bytes.data()), tensor.shape, tensor.dtype, {}});
    return bytes;
}

// NumPy's archive, which is no checkpoint that is opened.
inline void expect_npz(FileSystem& files, const std::string& path, const Checkpoint& source) {
    const auto file = open_file(files, path, OpenMode::read);
    PartReader part(*file, path, 0, file->size());
    const ZipArchive archive = ZipArchive::read(part);
    EXPECT_EQ(archive.entries().size(), source.names().size());
    for (const std::string& name : source.names()) {
        const ZipEntry* entry = archive.find(name + ".npy");
        ASSERT_NE(entry, nullptr) << name;
        const std::string array = archive.read_entry(part, *entry, 1 << 20);  // of the checksum in its directory
        EXPECT_TRUE(array.starts_with("\x93NUMPY") && array.ends_with(bytes_of(source, name))) << name;
    }
}

// Whether the export is there; and then it is the newest save's tensors, every bit.
inline bool has_export(FileSystem& files) {
    if (!exists(files, exported)) return false;
    try {
        const auto source = Checkpoint::open(root, files);
        if (const std::string npz = join(exported, "model.npz"); exists(files, npz)) {
            expect_npz(files, npz, *source);
            return true;
        }
        const auto found = Checkpoint::open(exported, files);
        EXPECT_EQ(found->verify(Depth::everything), std::vector<std::string>{});
        EXPECT_EQ(found->names(), source->names());
        for (const std::string& name : source->names()) EXPECT_EQ(bytes_of(*found, name), bytes_of(*source, name));
    } catch (const Error& error) {
        ADD_FAILURE() << "half an export: " << error.what();
    }
    return true;
}

// A number from the environment, for ./dev fault.
inline uint64_t from_environment(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody sets it
    return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace tsr::testing
