#include "checkpoint/formats/host_reads.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <tuple>

#include "base/attempt.hpp"
#include "base/clock.hpp"
#include "base/thread.hpp"
#include "checkpoint/io/blocks.hpp"
#include "checkpoint/model/plan.hpp"
#include "comm/host.hpp"
#include "comm/inner_options.hpp"

namespace tsr {

namespace {

constexpr int64_t host_ring_bytes = int64_t{48} << 20;  // of all ranks of a host together
constexpr int64_t max_chunk_blocks = 4;
constexpr int64_t min_slots = 3;  // one being copied from, two being read ahead

// MISMATCH names the lowest rank that differs from rank 0.
void compare(Peers& all, const HostReads::Source& source) {
    std::vector<Digest> ids;
    if (const auto agreed = all.vote(std::nullopt, digest_of(source.id), ids)) throw Error(*agreed);
    const auto other = std::find_if(ids.begin(), ids.end(), [&](const Digest& id) { return id != ids[0]; });
    if (other == ids.end()) return;
    const std::vector<std::string> names = all.gather(source.name);
    const auto rank = static_cast<size_t>(other - ids.begin());
    throw Error(
        Code::mismatch,
        fmt::format("rank {} loads {}, but rank 0 loads {}; open the same checkpoint with the same verify option "
                    "on all ranks of a load",
                    rank, names[rank], names[0]));
}

// The ranks of `comm` on this host, in order. Sets `any` if any host has several ranks.
std::vector<int> neighbours(const std::shared_ptr<Communicator>& comm, Peers& all, bool& any) {
    const std::vector<std::string> hosts = all.gather(host_id(comm->options().host_id));
    std::vector<int> here;
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
        if (hosts[rank] == hosts[static_cast<size_t>(comm->rank())]) here.push_back(static_cast<int>(rank));
    }
    std::vector<std::string> sorted = hosts;
    std::sort(sorted.begin(), sorted.end());
    any = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
    return here;
}

std::string text_of(std::span<const HostReads::Range> ranges) {
    return {reinterpret_cast<const char*>(ranges.data()), ranges.size_bytes()};
}

// Threads that read: this rank's chunks in order, as far as the ring has room, and its own tasks whenever it has not.
class ReadAhead {
   public:
    ReadAhead(const HostReads::Work& work, std::span<const size_t> chunks, int64_t slots,
              std::function<std::byte*(size_t stage)> slot)
        : work_(work), chunks_(chunks), slots_(static_cast<size_t>(slots)), slot_(std::move(slot)) {
        done_.resize(chunks.size(), 0);
        told_.resize(chunks.size(), 0);
        const size_t most = chunks.size() + work.own_tasks;
        const size_t threads = std::min(most, static_cast<size_t>(std::max(work.threads, 1)));
        try {
            for (size_t worker = 0; worker < threads; ++worker) {
                pool_.push_back(start_thread("tsr-reader", [this, worker] { read(static_cast<int>(worker)); }));
            }
        } catch (...) {
            // The system gives no more threads: the running ones do all the work, if there are any.
            if (pool_.empty()) error_ = current_error();
        }
    }
    ~ReadAhead() {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        changed_.notify_all();
        for (std::thread& thread : pool_) thread.join();
    }
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    // Returns when this rank's chunk of the stage is read, with the number to share about it. Returns at once if this
    // rank has no chunk in the stage.
    uint32_t wait_for_stage(size_t stage) {
        wait([&] { return stage >= done_.size() || done_[stage] != 0; });
        return stage < told_.size() ? told_[stage] : 0;
    }
    void wait_for_all() {
        wait([&] { return own_done_ == work_.own_tasks; });
    }
    void release(size_t stages) {
        {
            const std::lock_guard lock(mutex_);
            released_ = stages;
        }
        changed_.notify_all();
    }

   private:
    template <class Ready>
    void wait(Ready ready) {
        std::unique_lock lock(mutex_);
        while (true) {
            if (error_) throw Error(*error_);
            if (ready()) return;
            changed_.wait_for(lock, poll_slice);
            lock.unlock();
            poll_interrupt();
            if (work_.poll) work_.poll();
            lock.lock();
        }
    }

