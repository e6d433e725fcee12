#include "checkpoint/formats/safetensors/reader.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/parallel.hpp"
#include "checkpoint/formats/safetensors/contents.hpp"
#include "checkpoint/formats/safetensors/files.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

constexpr int header_threads = 4;

using Source = SafetensorsContents::Source;

struct Place {
    int file = 0;
    const SafetensorsEntry* entry = nullptr;
};

class Collector {
   public:
    Collector(const SafetensorsFiles& found, const std::vector<Source>& sources, Manifest& manifest)
        : found_(found), sources_(sources), manifest_(manifest) {}

    void run() {
        size_t count = 0;
        for (const Source& source : sources_) count += source.header.entries().size();
        places_.reserve(count);
        for (size_t file = 0; file < sources_.size(); ++file) {
            for (const SafetensorsEntry& entry : sources_[file].header.entries()) {
                places_.push_back({static_cast<int>(file), &entry});
            }
        }
        std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
            const int order = a.entry->name.compare(b.entry->name);
            return order != 0 ? order < 0 : a.file < b.file;
        });
        if (found_.index) check_index();
        for (size_t begin = 0; begin < places_.size();) {
            const std::string& name = places_[begin].entry->name;
            size_t end = begin + 1;
            while (end < places_.size() && places_[end].entry->name == name) ++end;
            add(name, std::span(places_).subspan(begin, end - begin));
            begin = end;
        }
        for (const Source& source : sources_) {
            for (const auto& [name, target] : source.header.tied()) {
                if (!places_of(name).empty() || !manifest_.tensors.contains(target)) continue;
                manifest_.aliases.emplace(name, target);
            }
        }
    }

   private:
    [[nodiscard]] std::span<Place> places_of(std::string_view name) {
        const auto begin =
            std::lower_bound(places_.begin(), places_.end(), name,
                             [](const Place& place, std::string_view to) { return place.entry->name < to; });
        auto end = begin;
        while (end != places_.end() && end->entry->name == name) ++end;
        return {begin, end};
    }

    // Checks that each tensor in the index is in the file that it names. Other tensors in the files are taken too, as
    // other readers do. If several files hold a name, the one in the index is taken.
    void check_index() {
        const std::string index = join(found_.directory, found_.index_name);
        for (const auto& [name, file] : found_.index->weight_map) {
            const std::span<Place> places = places_of(name);
            const auto named = std::find_if(places.begin(), places.end(), [&, &file = file](const Place& place) {
                return found_.names[static_cast<size_t>(place.file)] == file;
            });
            if (named == places.end()) {
                throw Error(Code::corrupt,
                            fmt::format("{}: it lists tensor '{}' in {}, which does not hold it", index, name, file));
            }
            if (places.size() > 1 && !named->entry->offsets) {
                const Place only = *named;
                std::fill(places.begin(), places.end(), only);
            }
        }
        places_.erase(std::unique(places_.begin(), places_.end(),
                                  [](const Place& a, const Place& b) { return a.entry == b.entry; }),
                      places_.end());
    }

    void add(const std::string& name, std::span<const Place> places) {
        const Place& first = places.front();
        const auto path = [&](const Place& place) { return sources_[static_cast<size_t>(place.file)].path; };
        for (const Place& place : places) {
            if (place.entry->unreadable.empty()) continue;
            manifest_.unreadable.emplace(name, place.entry->unreadable);
            return;
        }
        const bool all_parts =
            std::all_of(places.begin(), places.end(), [](const Place& place) { return place.entry->offsets; });
        if (places.size() > 1 && !all_parts) {
            throw Error(Code::invalid_argument,
                        fmt::format("tensor '{}' is in both {} and {}, and neither says that it is a part: they are "
                                    "different checkpoints; pass one of the files",
                                    name, path(first), path(places[1])));
        }
        SavedTensor tensor;
        tensor.dtype = first.entry->dtype;
        tensor.shape = first.entry->shape;
        // The format does not record the whole shape: it ends where the last part ends.
        for (const Place& place : places) {
            const Box box = place.entry->box();
            if (place.entry->dtype != tensor.dtype || box.sizes.ndim() != tensor.shape.ndim()) {
                throw Error(Code::corrupt,
                            fmt::format("the parts of tensor '{}' in {} and {} differ in dtype or number of "
                                        "dimensions",
                                        name, path(first), path(place)));
            }
            for (int d = 0; d < tensor.shape.ndim(); ++d) {
                tensor.shape[d] = std::max(tensor.shape[d], box.offsets[d] + box.sizes[d]);
            }
        }
        try {
            check_shape(tensor.shape, tensor.dtype, "it");
        } catch (const Error& error) {
            throw Error(Code::corrupt, fmt::format("the parts of tensor '{}' in {} to {}: {}", name, path(first),
                                                   path(places.back()), error.what()));
        }
        for (const Place& place : places) {
            const Box box = place.entry->box();
            if (!box.empty()) tensor.pieces.push_back({box, place.file});
        }
        check_cover(name, tensor, places);
        manifest_.tensors.emplace_hint(manifest_.tensors.end(), name,
                                       std::make_shared<const SavedTensor>(std::move(tensor)));
    }

    void check_cover(const std::string& name, const SavedTensor& tensor, std::span<const Place> places) const {
        if (tensor.shape.product() == 0) return;
        if (tensor.pieces.size() == 1 && tensor.pieces[0].box.sizes == tensor.shape) return;
        std::vector<Box> boxes;
        int64_t covered = 0;
        bool once = true;
        for (const SavedPiece& piece : tensor.pieces) {
            boxes.push_back(piece.box);
            once = once && !__builtin_add_overflow(covered, piece.box.numel(), &covered);
        }
        const int count = static_cast<int>(boxes.size());
        try {
            (void)Layout::from_boxes(tensor.shape, boxes, std::span(&count, 1));
        } catch (const Error&) {
            once = false;
        }
        if (once && covered == tensor.shape.product()) return;
        const std::string& path = sources_[static_cast<size_t>(places.front().file)].path;
        if (once && covered < tensor.shape.product()) {
            throw Error(Code::corrupt,
                        fmt::format("{}: tensor '{}' is a part of a tensor of shape {}, of which {} of {} elements are "
                                    "present: other files of that save are missing",
                                    path, name, tensor.shape.str(), covered, tensor.shape.product()));
        }
        throw Error(Code::corrupt, fmt::format("{}: {} parts of tensor '{}' overlap: they are from different saves",
                                               path, boxes.size(), name));
    }

    const SafetensorsFiles& found_;
    const std::vector<Source>& sources_;
    Manifest& manifest_;
    std::vector<Place> places_;  // by name
};

}  // namespace

