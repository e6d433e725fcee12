#include "checkpoint/formats/torch_dcp/contents.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <tuple>

#include "base/crc32.hpp"
#include "base/error.hpp"
#include "base/parallel.hpp"
#include "checkpoint/formats/shared_ranges.hpp"
#include "checkpoint/model/runs.hpp"

namespace tsr {

namespace {

constexpr int64_t segment_bytes = SharedRanges::most_bytes;  // a multiple of every element's size

// A storage to be read from a file.
struct ArchiveEntry {
    const std::string* path = nullptr;
    int file = 0;
    const std::string* name = nullptr;  // of a tensor in it, for messages
    TorchPiece::Place place;
    bool is_checked = false;  // then all of it is read
    std::vector<Runs> runs{};
};

using Records = std::map<std::pair<int, int64_t>, std::unique_ptr<ArchiveEntry>>;  // by file and place

// Adds the ranges to read of a record: all of it, or those around the wanted bytes.
void add_ranges(ArchiveEntry& record, std::vector<ByteRange>& ranges, std::vector<ArchiveEntry*>& owners) {
    // Synchronizing with other ranks takes longer than reading a small storage.
    constexpr int64_t least_shared_bytes = int64_t{256} << 10;
    const bool may_be_shared = record.place.bytes >= least_shared_bytes;
    const auto add = [&](int64_t begin, int64_t end) {
        if (!owners.empty() && owners.back() == &record && ranges.back().end == begin) {
            ranges.back().end = end;
            return;
        }
        ranges.push_back({record.file, record.place.begin, begin, end, may_be_shared});
        owners.push_back(&record);
    };
    if (record.is_checked) {
        if (record.place.bytes > 0) add(0, record.place.bytes);
        return;
    }
    int64_t begin = record.place.bytes;
    int64_t end = 0;
    for (const Runs& runs : record.runs) {
        begin = std::min(begin, runs.begin());
        end = std::max(end, runs.end());
    }
    while (begin < end) {
        const int64_t stop = std::min(end, (begin / segment_bytes + 1) * segment_bytes);
        const bool needed = std::any_of(record.runs.begin(), record.runs.end(),
                                        [&](const Runs& runs) { return runs.begin() < stop && runs.end() > begin; });
        if (needed) add(begin, stop);
        begin = stop;
    }
}

std::string checksum_failure(const ArchiveEntry& record) {
    return fmt::format("{}: bytes {} to {} do not match their checksum (tensor '{}')", *record.path, record.place.begin,
                       record.place.begin + record.place.bytes, *record.name);
}

Dims row_major_strides(const Dims& sizes) {
    std::vector<int64_t> strides(static_cast<size_t>(sizes.ndim()), 1);
    for (int d = sizes.ndim() - 2; d >= 0; --d) {
        strides[static_cast<size_t>(d)] = strides[static_cast<size_t>(d) + 1] * sizes[d + 1];
    }
    return Dims(strides);
}

void write_number(float number, const Box& box, const Wanted& wanted) {
    const Runs runs(box, FilePlace{&box, nullptr, DType::f32, 0},
                    MemoryPlace{wanted.box, wanted.dtype, wanted.memory, wanted.on});
    runs.scatter(0, sizeof(number), reinterpret_cast<const std::byte*>(&number));
}

// Adds the storages of which no tensor is listed, to be checked.
void add_other_storages(const ZipArchive& zip, File& file, const std::string& path, int number, Records& records) {
    PartReader part(file, path, 0, file.size());
    for (const ZipEntry& entry : zip.entries()) {
        if (!entry.name.starts_with("data/") || entry.size == 0 || !zip.has_checksums()) continue;
        TorchPiece::Place place;
        place.begin = zip.data_begin(part, entry);
        place.bytes = entry.size;
        place.crc = entry.crc;
        auto& record = records[{number, place.begin}];
        if (record == nullptr) {
            record = std::make_unique<ArchiveEntry>(ArchiveEntry{&path, number, &entry.name, std::move(place), true});
        }
    }
}

// Reads records, which must outlive this; some of them together with the ranks of this host.
class RecordReader {
   public:
    RecordReader(const Records& records, HostReads* host)
        : records_(records), shared_(host, ranges_of(records, owners_)) {}

    [[nodiscard]] int64_t size_bytes() const { return shared_.size_bytes(); }

