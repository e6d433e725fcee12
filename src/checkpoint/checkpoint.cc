#include "checkpoint/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <set>

#include "base/error.hpp"
#include "base/parallel.hpp"
#include "checkpoint/native/root.hpp"

namespace tsr {

namespace {

constexpr int verify_threads = 4;

// Differences as one readable list; long ones are cut, the number is always told.
std::string listed(const std::vector<std::string>& items) {
    constexpr size_t shown = 50;
    std::string text;
    for (size_t i = 0; i < std::min(items.size(), shown); ++i) text.append("\n  ").append(items[i]);
    if (items.size() > shown) text += fmt::format("\n  and {} more", items.size() - shown);
    return text;
}

}  // namespace

Checkpoint::Checkpoint(FileSystem& files, std::string path, std::string text, std::unique_ptr<File> held)
    : files_(files),
      path_(std::move(path)),
      text_(std::move(text)),
      held_(std::move(held)),
      manifest_(Manifest::parse(text_, join(path_, manifest_name))),
      rank_files_(manifest_.files.size()) {
    for (const auto& [name, tensor] : manifest_.tensors) names_.push_back(name);
    for (const auto& [name, target] : manifest_.aliases) names_.push_back(name);
    std::sort(names_.begin(), names_.end());
}

std::shared_ptr<const Checkpoint> Checkpoint::open(const std::string& path, FileSystem& files, Hold hold) {
    const std::string directory = resolve_checkpoint(files, path);
    const std::string manifest = join(directory, manifest_name);
    auto file = open_file(files, manifest, OpenMode::read);
    if (hold == Hold::yes && file->lock(FileLock::shared) == -EWOULDBLOCK) {
        throw Error(Code::not_found, fmt::format("{} is being removed by the retention of its saver", directory));
    }
    std::string text = read_text(*file, manifest, max_manifest_bytes);
    if (hold == Hold::no) file.reset();
    return std::shared_ptr<const Checkpoint>(new Checkpoint(files, directory, std::move(text), std::move(file)));
}

const RankFile& Checkpoint::file(int index) const {
    const std::lock_guard lock(mutex_);
    auto& slot = rank_files_[static_cast<size_t>(index)];
    if (slot == nullptr) {
        const SavedFile& saved = manifest_.files[static_cast<size_t>(index)];
        slot = std::make_unique<const RankFile>(
            RankFile::read(files_, join(path_, saved.name), saved.size, saved.header_crc, manifest_.save_id));
    }
    return *slot;
}

void Checkpoint::add_transfers(const std::string& saved_name, const SavedTensor& saved, const Box& wanted, DType dtype,
                               std::byte* memory, std::vector<Transfer>& out) const {
    saved.for_each_piece(wanted, [&](const Box& box, int index) {
        const RankFile& source = file(index);
        const FileEntry* entry = source.find(saved_name);
        if (entry == nullptr || entry->box != box || entry->dtype != saved.dtype) {
            throw Error(Code::corrupt, fmt::format("{}: its header does not hold the part {} of tensor '{}' that the "
                                                   "manifest says",
                                                   source.path(), box.str(), saved_name));
        }
        out.push_back({&source, entry, box.intersect(wanted), wanted, dtype, memory});
    });
}

void Checkpoint::read(std::string_view name, const Tensor& into, const LoadOptions& options) const {
    const SavedTensor* saved = manifest_.find(name);
    if (saved == nullptr) throw Error(Code::not_found, fmt::format("{} has no tensor '{}'", path_, name));
    if (into.device.type != DeviceType::cpu) {
        throw Error(Code::invalid_argument, fmt::format("the tensor for '{}' is not on the CPU", name));
    }
    if (saved->shape != into.shape || saved->dtype != into.dtype) {
        throw Error(Code::mismatch,
                    fmt::format("tensor '{}' of {} is {} {}, the one given is {} {}", name, path_,
                                name_of(saved->dtype), saved->shape.str(), name_of(into.dtype), into.shape.str()));
    }
    std::vector<Transfer> transfers;
    add_transfers(manifest_.saved_name(std::string(name)), *saved, Box::whole(saved->shape), into.dtype, into.data,
                  transfers);
    read_transfers(files_, std::move(transfers), {options.verify, options.threads, options.progress});
}

LoadReport Checkpoint::load(State& state, const LoadOptions& options) const {
    LoadReport report;
    std::vector<std::string> differences;
    for (const auto& [name, tensor] : state.tensors()) {
        const SavedTensor* saved = manifest_.find(name);
        if (saved == nullptr) {
            report.missing.push_back(name);
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
        } else if (const auto rank = private_rank(name); !rank || *rank < manifest_.world_size) {
            report.missing.push_back(name);
        }
    }
    for (const auto& [name, value] : manifest_.values) {
        if (!private_rank(name) && !own.contains(name)) report.unexpected.push_back(name);
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

    std::vector<Transfer> transfers;
    for (const auto& [name, tensor] : state.tensors()) {
        const SavedTensor* saved = manifest_.find(name);
        if (saved == nullptr) continue;
        const std::string& saved_name = manifest_.saved_name(name);
        for (size_t i = 0; i < tensor.boxes.size(); ++i) {
            add_transfers(saved_name, *saved, tensor.boxes[i], tensor.dtype, tensor.pieces[i].data, transfers);
        }
    }
    read_transfers(files_, std::move(transfers), {options.verify, options.threads, options.progress});
    state.apply(loaded);
    return report;
}

// Every piece that the manifest tells of is in the file it names, and no file holds anything else.
void Checkpoint::compare_headers(std::vector<std::string>& faults) const {
    std::vector<const RankFile*> read(manifest_.files.size(), nullptr);
    for (size_t index = 0; index < read.size(); ++index) {
        try {
            read[index] = &file(static_cast<int>(index));
        } catch (const Error& error) {
            if (error.code() != Code::corrupt) throw;
            faults.emplace_back(error.what());
        }
    }
    std::vector<size_t> expected(read.size(), 0);
    for (const auto& [name, tensor] : manifest_.tensors) {
        const auto visit = [&, &name = name, &tensor = tensor](const Box& box, int index) {
            const auto at = static_cast<size_t>(index);
            ++expected[at];
            if (read[at] == nullptr) return;
            const FileEntry* entry = read[at]->find(name);
            if (entry == nullptr || entry->box != box || entry->dtype != tensor.dtype) {
                faults.push_back(fmt::format("{}: it does not hold the part {} of tensor '{}' that the manifest says",
                                             read[at]->path(), box.str(), name));
            }
        };
        // A tensor without elements overlaps nothing; it stands whole in one file, which is not told.
        if (tensor.shape.product() > 0) tensor.for_each_piece(Box::whole(tensor.shape), visit);
    }
    std::set<std::string_view> empty_found;
    for (size_t index = 0; index < read.size(); ++index) {
        if (read[index] == nullptr) continue;
        size_t empties = 0;
        for (const FileEntry& entry : read[index]->entries()) {
            if (entry.begin != entry.end) continue;
            ++empties;
            const auto found = manifest_.tensors.find(entry.name);
            if (found == manifest_.tensors.end() || found->second.shape != entry.box.sizes ||
                found->second.dtype != entry.dtype || !empty_found.insert(entry.name).second) {
                faults.push_back(fmt::format("{}: it holds an empty tensor '{}' that the manifest does not tell of",
                                             read[index]->path(), entry.name));
            }
        }
        if (read[index]->entries().size() - empties != expected[index]) {
            faults.push_back(fmt::format("{}: it holds {} tensors, the manifest tells of {}", read[index]->path(),
                                         read[index]->entries().size() - empties, expected[index]));
        }
    }
    const bool all_read = std::all_of(read.begin(), read.end(), [](const RankFile* one) { return one != nullptr; });
    for (const auto& [name, tensor] : manifest_.tensors) {
        if (all_read && tensor.shape.product() == 0 && !empty_found.contains(name)) {
            faults.push_back(fmt::format("{}: no file holds the empty tensor '{}'", path_, name));
        }
    }
}

std::vector<std::string> Checkpoint::verify(Depth depth, const std::function<void(int64_t bytes)>& progress,
                                            const std::function<void()>& poll) const {
    std::vector<std::string> faults;
    compare_headers(faults);
    std::set<std::string_view> known;
    for (const SavedFile& saved : manifest_.files) known.insert(saved.name);
    std::vector<std::string> names;
    if (const int64_t result = files_.list(path_, names); result < 0) {
        throw os_error(fmt::format("cannot list {}", path_), static_cast<int>(-result));
    }
    for (const std::string& name : names) {
        if (name.ends_with(".safetensors") && !known.contains(name)) {
            faults.push_back(
                fmt::format("{} is not a file of this save; other readers would take it for one", join(path_, name)));
        }
    }
    if (depth == Depth::headers) return faults;
    for (size_t index = 0; index < manifest_.files.size(); ++index) {
        const RankFile* sound = nullptr;
        try {
            sound = &file(static_cast<int>(index));
        } catch (const Error&) {
            continue;  // told above
        }
        for (std::string& fault : check_blocks(files_, *sound, verify_threads, progress, poll)) {
            faults.push_back(std::move(fault));
        }
    }
    return faults;
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
