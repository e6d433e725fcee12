#include "checkpoint/formats/native/reader.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/parallel.hpp"
#include "base/round_up.hpp"
#include "checkpoint/formats/device_reads.hpp"
#include "checkpoint/formats/host_reads.hpp"
#include "checkpoint/io/open_files.hpp"
#include "checkpoint/model/runs.hpp"

namespace tsr {

namespace {

constexpr int64_t blocks_per_read = 4;

bool is_aligned(const std::byte* memory) {
    return reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(direct_alignment) == 0;
}

Runs runs_of(const Transfer& transfer) {
    const FileEntry& entry = *transfer.entry;
    return {entry.box->intersect(*transfer.memory_box),
            {entry.box.get(), nullptr, entry.dtype, entry.begin},
            {transfer.memory_box, transfer.memory_dtype, transfer.memory, transfer.on}};
}

// One file while it is read. Cold data is read past the page cache, warm data through it.
struct Source {
    int number = 0;
    const RankFile* file = nullptr;
    std::vector<Runs> runs;  // in order of their begin
    // Which runs touch which block: first[b] .. first[b + 1] in `touching`.
    std::vector<size_t> first;
    std::vector<size_t> touching;

    [[nodiscard]] size_t blocks() const { return first.size() - 1; }
    [[nodiscard]] size_t count(size_t block) const { return first[block + 1] - first[block]; }
};

// Up to four neighbouring blocks, read by one request.
struct Task {
    const Source* source = nullptr;
    int64_t begin = 0;  // of the data
    int64_t end = 0;
    std::byte* to = nullptr;     // the destination if the bytes are contiguous there; otherwise they are scattered
    CopyStream* on = nullptr;    // the device of `to`
    std::vector<size_t> runs{};  // the runs that touch it
    int64_t chunk = -1;          // of the host's shared reads; -1: read by this rank alone