    // Calls report(record) for each checked record that differs from its checksum.
    template <class Report>
    void run(OpenFiles& opened, int threads, const ByteProgress& progress, const std::function<void()>& poll,
             Report report) const {
        const std::vector<SharedRanges::Part>& parts = shared_.parts();
        std::vector<uint32_t> crcs(parts.size(), 0);
        std::vector<AlignedBuffer> buffers(static_cast<size_t>(std::max(threads, 1)));
        const auto done = [&](const SharedRanges::Part& part) {
            if (progress) progress(part.end - part.begin);
        };
        SharedRanges::Work work;
        work.read = [&](size_t i, int worker) {
            crcs[i] = read(opened, parts[i], buffers[static_cast<size_t>(worker)]);
            done(parts[i]);
        };
        work.fill = [&](const ByteRange& blocks, std::byte* slot) -> uint32_t {
            const ArchiveEntry& record = *records_.at({static_cast<int>(blocks.file), blocks.place});
            const int64_t end = std::min(blocks.end, record.place.bytes);
            const std::span<std::byte> data(slot, static_cast<size_t>(end - blocks.begin));
            read_all(*opened.get(record.file), *record.path, data, record.place.begin + blocks.begin);
            // Other ranks may want to check a record that this rank has checked before.
            return record.place.crc ? crc32(std::span<const std::byte>(data)) : 0;
        };
        work.take = [&](size_t i, const std::byte* data, uint32_t told) {
            scatter(parts[i], data);
            crcs[i] = told;  // of a checked record, a part is everything that the chunk has of it
            done(parts[i]);
        };
        work.poll = poll;
        work.threads = threads;
        shared_.run(work);
        for (size_t i = 0; i < parts.size();) {
            const ArchiveEntry& record = *owners_[parts[i].range];
            uint32_t crc = 0;
            for (; i < parts.size() && owners_[parts[i].range] == &record; ++i) {
                crc = crc32_joined(crc, crcs[i], parts[i].end - parts[i].begin);
            }
            if (record.is_checked && record.place.crc && *record.place.crc != crc) report(record);
        }
    }

   private:
    static std::vector<ByteRange> ranges_of(const Records& records, std::vector<ArchiveEntry*>& owners) {
        std::vector<ByteRange> ranges;
        for (const auto& [place, record] : records) add_ranges(*record, ranges, owners);
        return ranges;
    }

    // Returns the checksum if it is needed.
    uint32_t read(OpenFiles& opened, const SharedRanges::Part& part, AlignedBuffer& buffer) const {
        const ArchiveEntry& record = *owners_[part.range];
        const auto size = static_cast<size_t>(part.end - part.begin);
        const bool direct = record.runs.size() == 1 && record.runs[0].is_plain() && record.runs[0].on() == nullptr &&
                            record.runs[0].begin() <= part.begin && record.runs[0].end() >= part.end;
        if (!direct && buffer.size() == 0) buffer = AlignedBuffer(static_cast<size_t>(segment_bytes));
        std::byte* data = direct ? record.runs[0].memory() + (part.begin - record.runs[0].begin()) : buffer.data();
        read_all(*opened.get(record.file), *record.path, std::span(data, size), record.place.begin + part.begin);
        const uint32_t crc = record.is_checked ? crc32(std::span<const std::byte>(data, size)) : 0;
        if (!direct) scatter(part, data);
        return crc;
    }

    void scatter(const SharedRanges::Part& part, const std::byte* data) const {
        for (const Runs& runs : owners_[part.range]->runs) {
            if (runs.begin() < part.end && runs.end() > part.begin) runs.scatter(part.begin, part.end, data);
        }
    }

