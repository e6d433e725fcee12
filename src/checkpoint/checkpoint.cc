#include "checkpoint/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "base/error.hpp"
#include "checkpoint/native/contents.hpp"
#include "checkpoint/native/root.hpp"
#include "checkpoint/torch_dcp/reader.hpp"

namespace tsr {

namespace {

// Differences as one readable list; long ones are cut, the number is always told.
std::string listed(const std::vector<std::string>& items) {
    constexpr size_t shown = 50;
    std::string text;
    for (size_t i = 0; i < std::min(items.size(), shown); ++i) text.append("\n  ").append(items[i]);
    if (items.size() > shown) text += fmt::format("\n  and {} more", items.size() - shown);
    return text;
}

}  // namespace

Checkpoint::Checkpoint(std::string path, std::string text, Manifest manifest)
    : path_(std::move(path)), text_(std::move(text)), manifest_(std::move(manifest)) {
    names_.reserve(manifest_.tensors.size() + manifest_.aliases.size());
    for (const auto& [name, tensor] : manifest_.tensors) names_.push_back(name);
    for (const auto& [name, target] : manifest_.aliases) names_.push_back(name);
    const auto middle = names_.begin() + static_cast<std::ptrdiff_t>(manifest_.tensors.size());
    std::inplace_merge(names_.begin(), middle, names_.end());  // both are in order
}

std::shared_ptr<const Checkpoint> Checkpoint::open(const std::string& path, FileSystem& files, Hold hold) {
    const Found found = resolve_checkpoint(files, path);
    if (found.format != Format::native) {
        return of_torch(
            found.path, "",
            found.format == Format::torch_dcp ? open_torch_dcp(files, found.path) : open_torch_save(files, found.path));
    }
    const std::string name = join(found.path, manifest_name);
    auto held = open_file(files, name, OpenMode::read);
    if (hold == Hold::yes && held->lock(FileLock::shared) == -EWOULDBLOCK) {
        throw Error(Code::not_found, fmt::format("{} is being removed by the retention of its saver", found.path));
    }
    std::string text = read_text(*held, name, max_manifest_bytes);
    if (hold == Hold::no) held.reset();
    Manifest manifest = Manifest::parse(text, name);
    std::shared_ptr<Checkpoint> checkpoint;
    if (manifest.format == torch_dcp_format) {
        checkpoint = of_torch(found.path, std::move(text), open_torch_dcp(files, found.path, std::move(manifest)));
    } else {
        checkpoint.reset(new Checkpoint(found.path, std::move(text), std::move(manifest)));
        checkpoint->contents_ = std::make_unique<NativeContents>(files, found.path, checkpoint->manifest_);
    }
    checkpoint->held_ = std::move(held);
    return checkpoint;
}

// A manifest that no file holds is made, so that callers have one text for all formats.
std::shared_ptr<Checkpoint> Checkpoint::of_torch(std::string path, std::string text, TorchCheckpoint opened) {
    if (text.empty()) text = opened.manifest.dump();
    std::shared_ptr<Checkpoint> checkpoint(
        new Checkpoint(std::move(path), std::move(text), std::move(opened.manifest)));
    checkpoint->contents_ = std::move(opened.contents);
    return checkpoint;
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
    if (into.device.type != DeviceType::cpu) {
        throw Error(Code::invalid_argument, fmt::format("the tensor for '{}' is not on the CPU", name));
    }
    if (saved->shape != into.shape || saved->dtype != into.dtype) {
        throw Error(Code::mismatch,
                    fmt::format("tensor '{}' of {} is {} {}, the one given is {} {}", name, path_,
                                name_of(saved->dtype), saved->shape.str(), name_of(into.dtype), into.shape.str()));
    }
    const ReadPart whole{name, Box::whole(saved->shape), into.data};
    read(std::span(&whole, 1), options);
}

void Checkpoint::read(std::span<const ReadPart> parts, const LoadOptions& options) const {
    std::vector<Wanted> wanted;
    for (const ReadPart& part : parts) {
        const SavedTensor* saved = manifest_.find(part.name);
        if (saved == nullptr) throw_unreadable(part.name);
        if (part.box.offsets.ndim() != saved->shape.ndim() || !part.box.inside(saved->shape)) {
            throw Error(Code::invalid_argument, fmt::format("{} is no part of tensor '{}' of shape {}", part.box.str(),
                                                            part.name, saved->shape.str()));
        }
        wanted.push_back({&manifest_.saved_name(part.name), saved, part.box, saved->dtype, part.memory});
    }
    contents_->read(wanted, {options.verify, options.threads, options.progress});
}

LoadReport Checkpoint::load(State& state, const LoadOptions& options) const {
    LoadReport report;
    std::vector<std::string> differences;
    for (const auto& [name, tensor] : state.tensors()) {
        const SavedTensor* saved = manifest_.find(name);
        if (saved == nullptr) {
            const auto unreadable = manifest_.unreadable.find(name);
            if (unreadable == manifest_.unreadable.end()) {
                report.missing.push_back(name);
            } else {
                differences.push_back(fmt::format("tensor '{}' cannot be read: {}", name, unreadable->second));
            }
            continue;
        }
        if (saved->shape != tensor.shape) {
            differences.push_back(fmt::format("tensor '{}': saved with shape {}, the state has {}", name,
                                              saved->shape.str(), tensor.shape.str()));
        }
        if (saved->dtype != tensor.dtype) {
            if (is_floating(saved->dtype) && is_floating(tensor.dtype)) {
                report.cast.push_back(fmt::format("tensor '{}': saved as {}, the state has {}", name,
                                                  name_of(saved->dtype), name_of(tensor.dtype)));
            } else {
                differences.push_back(fmt::format("tensor '{}': saved as {}, the state has {}", name,
                                                  name_of(saved->dtype), name_of(tensor.dtype)));
            }
        }
    }
    for (const std::string& name : names_) {
        if (!state.tensors().contains(name)) report.unexpected.push_back(name);
    }

    // Private values belong to their rank; one that this world has more or less than the saved one is no difference.
    const Values own = state.collect();
    Values loaded;
    for (const auto& [name, value] : own) {
        const auto saved = manifest_.values.find(name);
        if (saved != manifest_.values.end()) {
            loaded.emplace(name, saved->second);
        } else if (const auto unreadable = manifest_.unreadable.find(name); unreadable != manifest_.unreadable.end()) {
            differences.push_back(fmt::format("value '{}' cannot be read: {}", name, unreadable->second));
        } else if (const auto rank = private_rank(name); !rank || *rank < manifest_.world_size) {
            report.missing.push_back(name);
        }
    }
    for (const auto& [name, value] : manifest_.values) {
        if (!private_rank(name) && !own.contains(name)) report.unexpected.push_back(name);
    }
    for (const auto& [name, why] : manifest_.unreadable) {
        if (!state.tensors().contains(name) && !own.contains(name)) report.unexpected.push_back(name);
    }

    if (options.missing == Allow::no) {
        for (const std::string& name : report.missing) {
            differences.push_back(fmt::format("'{}' is missing: the state has it, the checkpoint does not", name));
        }
    }
    if (options.unexpected == Allow::no) {
        for (const std::string& name : report.unexpected) {
            differences.push_back(fmt::format("'{}' is unexpected: the checkpoint has it, the state does not", name));
        }
    }
    if (options.cast == Allow::no) differences.insert(differences.end(), report.cast.begin(), report.cast.end());
    if (!differences.empty()) {
        throw Error(Code::mismatch, fmt::format("{} does not fit the state; {} differences:{}", path_,
                                                differences.size(), listed(differences)));
    }

    state.check(loaded);

    std::vector<Wanted> wanted;
    for (const auto& [name, tensor] : state.tensors()) {
        const SavedTensor* saved = manifest_.find(name);
        if (saved == nullptr) continue;
        for (size_t i = 0; i < tensor.boxes.size(); ++i) {
            wanted.push_back(
                {&manifest_.saved_name(name), saved, tensor.boxes[i], tensor.dtype, tensor.pieces[i].data});
        }
    }
    for (const auto& barrier : state.barriers()) barrier->before_write_all();  // a save may have yet to copy it
    contents_->read(wanted, {options.verify, options.threads, options.progress});
    state.apply(loaded);
    return report;
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
