#include "checkpoint/saver.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>

#include "base/crc32c.hpp"
#include "base/log.hpp"
#include "base/parallel.hpp"
#include "checkpoint/native/collect.hpp"
#include "checkpoint/native/root.hpp"
#include "checkpoint/torch_dcp/writer.hpp"

namespace tsr {

// One save, from the agreement to the commit.
struct Saver::Job {
    int64_t step = 0;
    std::string save_id;
    std::string directory;  // its path
    SavePlan plan;
    struct File {
        FileHeader header;
        ByteRuns data;
    };
    std::vector<File> files;
    std::vector<Piece> pieces;       // of the one file of SaveFormat::torch_dcp,
    std::vector<std::string> names;  // whose names these are
    Values values;                   // rank 0's, with every rank's private ones
    Aliases aliases;
    Values metrics;
    std::optional<Error> error;  // what this rank votes
    bool made_directory = false;
};

namespace {

constexpr int64_t stage_bytes = int64_t{16} << 20;
constexpr int stage_threads = 2;

int64_t staged_bytes(int64_t bytes) { return (bytes + direct_alignment - 1) / direct_alignment * direct_alignment; }

template <class Body>
std::optional<Error> attempt(Body&& body) {
    try {
        body();
        return std::nullopt;
    } catch (...) {
        return current_error();
    }
}

std::shared_ptr<Communicator> private_comm(const std::shared_ptr<Communicator>& comm, const SaverOptions& options) {
    if (!comm || comm->world_size() == 1) return nullptr;
    CommOptions own = comm->options();
    own.timeout = options.timeout;
    own.name = comm->name() + ".saver";
    return comm->split(0, comm->rank(), own);
}

Json to_json(const Values& values) {
    Json::Object members;
    for (const auto& [name, value] : values) members.push_back({name, value});
    return Json(std::move(members));
}

std::string report_of(const std::vector<SavedFile>& files) {
    Json::Array list;
    for (const SavedFile& file : files) {
        list.push_back(Json(Json::Array{Json(file.name), Json(file.size), Json(int64_t{file.header_crc})}));
    }
    return Json(std::move(list)).dump();
}

std::vector<SavedFile> files_of(std::string_view report) {
    std::vector<SavedFile> files;
    const Json list = Json::parse(report, "a rank's report");
    for (const Json& entry : list.as_array()) {
        const Json::Array& fields = entry.as_array();
        files.push_back(
            {fields.at(0).as_string(), fields.at(1).as_int(), static_cast<uint32_t>(fields.at(2).as_int())});
    }
    return files;
}

}  // namespace

Saver::Saver(const std::shared_ptr<Communicator>& comm, std::string root, SaverOptions options)
    : options_(std::move(options)),
      files_(options_.files != nullptr ? *options_.files : posix_file_system()),
      root_(std::move(root)),
      id_(random_id()),
      peers_(private_comm(comm, options_)) {
    auto error = attempt([&] {
        if (root_.empty()) throw Error(Code::invalid_argument, "the root of a saver is empty");
        if (root_.find('\0') != std::string::npos || !is_utf8(root_)) {
            throw Error(Code::invalid_argument, "the root of a saver is not UTF-8");
        }
        if (options_.keep_latest < 0) {
            throw Error(Code::invalid_argument,
                        fmt::format("keep_latest is {}; it is 0 (keep all) or more", options_.keep_latest));
        }
        while (root_.size() > 1 && root_.back() == '/') root_.pop_back();
    });
    std::vector<Digest> roots;
    auto agreed = peers_.vote(error, digest_of(root_), roots);
    if (agreed) throw Error(*agreed);
    for (size_t rank = 1; rank < roots.size(); ++rank) {
        if (roots[rank] != roots[0]) {
            throw Error(Code::mismatch, fmt::format("rank {} saves into another root than rank 0", rank))
                .with_peer(static_cast<int>(rank));
        }
    }
    if (peers_.rank() == 0) {
        error = attempt([&] {
            make_directories(files_, root_);
            lease_ = std::make_unique<Lease>(files_, root_, id_, options_.lease);
        });
    }
    agreed = peers_.vote(error);
    if (agreed) throw Error(*agreed);
}

Saver::~Saver() {
    if (owner_ != ::getpid()) {
        // A forked child has no such threads to join, and the lease is its parent's.
        if (background_.joinable()) background_.detach();
        static_cast<void>(lease_.release());
        return;
    }
    if (in_background()) {
        background_.detach();  // in the callback of its own save, which has ended
        return;
    }
    if (background_.joinable()) background_.join();  // its votes have deadlines
    const auto error = in_flight_ ? in_flight_->error() : std::nullopt;
    if (error) log::warning("a save in the background failed, and nobody waited for it: {}", error->what());
}

bool Saver::in_background() const { return background_.get_id() == std::this_thread::get_id(); }

void Saver::wait() {
    const Reentry once = enter();
    finish_former();
}

void Saver::finish_former() {
    if (!in_flight_) return;
    if (in_background()) {
        throw Error(Code::invalid_state,
                    "a saver is used in the completion callback of its own save; use it on the thread "
                    "that saves");
    }
    // The work's own deadline is that of its votes; waiting here only adds the interrupt callback.
    while (!in_flight_->done()) {
        try {
            in_flight_->wait(Deadline::in(std::chrono::hours{1}));
        } catch (const Error& error) {
            if (error.code() == Code::not_ready) continue;
            if (!in_flight_->done()) throw;  // interrupted: the save goes on
        }
    }
    if (background_.joinable()) background_.join();
    const auto error = std::exchange(in_flight_, nullptr)->error();
    if (error) throw Error(*error);
}

void Saver::save(int64_t step, const State& state) {
    const Reentry once = enter();
    finish_former();
    const auto job = prepare(step, state, false);
    run(*job);
}

WorkPtr Saver::save_async(int64_t step, const State& state) {
    const Reentry once = enter();
    finish_former();
    std::shared_ptr<Job> job = prepare(step, state, true);
    auto work = std::make_shared<Work>();
    const auto body = [this, job, work] { work->finish(attempt([&] { run(*job); })); };
    try {
        background_ = std::thread(body);
    } catch (const std::system_error& error) {
        // The other ranks count on this one's votes.
        log::warning("no thread for a save in the background ({}); it runs in the foreground", error.what());
        body();
    }
    in_flight_ = work;
    return work;
}

void Saver::agree_on_state(Job& job, const State& state, const Values& values, std::optional<Error> error) {
    struct Record {
        Digest structure;
        Digest aliases;
        int64_t step;
        std::array<char, 36> save_id;
        int32_t has_private_values;
    };
    Record record{};
    std::string structure;
    Aliases aliases;
    Values own;
    if (!error) {
        error = attempt([&] {
            if (job.step < 0) {
                throw Error(Code::invalid_argument, fmt::format("step {}; steps are counted from 0", job.step));
            }
            structure = describe(state, values, peers_.world_size());
            record.structure = digest_of(structure);
            aliases = find_aliases(state);
            std::string alias_text;
            for (const auto& [name, target] : aliases) alias_text += fmt::format("{}\n{}\n", name, target);
            record.aliases = digest_of(alias_text);
            record.step = job.step;
            for (const auto& [name, value] : values) {
                const auto rank = private_rank(name);
                if (!rank) continue;
                if (*rank != peers_.rank()) {
                    throw Error(
                        Code::invalid_argument,
                        fmt::format("the value '{}' belongs to rank {}; a rank sets its own alone", name, *rank));
                }
                own.emplace(name, value);
            }
            record.has_private_values = own.empty() ? 0 : 1;
            const std::string uuid = random_uuid();
            std::copy_n(uuid.begin(), record.save_id.size(), record.save_id.begin());
        });
    }
    std::vector<Record> records;
    if (const auto agreed = peers_.vote(error, record, records)) throw Error(agreed->with_operation("save"));

    // Every rank sees the same records, so all take the same turn here.
    bool same = true;
    bool same_aliases = true;
    bool any_private = false;
    for (size_t rank = 0; rank < records.size(); ++rank) {
        same = same && records[rank].structure == records[0].structure && records[rank].step == records[0].step;
        same_aliases = same_aliases && records[rank].aliases == records[0].aliases;
        any_private = any_private || records[rank].has_private_values != 0;
    }
    if (!same) {
        const std::string of_rank0 = peers_.from_rank0(structure);
        std::optional<Error> difference;
        if (record.step != records[0].step) {
            difference = Error(Code::mismatch, fmt::format("it saves step {} while rank 0 saves step {}", record.step,
                                                           records[0].step));
        } else if (structure != of_rank0) {
            difference = Error(Code::mismatch, fmt::format("its state differs from rank 0's: {}",
                                                           first_difference(of_rank0, structure)));
        }
        const auto agreed = peers_.vote(difference);
        throw Error(agreed.value_or(Error(Code::mismatch, "the ranks' states differ")).with_operation("save"));
    }
    job.save_id.assign(records[0].save_id.begin(), records[0].save_id.end());
    job.directory = join(root_, step_directory_name(job.step, job.save_id));
    if (any_private) {
        const std::vector<std::string> texts = peers_.gather(to_json(own).dump());
        for (size_t rank = 0; peers_.rank() == 0 && rank < texts.size(); ++rank) {
            const Json own_of_rank = Json::parse(texts[rank], "private values");
            for (const Json::Member& member : own_of_rank.as_object()) {
                job.values.insert_or_assign(member.key, member.value);
            }
        }
    }
    if (!same_aliases) aliases.clear();  // tied on some ranks only: each name is saved for itself
    job.error = attempt([&] {
        job.plan = make_plan(state, aliases, peers_.rank(), peers_.world_size(), options_.plan);
        if (peers_.rank() != 0) return;
        for (const auto& [name, value] : values) {
            if (!private_rank(name)) job.values.insert_or_assign(name, value);
        }
        job.metrics = state.metrics();
    });
    if (!job.error) {
        for (const auto& [name, target] : aliases) job.aliases.emplace(name, target);
    }
}

std::unique_ptr<Saver::Job> Saver::prepare(int64_t step, const State& state, bool stage) {
    auto job = std::make_unique<Job>();
    job->step = step;
    Values values;
    auto error = attempt([&] { values = state.collect(); });
    agree_on_state(*job, state, values, std::move(error));

    // From here on a rank's own failure waits for the next vote: the others already count on it.
    if (!job->error && options_.format == SaveFormat::torch_dcp) {
        job->error = attempt([&] {
            for (const auto& pieces : job->plan.files)
                job->pieces.insert(job->pieces.end(), pieces.begin(), pieces.end());
            for (const Piece& piece : job->pieces) job->names.emplace_back(piece.name);
            for (size_t i = 0; i < job->pieces.size(); ++i) job->pieces[i].name = job->names[i];
            if (!stage) return;
            const ByteRuns data(job->pieces);
            const std::byte* image = this->stage({&data, 1});
            for (Piece& piece : job->pieces) {
                piece.data = image;
                image += piece.size_bytes();
            }
        });
        return job;
    }
    if (!job->error) {
        job->error = attempt([&] {
            for (const auto& pieces : job->plan.files) {
                job->files.push_back({make_header(pieces, job->save_id), ByteRuns(pieces)});
            }
            if (!stage) return;
            std::vector<ByteRuns> data;
            for (const Job::File& file : job->files) data.push_back(file.data);
            const std::byte* image = this->stage(data);
            for (Job::File& file : job->files) {
                const int64_t bytes = file.data.size();
                file.data = ByteRuns(image, bytes);
                image += staged_bytes(bytes);
            }
        });
    }
    return job;
}

const std::byte* Saver::stage(std::span<const ByteRuns> data) {
    int64_t needed = 0;
    for (const ByteRuns& one : data) needed += staged_bytes(one.size());
    if (staging_.size() < static_cast<size_t>(needed)) {
        staging_ = AlignedBuffer();
        staging_ = AlignedBuffer(static_cast<size_t>(needed));
    }
    std::byte* image = staging_.data();
    for (const ByteRuns& one : data) {
        const int64_t bytes = one.size();
        // In pieces on a few threads: touching the pages of a first save is slower than the copy itself.
        const auto steps = static_cast<size_t>((bytes + stage_bytes - 1) / stage_bytes);
        run_parallel(steps, stage_threads, [&](size_t step, int) {
            const int64_t begin = static_cast<int64_t>(step) * stage_bytes;
            one.copy(begin, std::min(begin + stage_bytes, bytes), image + begin);
        });
        image += staged_bytes(bytes);
    }
    return staging_.data();
}

std::string Saver::write_files(Job& job) {
    if (options_.format == SaveFormat::torch_dcp) {
        const Values values = peers_.rank() == 0 ? flattened(job.values) : Values();
        return write_dcp_file(files_, job.directory, dcp_file_name(peers_.rank()), job.pieces, values, options_.write)
            .dump();
    }
    std::vector<SavedFile> written;
    for (size_t index = 0; index < job.files.size(); ++index) {
        const std::string name = rank_file_name(peers_.rank(), static_cast<int>(index));
        written.push_back(write_rank_file(files_, job.directory, name, std::move(job.files[index].header),
                                          job.files[index].data, options_.write));
    }
    return report_of(written);
}

void Saver::run(Job& job) {
    const auto started = Clock::now();
    const bool is_rank0 = peers_.rank() == 0;
    if (is_rank0 && !job.error) {
        job.error = attempt([&] {
            lease_->check();
            const int64_t made = files_.make_directory(job.directory);
            if (made < 0) {
                throw os_error(fmt::format("cannot create the directory {}", job.directory), static_cast<int>(-made));
            }
            job.made_directory = true;
            write_new_text(files_, join(job.directory, writing_name), Holder::this_process(id_).dump());
            sync_directory(files_, job.directory);  // or a power loss may keep rank files that nobody may collect
            sync_directory(files_, root_);
        });
    }
    auto agreed = peers_.vote(job.error);
    if (agreed) {
        abandon(job);
        throw Error(agreed->with_operation("save"));
    }

    std::string report;
    auto error = attempt([&] { report = write_files(job); });
    agreed = peers_.vote(error);
    if (agreed) {
        abandon(job);
        throw Error(agreed->with_operation("save"));
    }
    const std::vector<std::string> reports = peers_.gather(report);

    if (is_rank0) error = attempt([&] { commit(job, reports); });
    try {
        agreed = peers_.vote(error);
    } catch (const Error& lost) {
        // Rank 0 knows; the others can only look. Who was lost need not be rank 0: it may still be at the commit.
        if (is_rank0) {
            if (error) throw Error(error->with_operation("save"));
            log::warning("{} is committed, but not every rank could be told: {}", job.directory, lost.what());
            return;
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
            return;
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
    if (agreed) {
        abandon(job);
        throw Error(agreed->with_operation("save"));
    }
    if (is_rank0) {
        log::info("committed {} in {} ms", job.directory,
                  std::chrono::duration_cast<milliseconds>(Clock::now() - started).count());
    }
}

void Saver::commit(Job& job, const std::vector<std::string>& reports) {
    Manifest manifest;
    if (options_.format == SaveFormat::torch_dcp) {
        std::vector<DcpFile> of_ranks;
        for (const std::string& report : reports) of_ranks.push_back(DcpFile::parse(report));
        for (const DcpFile& file : of_ranks) manifest.files.push_back(file.file);
        // PyTorch takes the directory for a checkpoint from here on, and it is one: all data is durable.
        const std::string metadata = dcp_metadata(job.plan, job.aliases, of_ranks);
        replace_text(files_, join(job.directory, dcp_metadata_name), metadata, job.save_id.substr(0, 8));
        manifest.format = torch_dcp_format;
        manifest.files.push_back(
            {std::string(dcp_metadata_name), static_cast<int64_t>(metadata.size()), crc32c(metadata)});
    } else {
        std::vector<std::vector<SavedFile>> of_ranks;
        for (const std::string& report : reports) of_ranks.push_back(files_of(report));
        number_files(job.plan, of_ranks, manifest.files);
        manifest.tensors = std::move(job.plan.tensors);
        manifest.aliases = std::move(job.aliases);
    }
    manifest.sequence = next_sequence(files_, root_);
    manifest.step = job.step;
    manifest.save_id = job.save_id;
    manifest.committed = utc_now();
    manifest.writer = options_.writer;
    manifest.world_size = peers_.world_size();
    manifest.values = std::move(job.values);
    manifest.metrics = std::move(job.metrics);
    const std::string text = manifest.dump();

    sync_directory(files_, job.directory);
    lease_->check();
    replace_text(files_, join(job.directory, manifest_name), text, job.save_id.substr(0, 8));

    // The checkpoint exists. What follows is convenience, and its failure no failure of the save.
    const std::string directory(name_in_path(job.directory));
    try {
        (void)files_.remove_file(join(job.directory, writing_name));
        replace_text(files_, join(root_, latest_name), directory + "\n", job.save_id.substr(0, 8));
        tidy(directory);
    } catch (const Error& error) {
        log::warning("{} is committed; tidying {} up failed: {}", directory, root_, error.what());
    }
}

// Removes saves beyond keep_latest, and leftovers of writers that are gone.
void Saver::tidy(const std::string& newest) {
    std::vector<std::string> names;
    if (files_.list(root_, names) >= 0) {
        const std::string temporary = fmt::format("{}.tmp-", latest_name);
        for (const std::string& name : names) {
            if (name.starts_with(temporary)) (void)files_.remove_file(join(root_, name));
        }
    }
    for (const Unneeded& unneeded : find_unneeded(files_, root_, {options_.keep_latest, id_, options_.lease})) {
        if (unneeded.directory == newest) continue;
        if (unneeded.why == Unneeded::Why::cut_short) {
            log::info("removing {}, left by a save that was cut short", unneeded.directory);
        }
        remove_unneeded(files_, root_, unneeded, id_);
    }
}

// After a vote of no: what was written is of no use. Rank 0 removes it at once, since a full disk wants the room.
void Saver::abandon(const Job& job) noexcept {
    if (!job.made_directory) return;
    try {
        remove_save(files_, root_, std::string(name_in_path(job.directory)));
    } catch (const Error& error) {
        log::warning("could not remove {} after its save failed: {}", job.directory, error.what());
    } catch (...) {
        log::warning("could not remove {} after its save failed", job.directory);
    }
}

int64_t Saver::resume(State& state) {
    const Reentry once = enter();
    finish_former();
    // Rank 0 looks: other ranks' views of a shared directory may be older.
    std::string newest;
    std::optional<Error> error;
    if (peers_.rank() == 0) {
        error = attempt([&] {
            newest = newest_save(files_, root_).value_or("");
            const std::string latest = join(root_, latest_name);
            if (!newest.empty() || !exists(files_, latest)) return;
            throw Error(Code::corrupt,
                        fmt::format("{} says that there was a save, but {} holds none that is committed: saves "
                                    "were removed or lost; remove {} to begin anew",
                                    latest, root_, latest));
        });
    }
    if (const auto agreed = peers_.vote(error)) throw Error(agreed->with_operation("resume"));
    newest = peers_.from_rank0(newest);
    if (newest.empty()) return 0;
    int64_t step = 0;
    error = attempt([&] {
        const auto checkpoint = Checkpoint::open(join(root_, newest), files_);
        (void)checkpoint->load(state);
        step = checkpoint->manifest().step;
    });
    if (const auto agreed = peers_.vote(error)) throw Error(agreed->with_operation("resume"));
    return step;
}

}  // namespace tsr