    void read(int worker) {
        std::unique_lock lock(mutex_);
        const auto run = [&](auto&& body) {
            lock.unlock();
            const auto error = attempt(body);
            lock.lock();
            if (error && !error_) error_ = error;
            stop_ = stop_ || error;
        };
        while (!stop_) {
            if (next_ < chunks_.size() && next_ < released_ + slots_) {
                const size_t stage = next_++;
                run([&] { told_[stage] = work_.fill(chunks_[stage], slot_(stage)); });
                done_[stage] = 1;
                changed_.notify_all();
            } else if (next_own_ < work_.own_tasks) {
                const size_t task = next_own_++;
                run([&] { work_.own(task, worker); });
                ++own_done_;
                changed_.notify_all();
            } else if (next_ == chunks_.size()) {
                return;
            } else {
                changed_.wait_for(lock, poll_slice);
            }
        }
    }

    const HostReads::Work& work_;
    const std::span<const size_t> chunks_;
    const size_t slots_;
    const std::function<std::byte*(size_t stage)> slot_;
    std::mutex mutex_;  // guards all below but told_ and pool_
    std::condition_variable changed_;
    size_t next_ = 0;
    size_t released_ = 0;  // stages whose slots are free again
    size_t next_own_ = 0;
    size_t own_done_ = 0;
    std::vector<char> done_;      // a stage
    std::vector<uint32_t> told_;  // a stage; read by others once it is done
    std::optional<Error> error_;
    bool stop_ = false;
    std::vector<std::thread> pool_;
};

}  // namespace

HostReads::HostReads(const std::shared_ptr<Communicator>& comm, const Source& source, int64_t least_bytes)
    : all_(comm), host_(nullptr), least_bytes_(least_bytes) {
    compare(all_, source);
    bool any = false;
    const std::vector<int> here = neighbours(comm, all_, any);
    if (!any) return;
    comm_ = comm->split(here.size() > 1 ? here.front() : -1, comm->rank(), inner_options(*comm, ".host"));
    host_ = Peers(comm_, here);
}

void HostReads::agree(const std::optional<Error>& error) {
    const auto agreed = all_.vote(error);
    refused_ = agreed.has_value();
    if (agreed) throw Error(*agreed);
}

std::span<const HostReads::Chunk> HostReads::share(std::span<const Range> wanted) {
    shared_ = true;
    if (comm_ == nullptr) return {};
    if (const auto agreed = host_.vote(std::nullopt)) throw Error(*agreed);
    const auto ranks = static_cast<int64_t>(host_.world_size());
    const int64_t chunk_blocks =
        std::clamp(host_ring_bytes / (block_bytes * min_slots * ranks), int64_t{1}, max_chunk_blocks);
    deal(host_.gather(text_of(wanted)), chunk_blocks);
    if (!chunks_.empty()) make_ring(chunk_blocks * block_bytes);
    return chunks_;
}