    const Records& records_;
    std::vector<ArchiveEntry*> owners_;  // of the ranges
    SharedRanges shared_;
};

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

TorchContents::TorchContents(FileSystem& files, std::vector<std::string> paths, std::vector<TorchArchive> archives,
                             Tensors tensors)
    : files_(files), paths_(std::move(paths)), archives_(std::move(archives)), tensors_(std::move(tensors)) {}

const TorchArchive* TorchContents::archive_of(int file) const {
    return archives_.empty() ? nullptr : &archives_[static_cast<size_t>(file)];
}

OpenFiles TorchContents::open_files() const {
    return OpenFiles([this](int file) { return open_file(files_, path_of(file), OpenMode::read); });
}

TorchPiece::Place TorchContents::locate(File& file, const std::string& name, const Tensor& tensor,
                                        const TorchPiece& piece) const {
    const std::string& path = path_of(piece.item.file);
    PartReader part(file, path, piece.item.offset, piece.item.length);
    const int64_t size = file.size();
    if (size < 0) throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-size));
    if (piece.item.length > size || piece.item.offset > size - piece.item.length) {
        refuse_lfs_pointer(file, path);
        throw Error(Code::corrupt, fmt::format("{} has {} bytes, but tensor '{}' ends at byte {}: it was truncated",
                                               path, size, name, piece.item.offset + piece.item.length));
    }
    std::optional<TorchArchive> own;
    const TorchArchive* const known = archive_of(piece.item.file);
    if (known == nullptr) own.emplace(part);
    const TorchArchive& archive = known != nullptr ? *known : *own;
    const StoredTensor stored = archive.tensor(piece.node == pickle::no_ref ? archive.tree().root() : piece.node);
    if ((!piece.first && stored.shape != piece.box.sizes) || stored.dtype != tensor.dtype) {
        throw Error(Code::corrupt,
                    fmt::format("{}: the part {} of tensor '{}' at byte {} is {} {}, but {} {} in the metadata", path,
                                piece.box.str(), name, piece.item.offset, name_of(stored.dtype), stored.shape.str(),
                                name_of(tensor.dtype), piece.box.sizes.str()));
    }
    TorchPiece::Place place;
    if (stored.entry == nullptr) return place;
    place.begin = piece.item.offset + archive.zip().data_begin(part, *stored.entry);
    place.bytes = stored.entry->size;
    if (archive.zip().has_checksums()) {
        place.crc = stored.entry->crc;
    } else {
        lacks_checksums_ = true;
    }
    place.strides = piece.first ? row_major_strides(piece.box.sizes) : stored.strides;
    place.first = stored.first + piece.first.value_or(0);
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
        const auto tensor = tensors_.find(*one.name);
        if (tensor == tensors_.end()) continue;  // without elements
        for (TorchPiece& piece : tensor->second.pieces) {
            if (piece.box.intersect(*one.box).empty()) continue;
            if (piece.number) {
                write_number(*piece.number, piece.box, one);
            } else {
                wants.push_back({&one, &tensor->second, &piece});
            }
        }
    }
    std::sort(wants.begin(), wants.end(), [](const Want& a, const Want& b) {
        return std::tie(a.piece->item.file, a.piece->item.offset, a.piece) <
               std::tie(b.piece->item.file, b.piece->item.offset, b.piece);
    });
    OpenFiles opened = open_files();
    // Tied tensors share a storage, which is read once.
    Records records;
    // A place is kept once found, until a check finds it again. It is searched without the lock, as callbacks during a
    // wait, such as for interrupts, may also read this checkpoint.
    std::vector<const Want*> unknown;
    {
        const std::lock_guard lock(mutex_);
        for (size_t i = 0; i < wants.size(); ++i) {
            if (!wants[i].piece->place && (i == 0 || wants[i - 1].piece != wants[i].piece))
                unknown.push_back(&wants[i]);
        }
    }
    std::vector<TorchPiece::Place> found(unknown.size());
    run_parallel(unknown.size(), options.threads, [&](size_t i, int) {
        const Want& want = *unknown[i];
        found[i] = locate(*opened.get(want.piece->item.file), *want.wanted->name, *want.tensor, *want.piece);
    });
    {
        const std::lock_guard lock(mutex_);
        for (size_t i = 0; i < unknown.size(); ++i) unknown[i]->piece->place = std::move(found[i]);
        for (Want& want : wants) {
            want.place = *want.piece->place;
            const int file = want.piece->item.file;
            auto& record = records[{file, want.place.begin}];
            if (record != nullptr) continue;
            record = std::make_unique<ArchiveEntry>(ArchiveEntry{&path_of(file), file, want.wanted->name, want.place});
            // A storage that is read in parts, as by a conversion, is checked completely with the first of them.
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
                MemoryPlace{want.wanted->box, want.wanted->dtype, want.wanted->memory, want.wanted->on});
        } catch (const Error& error) {
            throw Error(error.code(),
                        fmt::format("{}: tensor '{}': {}", *record->path, *want.wanted->name, error.what()));
        }
    }
    const RecordReader reader(records, options.host);
    Progress progress(options.progress, Phase::read, reader.size_bytes());
    reader.run(
        opened, options.threads, [&](int64_t bytes) { progress.add(bytes); }, [&] { progress.poll(); },
        [](const ArchiveEntry& record) { throw Error(Code::corrupt, checksum_failure(record)); });
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

// Checks that archives do not overlap.
void TorchContents::check_items(std::vector<std::string>& faults) const {
    struct Item {
        DcpItem item;
        const std::string* name;
    };
    if (!archives_.empty()) return;  // an archive's entries were checked when it was opened
    std::vector<Item> items;
    for (const auto& [name, tensor] : tensors_) {
        for (const TorchPiece& piece : tensor.pieces) items.push_back({piece.item, &name});
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
    Records records;
    {
        const std::lock_guard lock(mutex_);
        sound_.clear();
        for (auto& [name, tensor] : tensors_) {
            for (TorchPiece& piece : tensor.pieces) {
                const int file = piece.item.file;
                if (!is_there[static_cast<size_t>(file)] || piece.number) continue;
                // Search again even if it was found before: files may have changed since.
                attempt([&, &name = name, &tensor = tensor] {
                    piece.place = locate(*opened.get(file), name, tensor, piece);
                    auto& record = records[{file, piece.place->begin}];
                    if (record == nullptr) {
                        record = std::make_unique<ArchiveEntry>(
                            ArchiveEntry{&path_of(file), file, &name, *piece.place, true});
                    }
                    if (archives_.empty()) check_small(piece.item);
                });
            }
        }
    }
    for (size_t i = 0; i < archives_.size(); ++i) {
        const int file = static_cast<int>(i);
        if (!is_there[i]) continue;
        attempt([&] {
            check_small({file, 0, opened.get(file)->size()});
            add_other_storages(archives_[i].zip(), *opened.get(file), path_of(file), file, records);
        });
    }
    if (depth == Depth::headers) return faults;
    const RecordReader reader(records, nullptr);
    attempt([&] {
        reader.run(opened, verify_threads, progress, poll,
                   [&](const ArchiveEntry& record) { faults.push_back(checksum_failure(record)); });
    });
    return faults;
}

}  // namespace tsr
