#include "checkpoint/native/reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/parallel.hpp"
#include "base/round_up.hpp"
#include "checkpoint/runs.hpp"

namespace tsr {

namespace {

constexpr int64_t blocks_per_read = 4;

bool is_aligned(const std::byte* memory) {
    return reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(direct_alignment) == 0;
}

Runs runs_of(const Transfer& transfer) {
    const FileEntry& entry = *transfer.entry;
    return {transfer.part,
            {&entry.box, nullptr, entry.dtype, entry.begin},
            {&transfer.memory_box, transfer.memory_dtype, transfer.memory}};
}

// One file while it is read. Cold data is read past the page cache, warm data through it.
struct Source {
    const RankFile* file = nullptr;
    std::unique_ptr<File> handle;
    std::vector<Runs> runs;
};

// Up to four neighbouring blocks, read by one request.
struct Task {
    const Source* source = nullptr;
    int64_t begin = 0;  // of the data; a multiple of block_bytes when blocks are verified
    int64_t end = 0;
    std::byte* direct = nullptr;  // where the bytes belong as they stand; else they are scattered
    size_t first_runs = 0;        // the transfers that touch it, in a list of indices
    size_t runs_count = 0;
};

bool looks_cached(File& file, int64_t begin, int64_t end) {
    // A few probes: a load is warm as a whole or not at all.
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
    return fmt::format("{}: bytes {} to {} fail their checksum{})", file.path(), file.data_begin() + begin,
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

// Cuts what is wanted of one file into tasks. `touching` collects the indices of runs, task by task.
void make_tasks(const Source& source, Verify verify, std::vector<Task>& tasks, std::vector<size_t>& touching) {
    const int64_t data_bytes = source.file->data_bytes();
    const auto blocks = static_cast<size_t>(round_up(data_bytes, block_bytes) / block_bytes);
    // Which runs touch which block: first[b] .. first[b + 1] in `list`.
    std::vector<size_t> first(blocks + 1, 0);
    const auto blocks_of = [](const Runs& runs) {
        return std::pair(static_cast<size_t>(runs.begin() / block_bytes),
                         static_cast<size_t>((runs.end() - 1) / block_bytes));
    };
    for (const Runs& runs : source.runs) {
        const auto [from, to] = blocks_of(runs);
        for (size_t block = from; block <= to; ++block) ++first[block + 1];
    }
    for (size_t block = 0; block < blocks; ++block) first[block + 1] += first[block];
    std::vector<size_t> list(first[blocks]);
    std::vector<size_t> fill(first.begin(), first.end() - 1);
    for (size_t i = 0; i < source.runs.size(); ++i) {
        const auto [from, to] = blocks_of(source.runs[i]);
        for (size_t block = from; block <= to; ++block) list[fill[block]++] = i;
    }

    const bool open_direct = source.handle->is_direct();
    for (size_t block = 0; block < blocks; ++block) {
        const size_t count = first[block + 1] - first[block];
        if (count == 0) continue;
        Task task;
        task.source = &source;
        task.begin = static_cast<int64_t>(block) * block_bytes;
        task.end = std::min(task.begin + block_bytes, data_bytes);
        const Runs& only = source.runs[list[first[block]]];
        if (count == 1 && only.count() == 1 && !only.converts()) {
            const bool whole = only.begin() <= task.begin && only.end() >= task.end;
            if (verify == Verify::none && !open_direct) {
                task.begin = std::max(task.begin, only.begin());
                task.end = std::min(task.end, only.end());
            }
            std::byte* to = only.memory() + (task.begin - only.begin());
            const bool fits = !open_direct || (is_aligned(to) && (task.end - task.begin) % direct_alignment == 0);
            if ((whole || (verify == Verify::none && !open_direct)) && fits) task.direct = to;
        } else if (verify == Verify::none && !open_direct) {
            int64_t begin = task.end;
            int64_t end = task.begin;
            for (size_t i = first[block]; i < first[block + 1]; ++i) {
                begin = std::min(begin, std::max(task.begin, source.runs[list[i]].begin()));
                end = std::max(end, std::min(task.end, source.runs[list[i]].end()));
            }
            task.begin = begin;
            task.end = end;
        }
        // Neighbours of one kind become one request.
        Task* before = tasks.empty() ? nullptr : &tasks.back();
        const bool joins = before != nullptr && before->source == &source && before->end == task.begin &&
                           task.end - before->begin <= blocks_per_read * block_bytes &&
                           (before->direct != nullptr) == (task.direct != nullptr) &&
                           (task.direct == nullptr || before->direct + (task.begin - before->begin) == task.direct);
        if (joins) {
            before->end = task.end;
        } else {
            task.first_runs = touching.size();
            tasks.push_back(task);
            before = &tasks.back();
        }
        for (size_t i = first[block]; i < first[block + 1]; ++i) {
            // A transfer that spans two blocks of the request is listed once.
            const auto listed = touching.begin() + static_cast<std::ptrdiff_t>(before->first_runs);
            const auto recent = touching.size() - before->first_runs > 64 ? touching.end() - 64 : listed;
            if (before->begin != task.begin && std::find(recent, touching.end(), list[i]) != touching.end()) continue;
            touching.push_back(list[i]);
        }
        before->runs_count = touching.size() - before->first_runs;
    }
}

}  // namespace

void read_transfers(FileSystem& files, std::vector<Transfer> transfers, const ReadOptions& options) {
    std::erase_if(transfers, [](const Transfer& transfer) { return transfer.part.empty(); });
    std::map<const RankFile*, std::unique_ptr<Source>> sources;
    for (const Transfer& transfer : transfers) {
        auto& source = sources[transfer.file];
        if (source == nullptr) {
            source = std::make_unique<Source>();
            source->file = transfer.file;
            source->handle = open_for_reading(files, *transfer.file);
        }
        source->runs.push_back(runs_of(transfer));
    }
    std::vector<Task> tasks;
    std::vector<size_t> touching;
    for (auto& [file, source] : sources) {
        std::sort(source->runs.begin(), source->runs.end(),
                  [](const Runs& a, const Runs& b) { return a.begin() < b.begin(); });
        make_tasks(*source, options.verify, tasks, touching);
    }

    int64_t total = 0;
    for (const Task& task : tasks) total += task.end - task.begin;
    Progress progress(options.progress, Phase::read, total);
    std::vector<AlignedBuffer> buffers(static_cast<size_t>(std::max(options.threads, 1)));
    const auto read_task = [&](size_t index, int worker) {
        const Task& task = tasks[index];
        const RankFile& file = *task.source->file;
        std::byte* data = task.direct;
        if (data == nullptr) {
            AlignedBuffer& buffer = buffers[static_cast<size_t>(worker)];
            if (buffer.size() == 0) buffer = AlignedBuffer(static_cast<size_t>(blocks_per_read * block_bytes));
            data = buffer.data();
        }
        read_range(*task.source->handle, file, task.begin, task.end, data);
        if (options.verify == Verify::blocks) {
            check_range(file, task.begin, task.end, data, [&](int64_t begin, int64_t end) {
                throw Error(Code::corrupt, block_failure(file, begin, end));
            });
        }
        for (size_t i = 0; task.direct == nullptr && i < task.runs_count; ++i) {
            task.source->runs[touching[task.first_runs + i]].scatter(task.begin, task.end, data);
        }
        progress.add(task.end - task.begin);
    };
    run_parallel(tasks.size(), options.threads, read_task, [&] { progress.poll(); });
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
