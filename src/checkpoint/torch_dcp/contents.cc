#include "checkpoint/torch_dcp/contents.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "base/crc32.hpp"
#include "base/error.hpp"
#include "base/parallel.hpp"
#include "checkpoint/runs.hpp"

namespace tsr {

namespace {

constexpr int64_t segment_bytes = int64_t{4} << 20;  // a multiple of every element's size

// A storage in a file that is read.
struct Record {
    const std::string* path = nullptr;
    int file = 0;
    const std::string* name = nullptr;  // of a tensor in it, for messages
    TorchPiece::Place place;
    bool is_checked = false;  // so it is read whole
    std::vector<Runs> runs{};
};

struct Segment {
    Record* record = nullptr;
    int64_t begin = 0;  // in the storage
    int64_t end = 0;
};

void add_segments(Record& record, std::vector<Segment>& segments) {
    int64_t begin = 0;
    int64_t end = record.place.bytes;
    if (!record.is_checked) {
        begin = record.place.bytes;
        end = 0;
        for (const Runs& runs : record.runs) {
            begin = std::min(begin, runs.begin());
            end = std::max(end, runs.end());
        }
    }
    while (begin < end) {
        const int64_t stop = std::min(end, (begin / segment_bytes + 1) * segment_bytes);
        const bool needed = record.is_checked ||
                            std::any_of(record.runs.begin(), record.runs.end(),
                                        [&](const Runs& runs) { return runs.begin() < stop && runs.end() > begin; });
        if (needed) segments.push_back({&record, begin, stop});
        begin = stop;
    }
}

std::string checksum_failure(const Record& record) {
    return fmt::format("{}: bytes {} to {} fail their checksum (tensor '{}')", *record.path, record.place.begin,
                       record.place.begin + record.place.bytes, *record.name);
}

// Reads all segments; report(record) is called for each checked record that differs from its checksum.
template <class Report>
void read_segments(OpenFiles& opened, const std::vector<Segment>& segments, int threads, const ByteProgress& progress,
                   const std::function<void()>& poll, Report report) {
    std::vector<uint32_t> crcs(segments.size(), 0);
    std::vector<AlignedBuffer> buffers(static_cast<size_t>(std::max(threads, 1)));
    const auto read_segment = [&](size_t index, int worker) {
        const Segment& segment = segments[index];
        const Record& record = *segment.record;
        const auto size = static_cast<size_t>(segment.end - segment.begin);
        std::byte* data = nullptr;
        const bool direct = record.runs.size() == 1 && record.runs[0].count() == 1 && !record.runs[0].converts() &&
                            record.runs[0].begin() <= segment.begin && record.runs[0].end() >= segment.end;
        if (direct) {
            data = record.runs[0].memory() + (segment.begin - record.runs[0].begin());
        } else {
            AlignedBuffer& buffer = buffers[static_cast<size_t>(worker)];
            if (buffer.size() == 0) buffer = AlignedBuffer(static_cast<size_t>(segment_bytes));
            data = buffer.data();
        }
        read_all(*opened.get(record.file), *record.path, std::span(data, size), record.place.begin + segment.begin);
        if (record.is_checked) crcs[index] = crc32(std::span<const std::byte>(data, size));
        if (progress) progress(segment.end - segment.begin);
        if (direct) return;
        for (const Runs& runs : record.runs) {
            if (runs.begin() < segment.end && runs.end() > segment.begin)
                runs.scatter(segment.begin, segment.end, data);
        }
    };
    run_parallel(segments.size(), threads, read_segment, poll);
    for (size_t i = 0; i < segments.size();) {
        const Record& record = *segments[i].record;
        uint32_t crc = 0;
        for (; i < segments.size() && segments[i].record == &record; ++i) {
            crc = crc32_joined(crc, crcs[i], segments[i].end - segments[i].begin);
        }
        if (record.is_checked && record.place.crc && *record.place.crc != crc) report(record);
    }
}

}  // namespace

TorchContents::TorchContents(FileSystem& files, const std::string& directory, DcpMetadata metadata)
    : files_(files), values_(std::move(metadata.values)) {
    for (const std::string& name : metadata.files) paths_.push_back(join(directory, name));
    for (auto& [name, tensor] : metadata.tensors) {
        Tensor& own = tensors_[name];
        own.dtype = tensor.dtype;
        for (const DcpChunk& chunk : tensor.chunks) own.pieces.push_back({chunk.box, chunk.item, pickle::no_ref, {}});
    }
}

TorchContents::TorchContents(FileSystem& files, std::string path, TorchArchive archive, Tensors tensors)
    : files_(files), paths_{std::move(path)}, archive_(std::move(archive)), tensors_(std::move(tensors)) {}

OpenFiles TorchContents::open_files() const {
    return OpenFiles([this](int file) { return open_file(files_, path_of(file), OpenMode::read); });
}

TorchPiece::Place TorchContents::locate(File& file, const std::string& name, const Tensor& tensor,
                                        const TorchPiece& piece) const {
    const std::string& path = path_of(piece.item.file);
    PartReader part(file, path, piece.item.offset, piece.item.length);
    const int64_t size = file.size();
    if (size < 0) throw os_error(fmt::format("cannot look at {}", path), static_cast<int>(-size));
    if (piece.item.length > size || piece.item.offset > size - piece.item.length) {
        throw Error(Code::corrupt,
                    fmt::format("{} has {} bytes; tensor '{}' is said to lie up to byte {}: it was truncated", path,
                                size, name, piece.item.offset + piece.item.length));
    }
    std::optional<TorchArchive> own;
    if (!archive_) own.emplace(part);
    const TorchArchive& archive = archive_ ? *archive_ : *own;
    const StoredTensor stored = archive.tensor(piece.node == pickle::no_ref ? archive.tree().root() : piece.node);
    if (stored.shape != piece.box.sizes || stored.dtype != tensor.dtype) {
        throw Error(Code::corrupt,
                    fmt::format("{}: the part {} of tensor '{}' at byte {} is {} {}, not the {} {} that the "
                                "metadata says",
                                path, piece.box.str(), name, piece.item.offset, name_of(stored.dtype),
                                stored.shape.str(), name_of(tensor.dtype), piece.box.sizes.str()));
    }
    TorchPiece::Place place;
    if (stored.entry == nullptr) return place;
    place.begin = piece.item.offset + archive.zip().data_begin(part, *stored.entry);
    place.bytes = stored.entry->size;
    if (archive.zip().has_checksums()) place.crc = stored.entry->crc;
    place.strides = stored.strides;
    place.first = stored.first;
    return place;
}

bool TorchContents::read(std::span<const Wanted> wanted, const ReadOptions& options) const {
    struct Want {
        const Wanted* wanted;
        const Tensor* tensor;
        TorchPiece* piece;
        TorchPiece::Place place{};
    };
    std::vector<Want> wants;
    for (const Wanted& one : wanted) {
        if (one.box->empty()) continue;
        const auto found = tensors_.find(*one.name);
        if (found == tensors_.end()) continue;  // without elements
        for (TorchPiece& piece : found->second.pieces) {
            if (!piece.box.intersect(*one.box).empty()) wants.push_back({&one, &found->second, &piece});
        }
    }
    std::sort(wants.begin(), wants.end(), [](const Want& a, const Want& b) {
        return std::tie(a.piece->item.file, a.piece->item.offset, a.piece) <
               std::tie(b.piece->item.file, b.piece->item.offset, b.piece);
    });
    OpenFiles opened = open_files();
    // Tied tensors share a storage, which is read once.
    std::map<std::pair<int, int64_t>, std::unique_ptr<Record>> records;
    // A place once found stays, until a check finds it anew; two loads at once wait here for each other.
    {
        const std::lock_guard lock(mutex_);
        std::vector<const Want*> unknown;
        for (size_t i = 0; i < wants.size(); ++i) {
            if (!wants[i].piece->place && (i == 0 || wants[i - 1].piece != wants[i].piece))
                unknown.push_back(&wants[i]);
        }
        run_parallel(unknown.size(), options.threads, [&](size_t i, int) {
            const Want& want = *unknown[i];
            want.piece->place =
                locate(*opened.get(want.piece->item.file), *want.wanted->name, *want.tensor, *want.piece);
        });
        for (Want& want : wants) {
            want.place = *want.piece->place;
            const int file = want.piece->item.file;
            auto& record = records[{file, want.place.begin}];
            if (record != nullptr) continue;
            record = std::make_unique<Record>(Record{&path_of(file), file, want.wanted->name, want.place});
            // What is read in parts, as a conversion does, is checked as a whole at the first of them.
            record->is_checked = options.verify == Verify::blocks && !sound_.contains({file, want.place.begin});
        }
    }
    for (const Want& want : wants) {
        const TorchPiece& piece = *want.piece;
        const auto& record = records.at({piece.item.file, want.place.begin});
        const auto item = static_cast<int64_t>(size_of(want.tensor->dtype));
        try {
            record->runs.emplace_back(
                piece.box.intersect(*want.wanted->box),
                FilePlace{&piece.box, &want.place.strides, want.tensor->dtype, want.place.first * item},
                MemoryPlace{want.wanted->box, want.wanted->dtype, want.wanted->memory});
        } catch (const Error& error) {
            throw Error(error.code(),
                        fmt::format("{}: tensor '{}': {}", *record->path, *want.wanted->name, error.what()));
        }
    }
    std::vector<Segment> segments;
    for (auto& [place, record] : records) add_segments(*record, segments);
    int64_t total = 0;
    for (const Segment& segment : segments) total += segment.end - segment.begin;
    Progress progress(options.progress, Phase::read, total);
    read_segments(
        opened, segments, options.threads, [&](int64_t bytes) { progress.add(bytes); }, [&] { progress.poll(); },
        [](const Record& record) { throw Error(Code::corrupt, checksum_failure(record)); });
    {
        const std::lock_guard lock(mutex_);
        for (const auto& [place, record] : records) {
            if (record->is_checked) sound_.insert(place);
        }
    }
    progress.finish();
    return options.verify == Verify::blocks &&
           std::ranges::all_of(records, [](const auto& entry) { return entry.second->place.crc.has_value(); });
}

// The archives lie where the metadata says, one behind the other.
void TorchContents::check_items(std::vector<std::string>& faults) const {
    struct Item {
        DcpItem item;
        const std::string* name;
    };
    std::vector<Item> items;
    for (const auto& [name, tensor] : tensors_) {
        for (const TorchPiece& piece : tensor.pieces) {
            if (piece.node == pickle::no_ref) items.push_back({piece.item, &name});
        }
    }
    for (const auto& [name, item] : values_) items.push_back({item, &name});
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        return std::tie(a.item.file, a.item.offset, a.item.length) <
               std::tie(b.item.file, b.item.offset, b.item.length);
    });
    for (size_t i = 1; i < items.size(); ++i) {
        const DcpItem& before = items[i - 1].item;
        const DcpItem& item = items[i].item;
        if (before.file != item.file || before.offset + before.length <= item.offset) continue;
        if (before.offset == item.offset && before.length == item.length) continue;  // tied
        faults.push_back(fmt::format("{}: '{}' at byte {} overlaps '{}'", path_of(item.file), *items[i].name,
                                     item.offset, *items[i - 1].name));
    }
}