// Walks over the ends of all ranges in order; between two of them, the same ranks want every block.
void HostReads::deal(const std::vector<std::string>& tables, int64_t chunk_blocks) {
    struct End {
        int64_t file;
        int64_t place;
        int64_t block;
        int rank;
        bool begins;
    };
    std::vector<End> ends;
    for (size_t rank = 0; rank < tables.size(); ++rank) {
        for (size_t at = 0; at < tables[rank].size(); at += sizeof(Range)) {
            Range range;
            std::memcpy(&range, tables[rank].data() + at, sizeof range);
            ends.push_back({range.file, range.place, range.begin, static_cast<int>(rank), true});
            ends.push_back({range.file, range.place, range.end, static_cast<int>(rank), false});
        }
    }
    std::sort(ends.begin(), ends.end(), [](const End& a, const End& b) {
        return std::tie(a.file, a.place, a.block, a.begins) < std::tie(b.file, b.place, b.block, b.begins);
    });
    by_reader_.assign(tables.size(), {});
    std::vector<char> wants(tables.size(), 0);
    const auto rank_here = static_cast<size_t>(host_.rank());
    int64_t blocks = 0;
    for (size_t i = 0; i + 1 < ends.size(); ++i) {
        wants[static_cast<size_t>(ends[i].rank)] = ends[i].begins ? 1 : 0;
        const bool is_last = ends[i].file != ends[i + 1].file || ends[i].place != ends[i + 1].place;
        if (is_last || std::count(wants.begin(), wants.end(), 1) < 2) continue;
        for (int64_t begin = ends[i].block; begin < ends[i + 1].block; begin += chunk_blocks) {
            const int64_t end = std::min(begin + chunk_blocks, ends[i + 1].block);
            size_t reader = tables.size();  // among the ranks that want it, the one with the fewest chunks
            for (size_t rank = 0; rank < tables.size(); ++rank) {
                if (wants[rank] == 0) continue;
                if (reader == tables.size() || by_reader_[rank].size() < by_reader_[reader].size()) reader = rank;
            }
            by_reader_[reader].push_back(chunks_.size());
            const Range range{ends[i].file, begin, end, ends[i].place};
            chunks_.push_back({range, static_cast<int>(reader), wants[rank_here] != 0});
            blocks += end - begin;
        }
    }
    if (blocks * block_bytes < least_bytes_) chunks_.clear();
}

void HostReads::make_ring(int64_t slot_bytes) {
    size_t stages = 0;
    for (const auto& list : by_reader_) stages = std::max(stages, list.size());
    const int64_t most = host_ring_bytes / (slot_bytes * host_.world_size());
    ring_.slots = std::min(static_cast<int64_t>(stages), std::max(most, min_slots));
    ring_.slot_bytes = slot_bytes;
    try {
        ring_.memory = comm_->allocate(static_cast<size_t>(ring_.slots * slot_bytes));
    } catch (const Error& error) {
        if (error.code() != Code::no_memory) throw;  // no_memory is agreed on all ranks
    }
    // Without memory, or over a transport that shares none, each rank reads for itself.
    if (ring_.memory == nullptr || ring_.memory->of_rank(0) == nullptr) chunks_.clear();
}

void HostReads::run(const Work& work) {
    const auto slot = [&](int rank, size_t stage) {
        return ring_.memory->of_rank(rank) + static_cast<int64_t>(stage) % ring_.slots * ring_.slot_bytes;
    };
    size_t stages = 0;
    for (const auto& list : by_reader_) stages = std::max(stages, list.size());
    const int here = host_.rank();
    ReadAhead ahead(work, by_reader_[static_cast<size_t>(here)], ring_.slots,
                    [&](size_t stage) { return slot(here, stage); });
    for (size_t stage = 0; stage < stages; ++stage) {
        uint32_t mine = 0;
        std::vector<uint32_t> told;
        const auto error = attempt([&] { mine = ahead.wait_for_stage(stage); });
        if (const auto agreed = host_.vote(error, mine, told)) throw Error(*agreed);
        ahead.release(stage);
        for (size_t rank = 0; rank < by_reader_.size(); ++rank) {
            if (stage >= by_reader_[rank].size()) continue;
            const size_t chunk = by_reader_[rank][stage];
            if (chunks_[chunk].wanted) work.take(chunk, slot(static_cast<int>(rank), stage), told[rank]);
        }
        if (work.poll) work.poll();
    }
    // Peers may still copy from this rank's last slots. The memory lives as long as one of them maps it, and is not
    // written again.
    ahead.wait_for_all();
}

void HostReads::end(const std::optional<Error>& error) {
    if (refused_) throw Error(*error);
    auto own = error;
    if (comm_ != nullptr && !shared_) {
        const auto failed = attempt([&] { (void)host_.vote(error); });
        if (!own) own = failed;
    }
    if (const auto agreed = all_.vote(own)) throw Error(*agreed);
}

}  // namespace tsr
