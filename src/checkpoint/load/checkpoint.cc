#include "checkpoint/load/checkpoint.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>

#include "base/attempt.hpp"
#include "base/error.hpp"
#include "checkpoint/formats/deepspeed/reader.hpp"
#include "checkpoint/formats/host_reads.hpp"
#include "checkpoint/formats/native/contents.hpp"
#include "checkpoint/formats/safetensors/reader.hpp"
#include "checkpoint/formats/torch_dcp/reader.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

// So that sums of sizes cannot overflow later.
void check_sums(const Manifest& manifest, const std::string& path) {
    int64_t of_files = 0;
    int64_t of_tensors = 0;
    bool fit = true;
    for (const SavedFile& file : manifest.files) fit = !__builtin_add_overflow(of_files, file.size, &of_files) && fit;
    manifest.for_each([&](const std::string&, const SavedTensor& tensor, const std::string*) {
        fit = !__builtin_add_overflow(of_tensors, tensor.size_bytes(), &of_tensors) && fit;
    });
    if (fit) return;
    throw Error(Code::corrupt, fmt::format("{}: the total size of its files or tensors exceeds 2^63 bytes", path));
}

}  // namespace

Json LoadReport::json() const {
    const auto list_of = [](const std::vector<std::string>& names) {
        Json::Array list;
        for (const std::string& name : names) list.emplace_back(name);
        return Json(std::move(list));
    };
    Json::Array casts;
    for (const Cast& one : cast) {
        casts.push_back(Json(Json::Object{{"name", Json(one.name)},
                                          {"from", Json(std::string(name_of(one.from)))},
                                          {"to", Json(std::string(name_of(one.to)))}}));
    }
    return Json(Json::Object{{"missing", list_of(missing)},
                             {"unexpected", list_of(unexpected)},
                             {"cast", Json(std::move(casts))},
                             {"left_alone", list_of(left_alone)},
                             {"verified", Json(verified)}});
}

Checkpoint::Checkpoint(std::string path, std::string text, Manifest manifest)
    : path_(std::move(path)), text_(std::move(text)), manifest_(std::move(manifest)) {
    check_sums(manifest_, path_);
    names_.reserve(manifest_.tensors.size() + manifest_.aliases.size());
    for (const auto& [name, tensor] : manifest_.tensors) names_.push_back(name);
    for (const auto& [name, target] : manifest_.aliases) names_.push_back(name);
    const auto middle = names_.begin() + static_cast<std::ptrdiff_t>(manifest_.tensors.size());
    std::inplace_merge(names_.begin(), middle, names_.end());  // both are in order
}

std::shared_ptr<const Checkpoint> Checkpoint::open(const std::string& path, FileSystem& files, Hold hold) {
    for (Found found = resolve_checkpoint(files, path);;) {
        try {
            return open_found(found, files, hold);
        } catch (const Error& error) {
            if (error.code() != Code::not_found) throw;
            // A job that saves under a root removes what it has replaced: then the path means another save by now.
            Found again = resolve_checkpoint(files, path);
            if (again.path == found.path) throw;
            found = std::move(again);
        }
    }
}

std::shared_ptr<const Checkpoint> Checkpoint::open_found(const Found& found, FileSystem& files, Hold hold) {
    const auto of_torch = [&](TorchCheckpoint opened) {
        return of_foreign(found.path, std::move(opened.manifest), std::move(opened.contents));
    };
    if (found.format == Format::torch_dcp) return of_torch(open_torch_dcp(files, found.path));
    if (found.format == Format::torch_save) return of_torch(open_torch_save(files, found.path));
    if (found.format == Format::deepspeed) return of_torch(open_deepspeed(files, found.path));
    if (found.format == Format::safetensors) {
        SafetensorsCheckpoint opened = open_safetensors(files, found.path);
        return of_foreign(found.path, std::move(opened.manifest), std::move(opened.contents));
    }
    const std::string name = join(found.path, manifest_name);
    auto held = open_file(files, name, OpenMode::read);
    const int64_t locked = hold == Hold::yes ? held->lock(FileLock::shared) : -EOPNOTSUPP;
    if (locked == -EWOULDBLOCK) {
        throw Error(Code::not_found, fmt::format("{} is being removed by its saver's retention", found.path));
    }
    std::string text = read_text(*held, name, max_manifest_bytes);
    if (hold == Hold::no) held.reset();
    Manifest manifest = Manifest::parse(text, name);
    if (locked == 0) std::string().swap(text);  // it stays where it can be read again
    std::shared_ptr<Checkpoint> checkpoint;
    if (manifest.format == torch_dcp_format) {
        checkpoint = of_torch(open_torch_dcp(files, found.path, std::move(manifest)));
        checkpoint->text_ = std::move(text);
    } else {
        checkpoint.reset(new Checkpoint(found.path, std::move(text), std::move(manifest)));
        checkpoint->contents_ = std::make_unique<NativeContents>(files, found.path, checkpoint->manifest_);
    }
    checkpoint->held_ = std::move(held);
    return checkpoint;
}

std::shared_ptr<Checkpoint> Checkpoint::of_foreign(std::string path, Manifest manifest,
                                                   std::unique_ptr<const Contents> contents) {
    std::shared_ptr<Checkpoint> checkpoint(new Checkpoint(std::move(path), "", std::move(manifest)));
    checkpoint->contents_ = std::move(contents);
    return checkpoint;
}