std::vector<std::string> TorchContents::verify(Depth depth, const ByteProgress& progress,
                                               const std::function<void()>& poll) const {
    std::vector<std::string> faults;
    check_items(faults);
    const auto attempt = [&](auto&& body) {
        try {
            body();
            return true;
        } catch (const Error& error) {
            if (error.code() != Code::corrupt && error.code() != Code::not_found) throw;
            if (std::find(faults.begin(), faults.end(), error.what()) == faults.end())
                faults.emplace_back(error.what());
            return false;
        }
    };
    OpenFiles opened = open_files();
    std::vector<bool> is_there(paths_.size());
    for (size_t file = 0; file < paths_.size(); ++file) {
        is_there[file] = attempt([&] { (void)opened.get(static_cast<int>(file)); });
    }
    const auto check_small = [&](const DcpItem& item) {
        const auto file = opened.get(item.file);
        PartReader part(*file, path_of(item.file), item.offset, item.length);
        const ZipArchive zip = ZipArchive::read(part);
        for (const ZipEntry& entry : zip.entries()) {
            if (depth == Depth::headers || entry.name.starts_with("data/")) {
                (void)zip.data_begin(part, entry);
            } else {
                (void)zip.read_entry(part, entry, pickle::max_bytes);
            }
        }
    };
    for (const auto& [name, item] : values_) {
        if (!is_there[static_cast<size_t>(item.file)]) continue;
        attempt([&, &item = item] {
            const auto file = opened.get(item.file);
            PartReader part(*file, path_of(item.file), item.offset, item.length);
            (void)TorchArchive(part);
            check_small(item);
        });
    }
    std::map<std::pair<int, int64_t>, std::unique_ptr<Record>> records;
    const std::lock_guard lock(mutex_);
    sound_.clear();
    bool checked = false;
    for (auto& [name, tensor] : tensors_) {
        for (TorchPiece& piece : tensor.pieces) {
            const int file = piece.item.file;
            if (!is_there[static_cast<size_t>(file)]) continue;
            // Anew, even if it was found before: files may have changed since.
            attempt([&, &name = name, &tensor = tensor] {
                piece.place = locate(*opened.get(file), name, tensor, piece);
                auto& record = records[{file, piece.place->begin}];
                if (record == nullptr) {
                    record = std::make_unique<Record>(Record{&path_of(file), file, &name, *piece.place, true});
                }
                if (!archive_ || !checked) check_small(piece.item);
                checked = true;
            });
        }
    }
    if (archive_ && !checked && is_there[0]) {
        attempt([&] { check_small({0, 0, opened.get(0)->size()}); });
    }
    if (depth == Depth::headers) return faults;
    std::vector<Segment> segments;
    for (auto& [place, record] : records) add_segments(*record, segments);
    attempt([&] {
        read_segments(opened, segments, verify_threads, progress, poll,
                      [&](const Record& record) { faults.push_back(checksum_failure(record)); });
    });
    return faults;
}

}  // namespace tsr
