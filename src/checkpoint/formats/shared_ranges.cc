#include "checkpoint/formats/shared_ranges.hpp"

#include <algorithm>
#include <tuple>

#include "base/parallel.hpp"
#include "base/round_up.hpp"
#include "checkpoint/io/blocks.hpp"

namespace tsr {

SharedRanges::SharedRanges(HostReads* host, std::vector<ByteRange> ranges) : host_(host), ranges_(std::move(ranges)) {
    if (host_ != nullptr) chunks_ = host_->share(blocks());
    std::vector<size_t> wanted;
    for (size_t i = 0; i < chunks_.size(); ++i) {
        if (chunks_[i].wanted) wanted.push_back(i);
    }
    for (size_t i = 0; i < ranges_.size(); ++i) cut(i, wanted);
}

int64_t SharedRanges::size_bytes() const {
    int64_t total = 0;
    for (const Part& part : parts_) total += part.end - part.begin;
    return total;
}

// In order, each once.
std::vector<HostReads::Range> SharedRanges::blocks() const {
    std::vector<HostReads::Range> all;
    for (const ByteRange& range : ranges_) {
        if (!range.may_be_shared || range.begin == range.end) continue;
        all.push_back(
            {range.file, range.begin / block_bytes, round_up(range.end, block_bytes) / block_bytes, range.place});
    }
    std::sort(all.begin(), all.end(), [](const HostReads::Range& a, const HostReads::Range& b) {
        return std::tie(a.file, a.place, a.begin) < std::tie(b.file, b.place, b.begin);
    });
    std::vector<HostReads::Range> joined;
    for (const HostReads::Range& range : all) {
        if (!joined.empty() && joined.back().file == range.file && joined.back().place == range.place &&
            joined.back().end >= range.begin) {
            joined.back().end = std::max(joined.back().end, range.end);
        } else {
            joined.push_back(range);
        }
    }
    return joined;
}

void SharedRanges::cut(size_t number, std::span<const size_t> wanted) {
    const ByteRange& range = ranges_[number];
    int64_t at = range.begin;
    const auto add = [&](int64_t end, int64_t chunk) {
        while (at < end) {
            // At multiples, so that no element is cut.
            const bool is_long = chunk < 0 && end - at > most_bytes;
            const int64_t stop = is_long ? (at / most_bytes + 1) * most_bytes : end;
            parts_.push_back({number, at, stop, chunk});
            at = stop;
        }
    };
    if (range.may_be_shared) {
        auto next = std::partition_point(wanted.begin(), wanted.end(), [&](size_t i) {
            const HostReads::Range& blocks = chunks_[i].blocks;
            return std::tuple(blocks.file, blocks.place, blocks.end * block_bytes) <=
                   std::tuple(range.file, range.place, at);
        });
        for (; next != wanted.end(); ++next) {
            const HostReads::Range& blocks = chunks_[*next].blocks;
            const bool is_here = blocks.file == range.file && blocks.place == range.place;
            if (!is_here || blocks.begin * block_bytes >= range.end) break;
            add(blocks.begin * block_bytes, -1);
            add(std::min(blocks.end * block_bytes, range.end), static_cast<int64_t>(*next));
        }
    }
    add(range.end, -1);
}

void SharedRanges::run(const Work& work) const {
    std::vector<size_t> own;
    std::vector<std::vector<size_t>> of_chunk(chunks_.size());
    for (size_t i = 0; i < parts_.size(); ++i) {
        (parts_[i].chunk < 0 ? own : of_chunk[static_cast<size_t>(parts_[i].chunk)]).push_back(i);
    }
    const auto read = [&](size_t task, int worker) { work.read(own[task], worker); };
    if (chunks_.empty()) return run_parallel(own.size(), work.threads, read, work.poll);
    HostReads::Work shared;
    shared.fill = [&](size_t chunk, std::byte* slot) {
        const HostReads::Range& blocks = chunks_[chunk].blocks;
        return work.fill({blocks.file, blocks.place, blocks.begin * block_bytes, blocks.end * block_bytes}, slot);
    };
    shared.take = [&](size_t chunk, const std::byte* slot, uint32_t told) {
        const int64_t begin = chunks_[chunk].blocks.begin * block_bytes;
        for (const size_t part : of_chunk[chunk]) work.take(part, slot + (parts_[part].begin - begin), told);
    };
    shared.own_tasks = own.size();
    shared.own = read;
    shared.poll = work.poll;
    shared.threads = work.threads;
    host_->run(shared);
}

}  // namespace tsr