    void scatter(int64_t from, int64_t until, const std::byte* data) const {
        for (const size_t i : runs) source->runs[i].scatter(from, until, data);
    }
};

bool looks_cached(File& file, int64_t begin, int64_t end) {
    // A few probes over the whole range: with one probe per request, the first bytes, which the header brought into the
    // cache, would cause more and more to be read ahead through the cache.
    constexpr int64_t probes = 8;
    int64_t cached = 0;
    for (int64_t i = 0; i < probes; ++i) cached += file.is_cached(begin + (end - 1 - begin) / probes * i) ? 1 : 0;
    return cached * 2 >= probes;
}

std::unique_ptr<File> open_for_reading(FileSystem& files, const RankFile& file) {
    auto handle = open_file(files, file.path(), OpenMode::read);
    // Less than this is not worth the second open.
    if (file.data_bytes() < 8 * block_bytes) return handle;
    if (looks_cached(*handle, file.data_begin(), file.data_begin() + file.data_bytes())) return handle;
    return open_file(files, file.path(), OpenMode::read_direct);
}

// Reads data bytes [begin, end) to `into`, which has room up to the next multiple of 4096.
void read_range(File& handle, const RankFile& file, int64_t begin, int64_t end, std::byte* into) {
    const int64_t size = end - begin;
    const int64_t offset = file.data_begin() + begin;
    if (!handle.is_direct() || (size % direct_alignment == 0)) {
        read_all(handle, file.path(), std::span(into, static_cast<size_t>(size)), offset);
        return;
    }
    // The file's tail: a direct read asks for a whole page and gets what is there.
    int64_t done = 0;
    while (done < size) {
        const int64_t room = round_up(size, direct_alignment) - done;
        const int64_t got = handle.read(std::span(into + done, static_cast<size_t>(room)), offset + done);
        if (got > 0 && (done + got >= size || got % direct_alignment == 0)) {
            done += got;
            continue;
        }
        if (got == -EINTR || got == -EAGAIN) continue;
        // Anything else is left to the page cache, which reports it.
        if (const int64_t left = handle.leave_direct(); left < 0) {
            throw os_error(fmt::format("cannot read {}", file.path()), static_cast<int>(-left));
        }
        if (got > 0) done += got;
        if (done < size) {
            read_all(handle, file.path(), std::span(into + done, static_cast<size_t>(size - done)), offset + done);
        }
        return;
    }
}

std::string block_failure(const RankFile& file, int64_t begin, int64_t end) {
    const FileEntry* entry = file.at(begin);
    const FileEntry* last = file.at(end - 1);
    std::string tensors = entry != nullptr ? fmt::format(" (tensor '{}'", entry->name) : " (";
    if (last != nullptr && last != entry) tensors += fmt::format(" to '{}'", last->name);
    return fmt::format("{}: bytes {} to {} do not match their checksum{})", file.path(), file.data_begin() + begin,
                       file.data_begin() + end, tensors);
}

// Calls report(begin, end) for each block of [begin, end) that fails.
template <class Report>
void check_range(const RankFile& file, int64_t begin, int64_t end, const std::byte* data, Report report) {
    for (int64_t block = begin; block < end; block += block_bytes) {
        const int64_t stop = std::min(block + block_bytes, end);
        const auto bytes = std::span(data + (block - begin), static_cast<size_t>(stop - block));
        if (crc32c(bytes) != file.crcs()[static_cast<size_t>(block / block_bytes)]) report(block, stop);
    }
}

void sort_by_blocks(Source& source) {
    std::sort(source.runs.begin(), source.runs.end(),
              [](const Runs& a, const Runs& b) { return a.begin() < b.begin(); });
    const auto blocks = static_cast<size_t>(round_up(source.file->data_bytes(), block_bytes) / block_bytes);
    const auto blocks_of = [](const Runs& runs) {
        return std::pair(static_cast<size_t>(runs.begin() / block_bytes),
                         static_cast<size_t>((runs.end() - 1) / block_bytes));
    };
    std::vector<size_t>& first = source.first;
    first.assign(blocks + 1, 0);
    for (const Runs& runs : source.runs) {
        const auto [from, to] = blocks_of(runs);
        for (size_t block = from; block <= to; ++block) ++first[block + 1];
    }
    for (size_t block = 0; block < blocks; ++block) first[block + 1] += first[block];
    source.touching.resize(first[blocks]);
    std::vector<size_t> fill(first.begin(), first.end() - 1);
    for (size_t i = 0; i < source.runs.size(); ++i) {
        const auto [from, to] = blocks_of(source.runs[i]);
        for (size_t block = from; block <= to; ++block) source.touching[fill[block]++] = i;
    }
}

using Sources = std::map<int, Source>;  // by their numbers

std::vector<HostReads::Range> wanted_blocks(const Sources& sources) {
    std::vector<HostReads::Range> ranges;
    for (const auto& [number, source] : sources) {
        bool open = false;
        for (size_t block = 0; block < source.blocks(); ++block) {
            const bool wanted = source.count(block) > 0;
            const auto at = static_cast<int64_t>(block);
            if (wanted && !open) ranges.push_back({number, at, at});
            if (wanted) ranges.back().end = at + 1;
            open = wanted;
        }
    }
    return ranges;
}

// One block as a task. Unless blocks are verified, unwanted bytes at its beginning and end are left out.
Task task_of(const Source& source, size_t block, int64_t chunk, Verify verify, const DeviceReads& devices) {
    const auto begin = static_cast<int64_t>(block) * block_bytes;
    Task task{&source, begin, std::min(begin + block_bytes, source.file->data_bytes())};
    task.chunk = chunk;
    task.runs.assign(source.touching.begin() + static_cast<std::ptrdiff_t>(source.first[block]),
                     source.touching.begin() + static_cast<std::ptrdiff_t>(source.first[block + 1]));
    if (chunk >= 0) return task;
    if (verify == Verify::none) {
        int64_t from = task.end;
        int64_t until = task.begin;
        for (const size_t i : task.runs) {
            from = std::min(from, std::max(task.begin, source.runs[i].begin()));
            until = std::max(until, std::min(task.end, source.runs[i].end()));
        }
        task.begin = from;
        task.end = until;
    }
    const Runs& only = source.runs[task.runs.front()];
    const bool as_it_stands =
        task.runs.size() == 1 && only.is_plain() && only.begin() <= task.begin && only.end() >= task.end;
    if (as_it_stands && (only.on() == nullptr || devices.into(only.on()))) {
        task.to = only.memory() + (task.begin - only.begin());
        task.on = only.on();
    }
    return task;
}

// Adjacent tasks of the same kind become one request.
bool joins(const Task& before, const Task& task) {
    if (before.source != task.source || before.end != task.begin || before.chunk != task.chunk) return false;
    if (task.end - before.begin > blocks_per_read * block_bytes) return false;
    if ((before.to != nullptr) != (task.to != nullptr) || before.on != task.on) return false;
    return task.to == nullptr || before.to + (task.begin - before.begin) == task.to;
}

// What is wanted, in order of files and bytes; each of `chunks` that this rank wants is one task.
std::vector<Task> make_tasks(const Sources& sources, Verify verify, std::span<const HostReads::Chunk> chunks,
                             const DeviceReads& devices) {
    std::vector<Task> tasks;
    size_t chunk = 0;
    for (const auto& [number, source] : sources) {
        for (size_t block = 0; block < source.blocks(); ++block) {
            if (source.count(block) == 0) continue;
            const auto at = static_cast<int64_t>(block);
            while (chunk < chunks.size() &&
                   std::pair(chunks[chunk].blocks.file, chunks[chunk].blocks.end) <= std::pair(int64_t{number}, at)) {
                ++chunk;
            }
            const bool shared =
                chunk < chunks.size() && chunks[chunk].blocks.file == number && chunks[chunk].blocks.begin <= at;
            Task task = task_of(source, block, shared ? static_cast<int64_t>(chunk) : -1, verify, devices);
            if (tasks.empty() || !joins(tasks.back(), task)) {
                tasks.push_back(std::move(task));
                continue;
            }
            // Runs that begin in the previous block are in both lists, which ascend.
            Task& before = tasks.back();
            std::vector<size_t> both;
            std::set_union(before.runs.begin(), before.runs.end(), task.runs.begin(), task.runs.end(),
                           std::back_inserter(both));
            before.runs = std::move(both);
            before.end = task.end;
        }
    }
    return tasks;
}

// Reads and checks, to `into`.
void fill(const Task& task, File& handle, Verify verify, std::byte* into) {
    const RankFile& file = *task.source->file;
    read_range(handle, file, task.begin, task.end, into);
    if (verify == Verify::none) return;
    check_range(file, task.begin, task.end, into,
                [&](int64_t begin, int64_t end) { throw Error(Code::corrupt, block_failure(file, begin, end)); });
}

// Reads straight into a device's memory, and checks there; false where that is not possible.
bool fill_on_device(const Task& task, File& handle, Verify verify) {
    const RankFile& file = *task.source->file;
    if (!read_to_device(handle, file.data_begin() + task.begin, task.end - task.begin, task.to, *task.on)) return false;
    if (verify == Verify::none) return true;
    std::vector<std::span<const std::byte>> blocks;
    for (int64_t block = task.begin; block < task.end; block += block_bytes) {
        const int64_t stop = std::min(block + block_bytes, task.end);
        blocks.emplace_back(task.to + (block - task.begin), static_cast<size_t>(stop - block));
    }
    const std::vector<uint32_t> crcs = task.on->checksums(blocks);
    for (size_t i = 0; i < crcs.size(); ++i) {
        const int64_t block = task.begin + static_cast<int64_t>(i) * block_bytes;
        if (crcs[i] == file.crcs()[static_cast<size_t>(block / block_bytes)]) continue;
        throw Error(Code::corrupt, block_failure(file, block, std::min(block + block_bytes, task.end)));
    }
    return true;
}

// Reads what only this rank wants, directly into its destination if possible.
void read_own(Task task, File& handle, Verify verify, AlignedBuffer& buffer) {
    if (task.on != nullptr) [[unlikely]] {
        if (fill_on_device(task, handle, verify)) return;
        task.to = nullptr;
    }
    const int64_t begin = task.begin;
    const int64_t end = task.end;
    bool fits = task.to != nullptr;
    if (handle.is_direct()) {
        task.begin = begin / direct_alignment * direct_alignment;
        task.end = std::min(round_up(end, direct_alignment), task.source->file->data_bytes());
        fits = fits && task.begin == begin && task.end == end && end % direct_alignment == 0 && is_aligned(task.to);
    }
    if (fits) return fill(task, handle, verify, task.to);
    if (buffer.size() == 0) buffer = AlignedBuffer(static_cast<size_t>(blocks_per_read * block_bytes));
    fill(task, handle, verify, buffer.data());
    task.scatter(task.begin, task.end, buffer.data());
}

}  // namespace

void read_transfers(FileSystem& files, std::vector<Transfer> transfers, const ReadOptions& options) {
    std::map<int, size_t> counts;  // by the files' numbers
    for (const Transfer& transfer : transfers) ++counts[transfer.file_number];
    Sources sources;
    DeviceReads devices(options.verify);
    for (const Transfer& transfer : transfers) {
        devices.ask(transfer.on);
        Source& source = sources[transfer.file_number];
        if (source.file == nullptr) {
            source.number = transfer.file_number;
            source.file = transfer.file;
            source.runs.reserve(counts[transfer.file_number]);
        }
        source.runs.push_back(runs_of(transfer));
    }
    transfers = std::vector<Transfer>();  // frees its memory before the buffers are allocated
    for (auto& [number, source] : sources) sort_by_blocks(source);
    std::span<const HostReads::Chunk> chunks;
    if (options.host != nullptr) chunks = options.host->share(wanted_blocks(sources));
    std::vector<Task> tasks = make_tasks(sources, options.verify, chunks, devices);

    int64_t total = 0;
    for (const Task& task : tasks) total += task.end - task.begin;
    Progress progress(options.progress, Phase::read, total);
    const auto shared =
        std::stable_partition(tasks.begin(), tasks.end(), [](const Task& task) { return task.chunk < 0; });
    std::vector<const Task*> of_chunk(chunks.size(), nullptr);
    for (auto task = shared; task != tasks.end(); ++task) of_chunk[static_cast<size_t>(task->chunk)] = &*task;

    OpenFiles opened([&](int number) { return open_for_reading(files, *sources.at(number).file); });
    std::vector<AlignedBuffer> buffers(static_cast<size_t>(std::max(options.threads, 1)));
    const auto own = [&](size_t index, int worker) {
        const Task& task = tasks[index];
        read_own(task, *opened.get(task.source->number), options.verify, buffers[static_cast<size_t>(worker)]);
        progress.add(task.end - task.begin);
    };
    const auto own_tasks = static_cast<size_t>(shared - tasks.begin());
    const auto poll = [&] { progress.poll(); };
    if (chunks.empty()) {
        run_parallel(own_tasks, options.threads, own, poll);
    } else {
        HostReads::Work work;
        work.fill = [&](size_t chunk, std::byte* slot) {
            const Task& task = *of_chunk[chunk];
            fill(task, *opened.get(task.source->number), options.verify, slot);
            return uint32_t{0};
        };
        work.take = [&](size_t chunk, const std::byte* slot, uint32_t /*told*/) {
            const Task& task = *of_chunk[chunk];
            task.scatter(task.begin, task.end, slot);
            progress.add(task.end - task.begin);
        };
        work.own_tasks = own_tasks;
        work.own = own;
        work.poll = poll;
        work.threads = options.threads;
        options.host->run(work);
    }
    progress.finish();
}

std::vector<std::string> check_blocks(FileSystem& files, const RankFile& file, int threads,
                                      const ByteProgress& progress, const std::function<void()>& poll) {
    const auto handle = open_for_reading(files, file);
    const int64_t step = blocks_per_read * block_bytes;
    const auto tasks = static_cast<size_t>(round_up(file.data_bytes(), step) / step);
    std::vector<AlignedBuffer> buffers(static_cast<size_t>(std::max(threads, 1)));
    std::mutex mutex;
    std::map<int64_t, std::string> failures;  // guarded by mutex; by offset
    const auto check_task = [&](size_t task, int worker) {
        AlignedBuffer& buffer = buffers[static_cast<size_t>(worker)];
        if (buffer.size() == 0) buffer = AlignedBuffer(static_cast<size_t>(step));
        const int64_t begin = static_cast<int64_t>(task) * step;
        const int64_t end = std::min(begin + step, file.data_bytes());
        read_range(*handle, file, begin, end, buffer.data());
        check_range(file, begin, end, buffer.data(), [&](int64_t from, int64_t to) {
            const std::lock_guard lock(mutex);
            failures.emplace(from, block_failure(file, from, to));
        });
        if (progress) progress(end - begin);
    };
    run_parallel(tasks, threads, check_task, poll);
    std::vector<std::string> messages;
    for (auto& [offset, message] : failures) messages.push_back(std::move(message));
    return messages;
}

}  // namespace tsr