SafetensorsCheckpoint open_safetensors(FileSystem& files, const std::string& path) {
    const SafetensorsFiles found = find_safetensors(files, path);
    Manifest manifest;
    manifest.format = "safetensors";
    manifest.step = -1;
    manifest.writer = {"safetensors", "", ""};
    std::vector<std::optional<SafetensorsHeader>> headers(found.names.size());
    run_parallel(headers.size(), header_threads, [&](size_t i, int) {
        try {
            headers[i] = SafetensorsHeader::read(files, join(found.directory, found.names[i]));
        } catch (const Error& error) {
            if (error.code() != Code::not_found || !found.index) throw;
            throw Error(Code::corrupt, fmt::format("{} is missing; {} names it", join(found.directory, found.names[i]),
                                                   join(found.directory, found.index_name)))
                .caused_by(error);
        }
    });
    std::vector<Source> sources;
    int64_t modified_ns = 0;
    for (size_t i = 0; i < headers.size(); ++i) {
        const std::string file = join(found.directory, found.names[i]);
        manifest.files.push_back({found.names[i], headers[i]->file_bytes(), 0});
        manifest.world_size = std::max(manifest.world_size, rank_of_shard_name(found.names[i]) + 1);
        FileStatus status;
        if (files.status(file, status) >= 0) modified_ns = std::max(modified_ns, status.modified_ns.value_or(0));
        sources.push_back({file, std::move(*headers[i])});
    }
    manifest.committed = utc_text(modified_ns);
    Collector(found, sources, manifest).run();
    return {std::move(manifest), std::make_unique<SafetensorsContents>(files, std::move(sources))};
}

}  // namespace tsr
