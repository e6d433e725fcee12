// What `tessera bench` measures: one operation at one size, on every rank of a communicator.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"

namespace tsr::cli {

enum class Bench {
    all_reduce,
    reduce_scatter,
    all_gather,
    all_gather_v,
    broadcast,
    reduce,
    gather,
    scatter,
    all_to_all,
    send_recv,  // each rank sends to the next one and receives from the one before
    barrier,
};

[[nodiscard]] std::string_view name_of(Bench bench);
[[nodiscard]] std::optional<Bench> bench_from(std::string_view name);
[[nodiscard]] std::vector<std::string> bench_names();
[[nodiscard]] bool has_op(Bench bench);
[[nodiscard]] bool has_root(Bench bench);

// The same on every rank.
struct BenchOptions {
    Bench bench = Bench::all_reduce;
    DType dtype = DType::f32;
    ReduceOp op = ReduceOp::sum;
    int root = 0;
    int iterations = 0;  // calls per round; 0: chosen by size
    int warmup = 5;      // calls before the first round
    bool foreign = false;
};

// Of all ranks together.
struct BenchRow {
    uint64_t bytes = 0;  // the larger of a rank's input and output
    uint64_t count = 0;  // its elements
    int iterations = 0;
    double time_us = 0;  // per call: the slowest rank's time in each round, and the median over the rounds
    double algbw = 0;    // bytes divided by time, in 10^9 bytes per second
    double busbw = 0;    // the minimum that each rank's link carries: algbw times a factor of operation and ranks
    int64_t wrong = 0;   // number of wrong elements on all ranks
};

inline constexpr int bench_rounds = 7;

// The number of elements of an operation of about `bytes`: divisible by the number of ranks, at least one for each.
[[nodiscard]] uint64_t bench_count(const BenchOptions& options, int ranks, uint64_t bytes);

// Memory for the largest case, and the cases over it. Collective.
class BenchMemory {
   public:
    BenchMemory(std::shared_ptr<Communicator> comm, const BenchOptions& options, uint64_t most_count);
    // Collective: the same row on every rank.
    [[nodiscard]] BenchRow run(uint64_t count);

   private:
    const std::shared_ptr<Communicator> comm_;
    const BenchOptions options_;
    std::vector<std::byte> own_;
    std::shared_ptr<Buffer> shared_;
    std::byte* input_ = nullptr;
    std::byte* output_ = nullptr;
};

}  // namespace tsr::cli