const std::string& Checkpoint::manifest_text() const {
    std::call_once(text_made_, [this] {
        if (!text_.empty()) return;
        text_ = held_ ? read_text(*held_, join(path_, manifest_name), max_manifest_bytes) : manifest_.dump();
    });
    return text_;
}

std::string Checkpoint::identity() const {
    if (!manifest_.save_id.empty()) return manifest_.save_id;
    Manifest manifest = manifest_;
    manifest.committed.clear();  // without a manifest on disk this is a file time, which differs between copies
    return manifest.dump();
}

void Checkpoint::throw_unreadable(std::string_view name) const {
    if (const auto found = manifest_.unreadable.find(name); found != manifest_.unreadable.end()) {
        throw Error(Code::unsupported, fmt::format("'{}' of {} cannot be read: {}", name, path_, found->second));
    }
    throw Error(Code::not_found, fmt::format("{} has no tensor '{}'", path_, name));
}

void Checkpoint::read(std::string_view name, const Tensor& into, const LoadOptions& options) const {
    const SavedTensor* saved = manifest_.find(name);
    if (saved == nullptr) throw_unreadable(name);
    if (saved->shape != into.shape || saved->dtype != into.dtype) {
        throw Error(Code::mismatch,
                    fmt::format("tensor '{}' of {} is {} {}, got {} {}", name, path_, name_of(saved->dtype),
                                saved->shape.str(), name_of(into.dtype), into.shape.str()));
    }
    const ReadPart whole{name, Box::whole(saved->shape), into.data, into.device};
    read(std::span(&whole, 1), options);
}

void Checkpoint::read(std::span<const ReadPart> parts, const LoadOptions& options) const {
    std::vector<Wanted> wanted;
    CopyStreams copies(options.timeout);
    for (const ReadPart& part : parts) {
        const SavedTensor* saved = manifest_.find(part.name);
        if (saved == nullptr) throw_unreadable(part.name);
        if (part.box.offsets.ndim() != saved->shape.ndim() || !part.box.inside(saved->shape)) {
            throw Error(Code::invalid_argument, fmt::format("{} is not a part of tensor '{}' of shape {}",
                                                            part.box.str(), part.name, saved->shape.str()));
        }
        CopyStream* const on = copies.of(part.device);
        if (on != nullptr) {
            if (!part.box.empty()) on->device().check_memory(part.memory);
            on->follow(nullptr);
        }
        wanted.push_back(
            {&manifest_.saved_name(part.name), saved, &part.box, saved->dtype, part.memory, part.device, on});
    }
    (void)contents_->read(wanted, {options.verify, options.threads, options.progress, nullptr});
}

LoadReport Checkpoint::load(State& state, const LoadOptions& options) const {
    if (options.comm == nullptr || options.comm->world_size() == 1) return load_with(nullptr, state, options);
    // A chunk that one rank reads for others is verified as that rank's options say.
    const bool verified = options.verify == Verify::blocks;
    const HostReads::Source source{fmt::format("{} {}", verified, identity()),
                                   fmt::format("{}{}", path_, verified ? "" : " unverified")};
    HostReads host(options.comm, source, options.least_shared_bytes);
    LoadReport report;
    host.end(attempt([&] { report = load_with(&host, state, options); }));
    return report;
}

LoadReport Checkpoint::load_with(HostReads* host, State& state, const LoadOptions& options) const {
    LoadPlan plan;
    CopyStreams device_copies(options.timeout);
    const auto refused = attempt([&] {
        plan = plan_load(state, options);
        state.follow(device_copies);
        for (Wanted& one : plan.wanted) one.on = device_copies.of(one.device);
        state.check(plan.values, plan.sources_left_alone);
    });
    if (host != nullptr) {
        host->agree(refused);
    } else if (refused) {
        throw Error(*refused);
    }
    for (const auto& barrier : state.barriers()) barrier->before_write_all();  // a save may have yet to copy it
    const auto copies = state.shared_copies();
    for (const auto& copy : copies) copy->agree_to_load(plan.of_copies[copy.get()]);
    for (const auto& copy : copies) copy->begin_load();
    const auto error = attempt([&] {
        state.follow(device_copies);  // again: a barrier may have made the program's stream wait for copies
        plan.report.verified = contents_->read(plan.wanted, {options.verify, options.threads, options.progress, host});
    });
    for (const auto& copy : copies) copy->end_load(error);
    if (error) throw Error(*error);
    state.apply(plan.values, plan.sources_left_alone);
    return std::move(plan.report);
}

void Checkpoint::check(Depth depth, const ProgressFn& progress) const {
    Progress counted(progress, Phase::verify, depth == Depth::headers ? 0 : manifest_.size_bytes());
    const std::vector<std::string> faults =
        verify(depth, [&](int64_t bytes) { counted.add(bytes); }, [&] { counted.poll(); });
    counted.finish();
    std::optional<Error> error;
    for (auto fault = faults.rbegin(); fault != faults.rend(); ++fault) {
        Error next(Code::corrupt, *fault);
        error = error ? next.caused_by(*error) : next;
    }
    if (error) throw Error(*error);
}

}  // namespace tsr
