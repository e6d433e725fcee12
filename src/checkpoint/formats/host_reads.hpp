// Reads data that several ranks of a host need only once: one rank reads it into shared memory, and the others copy it
// from there.
//
// Shared blocks are cut into chunks and dealt out; all ranks compute the same assignment from the table of who wants
// what. Chunks are exchanged in stages: in stage t each rank reads its t-th chunk into slot t of its ring. A vote ends
// the stage and carries the error of a rank that failed; then every rank copies what it wants out of the slots. A rank
// that votes on stage t has copied everything of stage t - 1, so those slots are free after the vote. Threads read
// ahead as far as the ring has room, and in between read what only this rank wants. The communicator's vote is the only
// wait for a peer: it has the deadline and notices deaths.
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
    // Neighbouring blocks (of block_bytes) of a file, counted from a place in it; files and places have the same
    // numbers on all ranks.
    struct Range {
        int64_t file = 0;
        int64_t begin = 0;
        int64_t end = 0;
        int64_t place = 0;
    };
    struct Chunk {
        Range blocks;
        int reader = 0;       // the rank that reads it
        bool wanted = false;  // by this rank
    };
    // What all ranks of a load must have in common: `id` is compared, `name` is used in messages.
    struct Source {
        std::string id;
        std::string name;
    };
    struct Work {
        // Reads and checks a chunk; any thread. The result is passed to take() on the ranks that want the chunk.
        std::function<uint32_t(size_t chunk, std::byte* slot)> fill;
        std::function<void(size_t chunk, const std::byte* slot, uint32_t told)> take;  // the calling thread
        size_t own_tasks = 0;
        std::function<void(size_t task, int worker)> own;  // reads what no peer wants; any thread
        std::function<void()> poll;                        // called on the calling thread from time to time
        int threads = 4;
    };

    // Collective over the ranks of a load, as are all methods below. MISMATCH on all ranks if their sources differ. If
    // several ranks of a host share fewer than `least_bytes` bytes, each rank reads them for itself.
    HostReads(const std::shared_ptr<Communicator>& comm, const Source& source, int64_t least_bytes);

    // Call before anything is overwritten. If a rank has an error, throws it on every rank; end() then has nothing to
    // do.
    void agree(const std::optional<Error>& error);
    // The chunks of `wanted`, this rank's ranges in order, that are exchanged: the same on every rank of the host, in
    // order.
    [[nodiscard]] std::span<const Chunk> share(std::span<const Range> wanted);
    // Call after share() if it returned chunks. CORRUPT and IO of one rank are thrown on all.
    void run(const Work& work);
    // Call last, even if the load failed before share(). If a rank has an error, throws the same on every rank.
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
    std::shared_ptr<Communicator> comm_;  // of this host; nullptr: the only rank there
    Peers host_;
    const int64_t least_bytes_;
    bool refused_ = false;  // agree() has thrown, on all ranks
    bool shared_ = false;   // share() was called: its vote included this rank's state so far
    std::vector<Chunk> chunks_;
    std::vector<std::vector<size_t>> by_reader_;  // each rank's chunks, stage by stage
    Ring ring_;
};

}  // namespace tsr
