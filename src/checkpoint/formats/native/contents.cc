#include "checkpoint/formats/native/contents.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/error.hpp"

namespace tsr {

const RankFile& NativeContents::file(int index) const {
    const std::lock_guard lock(mutex_);
    auto& slot = rank_files_[static_cast<size_t>(index)];
    if (slot == nullptr) {
        const SavedFile& saved = manifest_.files[static_cast<size_t>(index)];
        slot = std::make_unique<const RankFile>(
            RankFile::read(files_, join(path_, saved.name), saved.size, saved.header_crc, manifest_.save_id));
    }
    return *slot;
}

bool NativeContents::read(std::span<const Wanted> wanted, const ReadOptions& options) const {
    read_transfers(files_, transfers_of(wanted), options);
    return options.verify == Verify::blocks;
}

std::vector<Transfer> NativeContents::transfers_of(std::span<const Wanted> wanted) const {
    std::vector<Transfer> transfers;
    transfers.reserve(wanted.size());
    // Wanted tensors come in name order, while a file orders them by size and then by name: among tensors of one size,
    // the next one follows the last one.
    struct Found {
        int index = -1;
        int64_t bytes = 0;
        const RankFile* file = nullptr;
        const FileEntry* entry = nullptr;
    };
    std::array<Found, 64> last;
    for (const Wanted& one : wanted) {
        one.tensor->for_each_piece(*one.box, [&](const Box& box, int index) {
            const int64_t bytes = box.numel() * static_cast<int64_t>(size_of(one.tensor->dtype));
            const uint64_t mixed =
                (static_cast<uint64_t>(bytes) ^ static_cast<uint64_t>(index) << 40) * 0x9e3779b97f4a7c15;
            Found& found = last[mixed >> 58];
            if (found.index != index) found = {index, bytes, &file(index), nullptr};
            if (found.bytes != bytes) found = {index, bytes, found.file, nullptr};
            found.entry = found.file->find(*one.name, found.entry);
            if (found.entry == nullptr || *found.entry->box != box || found.entry->dtype != one.tensor->dtype) {
                throw Error(Code::corrupt,
                            fmt::format("{}: its header lacks the part {} of tensor '{}' that the manifest "
                                        "lists",
                                        found.file->path(), box.str(), *one.name));
            }
            transfers.push_back({index, found.file, found.entry, one.box, one.dtype, one.memory, one.on});
        });
    }
    return transfers;
}

// Checks that every piece in the manifest is in the file it names, and that no file holds anything else.
void NativeContents::compare_headers(std::vector<std::string>& faults) const {
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
        const auto visit = [&, &name = name, &tensor = *tensor](const Box& box, int index) {
            const auto at = static_cast<size_t>(index);
            ++expected[at];
            if (read[at] == nullptr) return;
            const FileEntry* entry = read[at]->find(name);
            if (entry == nullptr || *entry->box != box || entry->dtype != tensor.dtype) {
                faults.push_back(fmt::format("{}: it lacks the part {} of tensor '{}' that the manifest lists",
                                             read[at]->path(), box.str(), name));
            }
        };
        // A tensor without elements overlaps nothing; it is in one file, which the manifest does not name.
        if (tensor->shape.product() > 0) tensor->for_each_piece(Box::whole(tensor->shape), visit);
    }
    std::set<std::string_view> empty_found;
    for (size_t index = 0; index < read.size(); ++index) {
        if (read[index] == nullptr) continue;
        size_t empties = 0;
        for (const FileEntry& entry : read[index]->entries()) {
            if (entry.begin != entry.end) continue;
            ++empties;
            const auto found = manifest_.tensors.find(entry.name);
            if (found == manifest_.tensors.end() || found->second->shape != entry.box->sizes ||
                found->second->dtype != entry.dtype || !empty_found.insert(entry.name).second) {
                faults.push_back(fmt::format("{}: it holds an empty tensor '{}' that the manifest does not list",
                                             read[index]->path(), entry.name));
            }
        }
        if (read[index]->entries().size() - empties != expected[index]) {
            faults.push_back(fmt::format("{}: it holds {} tensors, but the manifest lists {}", read[index]->path(),
                                         read[index]->entries().size() - empties, expected[index]));
        }
    }
    const bool all_read = std::all_of(read.begin(), read.end(), [](const RankFile* one) { return one != nullptr; });
    for (const auto& [name, tensor] : manifest_.tensors) {
        if (all_read && tensor->shape.product() == 0 && !empty_found.contains(name)) {
            faults.push_back(fmt::format("{}: no file holds the empty tensor '{}'", path_, name));
        }
    }
}

std::vector<std::string> NativeContents::verify(Depth depth, const ByteProgress& progress,
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
                fmt::format("{} is not a file of this save, but other readers would use it", join(path_, name)));
        }
    }
    if (depth == Depth::headers) return faults;
    for (size_t index = 0; index < manifest_.files.size(); ++index) {
        const RankFile* sound = nullptr;
        try {
            sound = &file(static_cast<int>(index));
        } catch (const Error&) {
            continue;  // reported above
        }
        for (std::string& fault : check_blocks(files_, *sound, verify_threads, progress, poll)) {
            faults.push_back(std::move(fault));
        }
    }
    return faults;
}

}  // namespace tsr
