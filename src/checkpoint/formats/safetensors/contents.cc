#include "checkpoint/formats/safetensors/contents.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>

#include "base/error.hpp"
#include "base/parallel.hpp"
#include "checkpoint/formats/device_reads.hpp"
#include "checkpoint/formats/shared_ranges.hpp"
#include "checkpoint/io/open_files.hpp"
#include "checkpoint/model/runs.hpp"

namespace tsr {

namespace {

constexpr int64_t segment_bytes = SharedRanges::most_bytes;  // a multiple of every element's size
constexpr int64_t small_gap = int64_t{64} << 10;             // reading across it costs less than another request

// The wanted parts of one file, in order of its bytes.
struct Reading {
    int number = 0;
    const std::string* path = nullptr;
    int64_t data_begin = 0;
    int64_t data_bytes = 0;
    bool is_aligned = true;  // no element is cut at a block
    std::vector<Runs> runs;
};

// One request: bytes of the data for some runs. A run longer than a segment is cut at multiples of segment_bytes from
// its own beginning, so that no element is cut, wherever it is in the file.
struct Segment {
    const Reading* reading = nullptr;
    int64_t begin = 0;
    int64_t end = 0;
    size_t first = 0;  // of the reading's runs
    size_t count = 0;

    // Copies the bytes from `from` to `until`, which are at `data`.
    void scatter(int64_t from, int64_t until, const std::byte* data) const {
        for (size_t i = first; i < first + count; ++i) {
            const Runs& runs = reading->runs[i];
            // From the run's own beginning, which is also the beginning of an element.
            const int64_t start = std::max(from, runs.begin());
            if (start < until) runs.scatter(start, until, data + (start - from));
        }
    }
};

void add_segments(const Reading& reading, std::vector<Segment>& segments) {
    const std::vector<Runs>& runs = reading.runs;
    for (size_t i = 0; i < runs.size();) {
        if (runs[i].end() - runs[i].begin() > segment_bytes) {
            for (int64_t begin = runs[i].begin(); begin < runs[i].end(); begin += segment_bytes) {
                segments.push_back({&reading, begin, std::min(begin + segment_bytes, runs[i].end()), i, 1});
            }
            ++i;
            continue;
        }
        Segment segment{&reading, runs[i].begin(), runs[i].end(), i, 1};
        for (++i; i < runs.size(); ++i, ++segment.count) {
            const int64_t end = std::max(segment.end, runs[i].end());
            if (runs[i].begin() > segment.end + small_gap || end - segment.begin > segment_bytes) break;
            segment.end = end;
        }
        segments.push_back(segment);
    }
}

// Whether a device gets its part as it is in the file.
bool goes_to_device(const Segment& segment, const DeviceReads& devices) {
    const Runs& only = segment.reading->runs[segment.first];
    return segment.count == 1 && only.is_plain() && devices.into(only.on());
}

// Reads a part that only this rank reads.
void read_part(const Segment& segment, int64_t begin, int64_t end, File& file, AlignedBuffer& buffer) {
    const Reading& reading = *segment.reading;
    const auto size = static_cast<size_t>(end - begin);
    const Runs& only = reading.runs[segment.first];
    const int64_t offset = reading.data_begin + begin;
    if (segment.count == 1 && only.is_plain() && only.on() == nullptr) {
        return read_all(file, *reading.path, std::span(only.memory() + (begin - only.begin()), size), offset);
    }
    if (buffer.size() == 0) buffer = AlignedBuffer(static_cast<size_t>(segment_bytes));
    read_all(file, *reading.path, buffer.first(size), offset);
    segment.scatter(begin, end, buffer.data());
}

bool read_straight(const Segment& segment, int64_t begin, int64_t end, File& file) {
    const Reading& reading = *segment.reading;
    const Runs& only = reading.runs[segment.first];
    return read_to_device(file, reading.data_begin + begin, end - begin, only.memory() + (begin - only.begin()),
                          *only.on());
}

}  // namespace

std::unique_ptr<File> SafetensorsContents::open_unchanged(const Source& source, OpenMode mode) const {
    auto file = open_file(files_, source.path, mode);
    const int64_t size = file->size();
    if (size < 0) throw os_error(fmt::format("cannot stat {}", source.path), static_cast<int>(-size));
    if (size != source.header.file_bytes()) {
        throw Error(Code::corrupt, fmt::format("{}: it has {} bytes, but had {} when it was opened: it was changed",
                                               source.path, size, source.header.file_bytes()));
    }
    return file;
}

bool SafetensorsContents::read(std::span<const Wanted> wanted, const ReadOptions& options) const {
    std::map<int, Reading> readings;
    DeviceReads devices(Verify::none);
    for (const Wanted& one : wanted) {
        devices.ask(one.on);
        one.tensor->for_each_piece(*one.box, [&](const Box& box, int index) {
            const Box part = box.intersect(*one.box);
            if (part.empty()) return;
            const Source& source = sources_[static_cast<size_t>(index)];
            Reading& reading = readings[index];
            if (reading.path == nullptr) {
                reading.number = index;
                reading.path = &source.path;
                reading.data_begin = source.header.data_begin();
                reading.data_bytes = source.header.file_bytes() - reading.data_begin;
            }
            const SafetensorsEntry* entry = source.header.find(*one.name);
            if (entry == nullptr)
                throw Error(Code::internal, fmt::format("{} has no entry for '{}'", source.path, *one.name));
            const auto element = static_cast<int64_t>(size_of(entry->dtype));  // of a header that was parsed: not 0
            if (entry->begin % element != 0) reading.is_aligned = false;       // NOLINT(clang-analyzer-core.DivideZero)
            reading.runs.emplace_back(part, FilePlace{&box, nullptr, entry->dtype, entry->begin},
                                      MemoryPlace{one.box, one.dtype, one.memory, one.on});
        });
    }
    std::vector<Segment> segments;
    for (auto& [index, reading] : readings) {
        std::sort(reading.runs.begin(), reading.runs.end(),
                  [](const Runs& a, const Runs& b) { return a.begin() < b.begin(); });
        add_segments(reading, segments);
    }
    std::vector<ByteRange> ranges;
    for (const Segment& segment : segments) {
        ranges.push_back({segment.reading->number, 0, segment.begin, segment.end, segment.reading->is_aligned});
    }
    const SharedRanges shared(options.host, std::move(ranges));
    Progress progress(options.progress, Phase::read, shared.size_bytes());
    const auto opener = [&](OpenMode mode) {
        return [this, mode](int number) { return open_unchanged(sources_[static_cast<size_t>(number)], mode); };
    };
    OpenFiles opened(opener(OpenMode::read));
    OpenFiles direct(opener(OpenMode::read_direct));  // for devices
    std::vector<AlignedBuffer> buffers(static_cast<size_t>(std::max(options.threads, 1)));
    SharedRanges::Work work;
    work.read = [&](size_t i, int worker) {
        const SharedRanges::Part& part = shared.parts()[i];
        const Segment& segment = segments[part.range];
        const auto file = opened.get(segment.reading->number);
        if (!goes_to_device(segment, devices) ||
            !read_straight(segment, part.begin, part.end, *direct.get(segment.reading->number))) {
            read_part(segment, part.begin, part.end, *file, buffers[static_cast<size_t>(worker)]);
        }
        progress.add(part.end - part.begin);
    };
    work.fill = [&](const ByteRange& blocks, std::byte* slot) {
        const auto number = static_cast<int>(blocks.file);
        const Reading& reading = readings.at(number);
        const int64_t end = std::min(blocks.end, reading.data_bytes);
        read_all(*opened.get(number), *reading.path, std::span(slot, static_cast<size_t>(end - blocks.begin)),
                 reading.data_begin + blocks.begin);
        return uint32_t{0};
    };
    work.take = [&](size_t i, const std::byte* data, uint32_t /*told*/) {
        const SharedRanges::Part& part = shared.parts()[i];
        segments[part.range].scatter(part.begin, part.end, data);
        progress.add(part.end - part.begin);
    };
    work.poll = [&] { progress.poll(); };
    work.threads = options.threads;
    shared.run(work);
    progress.finish();
    return false;  // the format has no checksums
}

std::vector<std::string> SafetensorsContents::verify(Depth depth, const ByteProgress& progress,
                                                     const std::function<void()>& poll) const {
    std::vector<std::string> faults;
    for (const Source& source : sources_) {
        try {
            // Read again, as files may have changed since they were opened.
            const SafetensorsHeader header = SafetensorsHeader::read(files_, source.path);
            if (depth == Depth::headers) continue;
            const auto file = open_file(files_, source.path, OpenMode::read);
            const int64_t size = header.file_bytes();
            const auto count = static_cast<size_t>((size + segment_bytes - 1) / segment_bytes);
            std::vector<AlignedBuffer> buffers(static_cast<size_t>(verify_threads));
            run_parallel(
                count, verify_threads,
                [&](size_t i, int worker) {
                    AlignedBuffer& buffer = buffers[static_cast<size_t>(worker)];
                    if (buffer.size() == 0) buffer = AlignedBuffer(static_cast<size_t>(segment_bytes));
                    const int64_t begin = static_cast<int64_t>(i) * segment_bytes;
                    const int64_t bytes = std::min(segment_bytes, size - begin);
                    read_all(*file, source.path, buffer.first(static_cast<size_t>(bytes)), begin);
                    if (progress) progress(bytes);
                },
                poll);
        } catch (const Error& error) {
            if (error.code() != Code::corrupt && error.code() != Code::not_found) throw;
            faults.emplace_back(error.what());
        }
    }
    return faults;
}

}  // namespace tsr
