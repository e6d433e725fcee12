#include "checkpoint/save/saver.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "base/thread.hpp"
#include "checkpoint/root/root.hpp"
#include "checkpoint/save/agreement.hpp"
#include "comm/inner_options.hpp"

namespace tsr {

namespace {

constexpr int stage_threads = 2;

std::shared_ptr<Communicator> private_comm(const std::shared_ptr<Communicator>& comm, const SaverOptions& options,
                                           std::string_view name) {
    if (!comm || comm->world_size() == 1) return nullptr;
    CommOptions own = inner_options(*comm, fmt::format(".{}", name));
    own.timeout = options.timeout;
    return comm->split(0, comm->rank(), own);
}

std::unique_ptr<SaveWriter> writer_of(SaveFormat format, const SaveContent& content) {
    return format == SaveFormat::torch_dcp ? torch_dcp_save_writer(content) : native_save_writer(content);
}

}  // namespace

Saver::Saver(const std::shared_ptr<Communicator>& comm, std::string root, SaverOptions options)
    : options_(std::move(options)),
      files_(options_.files != nullptr ? *options_.files : posix_file_system()),
      root_(options_.files != nullptr ? std::move(root) : absolute(root)),
      parent_(comm),
      comm_(private_comm(comm, options_, "saver")),
      peers_(comm_),
      copies_(options_.timeout) {
    auto error = attempt([&] {
        if (root_.empty()) throw Error(Code::invalid_argument, "the saver's root is empty");
        if (root_.find('\0') != std::string::npos || !is_utf8(root_)) {
            throw Error(Code::invalid_argument, "the saver's root is not valid UTF-8");
        }
        check_retention(options_.retention);
        // All ranks of a host stage at about the same time.
        pool_ = std::make_shared<StagingPool>(options_.staging_bytes, [this] {
            auto memory = options_.free_memory();
            if (memory) *memory /= ranks_here_;
            return memory;
        });
        pace_ = std::make_unique<Pace>(options_.write_bytes_per_s);
        while (root_.size() > 1 && root_.back() == '/') root_.pop_back();
    });
    if (options_.progress) {
        options_.progress = [this, tell = std::move(options_.progress)](Phase phase, int64_t done, int64_t total) {
            if (!silent_) tell(phase, done, total);
        };
    }
    struct Ballot {
        Digest root;
        Digest host;
        int32_t when_busy;
        int32_t format;
        int32_t check_replicas;
    };
    std::vector<Ballot> records;
    const Ballot record{digest_of(root_), digest_of(host_id()), static_cast<int32_t>(options_.when_busy),
                        static_cast<int32_t>(options_.format), static_cast<int32_t>(options_.check_replicas)};
    auto agreed = peers_.vote(error, record, records);
    if (agreed) throw Error(*agreed);
    ranks_here_ = static_cast<uint64_t>(
        std::count_if(records.begin(), records.end(), [&](const Ballot& other) { return other.host == record.host; }));
    for (size_t rank = 1; rank < records.size(); ++rank) {
        if (records[rank].root != records[0].root) {
            const std::vector<std::string> roots = peers_.gather(root_);
            throw Error(
                Code::mismatch,
                fmt::format("rank {}'s root differs from rank 0's: {} instead of {}; use the same path on every "
                            "rank",
                            rank, roots[rank], roots[0]))
                .with_peer(static_cast<int>(rank));
        }
        const char* what = nullptr;
        if (records[rank].when_busy != records[0].when_busy) {
            what = "when_busy";
        } else if (records[rank].format != records[0].format) {
            what = "format";
        } else if (records[rank].check_replicas != records[0].check_replicas) {
            what = "check_replicas";
        }
        if (what == nullptr) continue;
        throw Error(Code::mismatch, fmt::format("rank {}'s {} differs from rank 0's", rank, what))
            .with_peer(static_cast<int>(rank));
    }
    if (peers_.rank() == 0) {
        error = attempt([&] {
            writer_ = std::make_unique<RootWriter>(files_, root_, options_.lease, options_.retention,
                                                   options_.writer.language);
        });
    }
    agreed = peers_.vote(error);
    if (agreed) throw Error(*agreed);
    const bool low_priority = options_.priority == Priority::low;
    queue_ = std::make_unique<SaveQueue>(
        [low_priority] {
            if (low_priority && !lower_thread_priority())
                log::info("could not lower the priority of the saver's threads");
        },
        SaveQueue::Owner{root_, options_.progress != nullptr || options_.files != nullptr, options_.timeout});
}

Saver::~Saver() {
    queue_.reset();                                                  // while all that its saves use is still there
    if (owner_ != ::getpid()) static_cast<void>(writer_.release());  // a forked child's copy: the lease is its parent's
}

void Saver::keep_while_running(std::shared_ptr<const void> self) noexcept {
    if (queue_->keep_while_running(self) || Reentry::is_inside(this)) {
        silent_ = true;
        return;
    }
    if (!files_.is_in_callback()) return;
    silent_ = true;
    auto* last = new std::shared_ptr<const void>(std::move(self));  // NOLINT(cppcoreguidelines-owning-memory)
    try {
        // The saver's end waits for the thread that is in the callback.
        start_thread("tsr-closer", [last] { delete last; }).detach();  // NOLINT(cppcoreguidelines-owning-memory)
    } catch (const std::system_error& error) {
        log::warning("could not start a thread to close the saver of {} ({}); it stays open", root_, error.what());
    }
}

Reentry Saver::enter() const {
    if (queue_->is_own_thread() || files_.is_in_callback()) {
        throw Error(Code::invalid_state,
                    "a saver cannot be used in a callback of its own save or storage; use it on the thread that saves");
    }
    return {this, "saver of", root_};
}

Reentry Saver::enter_together() const {
    const auto parent = parent_.lock();
    if (parent && comm_) parent->refuse_in_turn("a call of a saver");
    return enter();
}

Peers& Saver::caller_peers() {
    if (caller_peers_) return *caller_peers_;
    // Splitting uses the private communicator, which belongs to the background save until that has ended.
    queue_->wait();
    caller_comm_ = private_comm(comm_, options_, "caller");
    caller_peers_.emplace(caller_comm_);
    return *caller_peers_;
}

void Saver::wait() {
    const Reentry once = enter();
    finish_former();
}

void Saver::finish_former() {
    queue_->wait();
    if (const auto error = queue_->failure(queue_->ended())) throw Error(*error);
}

void Saver::trim() { pool_->trim(); }

int64_t Saver::staging_size() const { return pool_->size_bytes(); }

void Saver::save(int64_t step, State& state) {
    const Reentry once = enter_together();
    SaveJob job;
    job.step = step;
    job.metrics = state.take_metrics();
    finish_former();
    prepare(peers_, job, state);
    run(job);
}

// Makes room for one more background save, or refuses it. The ranks first compare how far their earlier saves are, as
// all have to decide alike.
void Saver::admit() {
    if (options_.when_busy == WhenBusy::wait) return finish_former();
    struct Ballot {
        uint64_t ended;
        int32_t idle;
        int32_t withdrawn;
    };
    Peers& peers = caller_peers();
    const bool idle = queue_->idle();
    auto withdrawn = options_.when_busy == WhenBusy::replace ? queue_->withdraw() : nullptr;
    std::vector<Ballot> records;
    std::optional<Error> error;
    try {
        error = peers.vote(std::nullopt, Ballot{queue_->ended(), idle ? 1 : 0, withdrawn ? 1 : 0}, records);
    } catch (...) {
        queue_->put_back(std::move(withdrawn));
        throw;
    }
    bool all_idle = true;
    bool all_withdrew = true;
    uint64_t ended = UINT64_MAX;
    for (const Ballot& record : records) {
        all_idle = all_idle && record.idle != 0;
        all_withdrew = all_withdrew && record.withdrawn != 0;
        ended = std::min(ended, record.ended);
    }
    // A save that ended on every rank has the same outcome on every rank.
    if (!error) error = queue_->failure(ended);
    if (error || !all_withdrew) queue_->put_back(std::exchange(withdrawn, nullptr));  // begun elsewhere: it runs
    if (error) throw Error(*error);
    if (options_.when_busy == WhenBusy::refuse && !all_idle) {
        throw Error(Code::not_ready,
                    "a save is still in flight and when_busy is set to refuse; wait for it, save less often, or set "
                    "when_busy to wait")
            .retry_may_help()
            .with_operation("save");
    }
    if (withdrawn == nullptr) return;
    log::info("the save of step {} was replaced by a newer one before it began", withdrawn->step);
    withdrawn->run = nullptr;  // gives its staging memory back
    withdrawn->work->end(Error(
        Code::aborted,
        fmt::format("the save of step {} was replaced by a newer one before it began (when_busy)", withdrawn->step)));
}

std::shared_ptr<SaveWork> Saver::save_async(int64_t step, State& state) {
    const Reentry once = enter_together();
    auto job = std::make_shared<SaveJob>();
    job->step = step;
    job->metrics = state.take_metrics();
    admit();
    prepare(caller_peers_ ? *caller_peers_ : peers_, *job, state);
    auto save = std::make_shared<SaveQueue::Save>();
    save->step = step;
    save->run = [this, job] { run(*job); };
    const auto work = save->work;
    // The generation ties the staged bytes to this call.
    job->staging =
        std::make_shared<Staging>(pool_, ++generation_, std::move(job->data), options_.timeout,
                                  options_.copies == Copies::on_demand ? state.barriers() : Barriers(), work->staged());

    const auto stage = [&] {
        if (!job->error) job->error = attempt([&] { job->staging->stage(stage_threads, options_.progress); });
    };
    const bool fits = job->staging->fits();
    if (!queue_->start() && !fits && !job->error) {
        // Without a thread nothing empties the ring while this thread fills it: write the tensors directly, in this
        // call.
        job->data.clear();
        for (size_t i = 0; i < job->file_count; ++i) job->data.push_back(job->staging->original(i));
        job->staging->close();
        job->staging = nullptr;
        queue_->push(std::move(save));
        return work;
    }
    if (!job->error && !fits) {
        // Data passes through a ring once. Where checksums precede it in the file, compute them from the tensors.
        job->error = attempt([&] {
            for (size_t i = 0; i < job->file_count; ++i) {
                job->writer->compute_checksums(i, job->staging->original(i), files_.writes_in_order(),
                                               options_.write.threads);
            }
        });
    }
    if (job->error || fits) {
        stage();
        queue_->push(std::move(save));
        return work;
    }
    // A ring: the writer runs while this thread stages, and reports what staging throws.
    queue_->push(std::move(save));
    try {
        job->staging->stage(1, options_.progress);
    } catch (const Error& error) {
        log::warning("staging the save of step {} failed: {}", step, error.what());
    }
    return work;
}

bool Saver::should_stop(int64_t step, bool told) {
    const Reentry once = enter_together();
    counter_.count(step);
    if (stop_agreed_) return true;
    if (peers_.world_size() == 1) return stop_agreed_ = told;
    (void)caller_peers();
    // The maximum of the step and of its complement: these are complements of each other only if all steps are equal.
    std::array<int64_t, 3> numbers{told ? 1 : 0, step, ~step};
    const Tensor tensor = tensor_of(std::span<int64_t>(numbers), DType::i64);
    Request request;
    request.collective = Collective::all_reduce;
    request.outputs = std::span(&tensor, 1);
    request.op = ReduceOp::max;
    request.label = "agreement to stop";
    caller_comm_->run(request);
    if (numbers[1] != ~numbers[2]) {
        throw Error(Code::mismatch, fmt::format("ranks call should_stop at different steps: {} to {}, this rank at {}",
                                                ~numbers[2], numbers[1], step));
    }
    stop_agreed_ = numbers[0] != 0;
    return stop_agreed_;
}

void Saver::prepare(Peers& peers, SaveJob& job, const State& state) {
    agree_on_state(peers, root_, options_.plan, options_.check_replicas, plans_, job, state, copies_);
    if (job.error) return;
    job.error = attempt([&] {
        for (const auto& copy : state.shared_copies()) copy->check_whole();
        state.follow(copies_);
        job.writer = writer_of(
            options_.format, {*job.plan, job.aliases, job.values, job.save_id, job.directory, peers.rank(), &copies_});
        job.data = job.writer->lay_out(state);
        job.file_count = job.data.size();
        for (const ByteRuns& data : job.data) job.data_bytes += data.size();
    });
}

void Saver::run(SaveJob& job) {
    try {
        write_and_commit(job);
    } catch (...) {
        add_to(meter().failed_saves, 1);
        throw;
    }
    count_save(job.step, job.asked, static_cast<uint64_t>(job.data_bytes));
}

void Saver::write_and_commit(SaveJob& job) {
    // On every way out, release those who wait for the writer.
    struct Closes {
        SaveJob& job;
        ~Closes() {
            if (job.staging) job.staging->close();
        }
    } const closes{job};
    const auto started = Clock::now();
    const auto vote = [&](const std::optional<Error>& mine) {
        const auto agreed = peers_.vote(mine);
        if (!agreed) return;
        if (job.begun) writer_->abandon(job.directory);
        throw Error(agreed->with_operation("save"));
    };
    if (job.staging && !job.error) job.error = attempt([&] { job.staging->copy_late(stage_threads); });
    if (writer_ && !job.error) {
        job.error = attempt([&] {
            writer_->begin(job.directory);
            job.begun = true;
        });
    }
    vote(job.error);

    vote(attempt([&] { write_files(job); }));
    const std::vector<std::string> reports = peers_.gather(job.writer->report());

    std::optional<Error> error;
    if (writer_) {
        Progress progress(options_.progress, Phase::commit, 0);
        error = attempt([&] { writer_->commit(job.directory, finish_files(job, reports)); });
        if (!error) progress.finish();
    }
    if (!tell_of_commit(job, error)) return;
    if (writer_) {
        log::info("committed {} in {} ms", job.directory,
                  std::chrono::duration_cast<milliseconds>(Clock::now() - started).count());
    }
}

void Saver::write_files(SaveJob& job) {
    std::optional<HeldDirectory> own;
    if (!writer_) own.emplace(files_, root_, job.directory);
    FileSystem& files = writer_ ? writer_->files() : own->files();
    Progress progress(options_.progress, Phase::write, job.data_bytes);
    WriteOptions options = options_.write;
    options.pace = pace_.get();
    options.progress = &progress;
    for (size_t index = 0; index < job.file_count; ++index) {
        const auto staged = job.staging ? job.staging->source(index) : nullptr;
        job.writer->write(files, index, staged ? *staged : job.data[index], options);
    }
    progress.finish();
}

Manifest Saver::finish_files(SaveJob& job, const std::vector<std::string>& reports) {
    Manifest manifest;
    job.writer->finish(writer_->files(), reports, manifest);
    manifest.step = job.step;
    manifest.save_id = job.save_id;
    manifest.writer = options_.writer;
    manifest.world_size = peers_.world_size();
    manifest.values = std::move(job.values);
    manifest.metrics = std::move(job.metrics);
    return manifest;
}

// The last vote: rank 0 reports the outcome of the commit. False if it is committed, but not every rank was notified.
bool Saver::tell_of_commit(const SaveJob& job, const std::optional<Error>& error) {
    std::optional<Error> agreed;
    try {
        agreed = peers_.vote(error);
    } catch (const Error& lost) {
        // Rank 0 knows; the others can only look at the files. The lost rank need not be rank 0, which may yet commit.
        if (writer_) {
            if (error) throw Error(error->with_operation("save"));
            log::warning("{} is committed, but not every rank could be notified: {}", job.directory, lost.what());
            return false;
        }
        const std::string manifest = join(job.directory, manifest_name);
        bool committed = false;
        try {
            committed = exists(files_, manifest);
        } catch (const Error&) {
            committed = false;
        }
        if (committed) {
            log::warning("{} is committed, but the last vote failed: {}", job.directory, lost.what());
            return false;
        }
        const int peer = lost.record()->peer;
        throw Error(Code::commit_unknown,
                    fmt::format("{} after all ranks had written {}; the checkpoint is committed if {} appears",
                                peer >= 0 ? fmt::format("rank {} was lost", peer) : "the last vote failed",
                                job.directory, manifest))
            .with_peer(peer)
            .with_operation("save")
            .caused_by(lost);
    }
    if (!agreed) return true;
    if (job.begun) writer_->abandon(job.directory);
    throw Error(agreed->with_operation("save"));
}

int64_t Saver::resume(State& state) {
    const Reentry once = enter_together();
    finish_former();
    // Rank 0 looks: other ranks' views of a shared directory may be older.
    std::string newest;
    std::optional<Error> error;
    if (peers_.rank() == 0) {
        error = attempt([&] { newest = newest_save(files_, root_).value_or(""); });
        if (error) {
            error = not_resumed(*error);
        } else {
            error = attempt([&] {
                const std::string latest = join(root_, latest_name);
                if (!newest.empty() || !exists(files_, latest)) return;
                throw Error(Code::corrupt,
                            fmt::format("{} names a save, but {} holds no committed save: saves were removed or "
                                        "lost; remove {} to start over",
                                        latest, root_, latest));
            });
        }
    }
    if (const auto agreed = peers_.vote(error)) throw Error(agreed->with_operation("resume"));
    newest = peers_.from_rank0(newest);
    if (newest.empty()) return 0;
    std::shared_ptr<const Checkpoint> checkpoint;
    error = attempt([&] { checkpoint = Checkpoint::open(join(root_, newest), files_); });
    if (const auto agreed = peers_.vote(error)) throw not_resumed(*agreed);
    LoadOptions load;
    load.progress = options_.progress;
    load.comm = comm_;
    load.least_shared_bytes = options_.least_shared_bytes;
    load.timeout = options_.timeout;
    if (const auto failed = attempt([&] { (void)checkpoint->load(state, load); })) {
        throw not_resumed(*failed);
    }
    return checkpoint->manifest().step;
}

// Falling back to a save before a damaged one is the caller's decision.
Error Saver::not_resumed(const Error& why) const {
    Error error = why.with_operation("resume");
    if (error.code() != Code::corrupt) return error;
    return error.with_advice(
        fmt::format("to continue from an older save, move the damaged one out of {} and resume again (`tessera ckpt "
                    "ls {}` lists the saves, `tessera ckpt verify` checks one in full)",
                    root_, root_));
}

}  // namespace tsr
