// A load of a warm checkpoint beside what bounds it: `pread` of the same files in blocks of 4 MiB and a CRC32C of each block
// after it, on as many threads in all as the machine has cores. Both fill memory that is resident. Prints one JSON line a
// round: {"ranks", "load_s", "read_s"}.
//
//     read_path RANKS ROUNDS [TENSORS [BYTES]]
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.hpp"
#include "fork_ranks.hpp"
#include "measure.hpp"
#include "with_comm.hpp"

namespace {

using bench::check;

constexpr size_t block = size_t{4} << 20;

struct Sizes {
    int ranks;
    int rounds;
    int tensors;
    size_t bytes;  // of a tensor
};

// This rank's rows of every tensor, in one resident allocation.
class Shards {
   public:
    Shards(const Sizes& sizes, int rank) : memory_(sizes.bytes / sizes.ranks * sizes.tensors / sizeof(float)) {
        std::ranges::fill(memory_, static_cast<float>(rank + 1));
        check(tsr_state_create(&state_));
        const int64_t shape = static_cast<int64_t>(sizes.bytes / sizeof(float));
        const int32_t mesh = sizes.ranks;
        const tsr_placement rows{.kind = TSR_PLACE_SHARD, .dim = 0};
        check(tsr_layout_create(&shape, 1, &mesh, &rows, 1, &layout_));
        const int64_t own = shape / sizes.ranks;
        for (int t = 0; t < sizes.tensors; ++t) {
            const tsr_tensor piece = bench::floats(memory_.data() + t * own, &own);
            check(tsr_state_add_sharded(state_, ("layers." + std::to_string(t)).c_str(), layout_, TSR_DTYPE_F32, &piece,
                                        rank));
        }
    }
    ~Shards() {
        tsr_state_destroy(state_);
        tsr_layout_destroy(layout_);
    }
    Shards(const Shards&) = delete;
    Shards& operator=(const Shards&) = delete;

    [[nodiscard]] tsr_state* state() const { return state_; }
    [[nodiscard]] std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(memory_)); }

   private:
    std::vector<float> memory_;
    tsr_state* state_ = nullptr;
    tsr_layout* layout_ = nullptr;
};

// Sums of checksums keep the compiler from leaving them out.
std::atomic<uint32_t> sum{0};

void read_files(const std::vector<std::string>& paths, std::span<std::byte> into, int threads) {
    struct Read {
        int file;
        size_t offset;
        size_t size;
        std::byte* to;
    };
    std::vector<Read> reads;
    size_t filled = 0;
    for (const std::string& path : paths) {
        const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file < 0) std::exit(2);
        const size_t size = std::min<size_t>(std::filesystem::file_size(path), into.size() - filled);
        for (size_t at = 0; at < size; at += block) {
            reads.push_back({file, at, std::min(block, size - at), into.data() + filled + at});
        }
        filled += size;
    }
    std::atomic<size_t> next{0};
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t) {
        pool.emplace_back([&] {
            for (size_t i = next++; i < reads.size(); i = next++) {
                const Read& one = reads[i];
                if (::pread(one.file, one.to, one.size, static_cast<off_t>(one.offset)) !=
                    static_cast<ssize_t>(one.size)) {
                    std::exit(3);
                }
                sum += tsr::crc32c(std::span<const std::byte>(one.to, one.size));
            }
        });
    }
    for (std::thread& thread : pool) thread.join();
    for (size_t i = 0; i < reads.size(); ++i) {
        if (i + 1 == reads.size() || reads[i + 1].file != reads[i].file) ::close(reads[i].file);
    }
}

// This rank's files of the one save under `root`.
std::vector<std::string> files_of(const std::string& root, int rank) {
    std::vector<std::string> paths;
    char begin[16];
    std::snprintf(begin, sizeof begin, "rank-%05d.", rank);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
        if (entry.path().filename().string().starts_with(begin)) paths.push_back(entry.path());
    }
    std::ranges::sort(paths);
    return paths;
}

int run_rank(const Sizes& sizes, int rank, const std::string& directory, const std::string& root) {
    return bench::with_comm(rank, sizes.ranks, directory, [&](tsr_comm* comm) {
        Shards shards(sizes, rank);
        tsr_saver* saver = nullptr;
        check(tsr_saver_create(comm, root.c_str(), nullptr, &saver));
        check(tsr_saver_save(saver, 1, shards.state()));
        tsr_saver_destroy(saver);
        tsr_load_options options;
        check(tsr_load_options_init(&options, sizeof options));
        if (sizes.ranks > 1) options.comm = comm;
        const std::vector<std::string> paths = files_of(root, rank);
        const int cores = static_cast<int>(std::thread::hardware_concurrency());
        const int threads = std::max(1, cores / sizes.ranks);
        const auto seconds = [&](const auto& body) {
            check(tsr_comm_barrier(comm, nullptr));
            const double start = bench::now_us();
            body();
            check(tsr_comm_barrier(comm, nullptr));
            return (bench::now_us() - start) / 1e6;
        };
        for (int round = -1; round < sizes.rounds; ++round) {  // the first one fills the page cache
            std::memset(shards.bytes().data(), 0, shards.bytes().size());
            const double load = seconds([&] {
                tsr_checkpoint* checkpoint = nullptr;
                check(tsr_checkpoint_open(root.c_str(), &checkpoint));
                check(tsr_checkpoint_load(checkpoint, shards.state(), &options));
                tsr_checkpoint_destroy(checkpoint);
            });
            const auto* loaded = reinterpret_cast<const float*>(shards.bytes().data());
            if (loaded[0] != static_cast<float>(rank + 1)) std::exit(4);
            const double read = seconds([&] { read_files(paths, shards.bytes(), threads); });
            if (rank != 0 || round < 0) continue;
            std::printf("{\"ranks\":%d,\"load_s\":%.6f,\"read_s\":%.6f}\n", sizes.ranks, load, read);
            std::fflush(stdout);
        }
    });
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    const Sizes sizes{std::atoi(argv[1]), std::atoi(argv[2]), argc > 3 ? std::atoi(argv[3]) : 64,
                      argc > 4 ? std::strtoull(argv[4], nullptr, 10) : size_t{16} << 20};
    std::string root = (std::filesystem::temp_directory_path() / "tessera-read-XXXXXX").string();
    if (::mkdtemp(root.data()) == nullptr) return 2;
    const int failed = bench::fork_ranks(sizes.ranks, [&](int rank, const std::string& directory) {
        return run_rank(sizes, rank, directory, root + "/checkpoints");
    });
    std::filesystem::remove_all(root);
    return failed;
}
