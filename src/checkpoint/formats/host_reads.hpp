// What several ranks of one host want of the same files is read from there once: by one of them, into memory that they
// share, out of which the others copy it.
//
// Shared blocks are cut into chunks and dealt out; all ranks do so alike, from the table of who wants what. They are
// exchanged in stages: in stage t each rank has read the t-th of its chunks into slot t of its ring. A vote ends that, and
// carries the error of a rank that could not; then everyone takes what it wants out of the slots. Since who votes on stage
// t has taken all of t - 1, those slots are free after the vote. Threads read ahead as far as the ring has room, and
// between that what this rank alone wants. The communicator's vote is the only wait for a peer: it has the deadline, and
// notices deaths.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "comm/peers.hpp"

namespace tsr {

class HostReads {
   public:
    // Neighbouring blocks (of block_bytes) of a file, counted from a place in it; both are numbered alike on all ranks.
    struct Range {
        int64_t file = 0;
        int64_t begin = 0;
        int64_t end = 0;
        int64_t place = 0;
    };
    struct Chunk {
        Range blocks;
        int reader = 0;       // who reads it
        bool wanted = false;  // by this rank
    };
    // What all ranks of a load have in common: `id` is compared, `name` is what a message calls it.
    struct Source {
        std::string id;
        std::string name;
    };
    struct Work {
        // Reads and checks a chunk; any thread. What it returns is told to those who take it.
        std::function<uint32_t(size_t chunk, std::byte* slot)> fill;
        std::function<void(size_t chunk, const std::byte* slot, uint32_t told)> take;  // the calling thread
        size_t own_tasks = 0;
        std::function<void(size_t task, int worker)> own;  // reads what no peer wants; any thread
        std::function<void()> poll;                        // the calling thread, now and then
        int threads = 4;
    };

    // Collective over the ranks of a load, as is each method below. MISMATCH on all ranks if their sources differ. If fewer
    // than `least_bytes` are wanted by several ranks of a host, each of them reads them for itself.
    HostReads(const std::shared_ptr<Communicator>& comm, const Source& source, int64_t least_bytes);

    // Before anything is overwritten. If a rank has an error it throws the same on every rank, and end() has nothing to do.
    void agree(const std::optional<Error>& error);
    // What of `wanted`, this rank's ranges in order, is exchanged: the same chunks on every rank of the host, in order.
    [[nodiscard]] std::span<const Chunk> share(std::span<const Range> wanted);
    // After share(), if it found any chunk. CORRUPT and IO of any rank are thrown on all.
    void run(const Work& work);
    // The last of a load, also of one that failed before share(): throws the same error on every rank if one has any.
    void end(const std::optional<Error>& error);

   private:
    struct Ring {
        std::shared_ptr<Buffer> memory;
        int64_t slots = 0;
        int64_t slot_bytes = 0;
    };
    void deal(const std::vector<std::string>& tables, int64_t chunk_blocks);
    void make_ring(int64_t slot_bytes);

    Peers all_;
    std::shared_ptr<Communicator> comm_;  // of this host; nullptr: this rank is alone there
    Peers host_;
    const int64_t least_bytes_;
    bool refused_ = false;  // agree() has thrown, on all ranks
    bool shared_ = false;   // share() was called, so that the others know how this rank fared until then
    std::vector<Chunk> chunks_;
    std::vector<std::vector<size_t>> by_reader_;  // each rank's chunks, stage by stage
    Ring ring_;
};

}  // namespace tsr
