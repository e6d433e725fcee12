#include "bench/cases.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>

#include "base/function_ref.hpp"
#include "base/round_up.hpp"
#include "tensor/convert.hpp"

namespace tsr::cli {

namespace {

constexpr std::array<std::pair<Bench, std::string_view>, 11> names{{
    {Bench::all_reduce, "all_reduce"},
    {Bench::reduce_scatter, "reduce_scatter"},
    {Bench::all_gather, "all_gather"},
    {Bench::all_gather_v, "all_gather_v"},
    {Bench::broadcast, "broadcast"},
    {Bench::reduce, "reduce"},
    {Bench::gather, "gather"},
    {Bench::scatter, "scatter"},
    {Bench::all_to_all, "all_to_all"},
    {Bench::send_recv, "send_recv"},
    {Bench::barrier, "barrier"},
}};

bool is_divided(Bench bench) {
    switch (bench) {
        case Bench::reduce_scatter:
        case Bench::all_gather:
        case Bench::gather:
        case Bench::scatter:
        case Bench::all_to_all: return true;
        default: return false;
    }
}

// Bytes that cross a rank's link per byte of the size, as in nccl-tests: this factor makes an operation's speed
// comparable to the hardware's, independent of the number of ranks.
double bus_factor(Bench bench, int ranks) {
    const auto n = static_cast<double>(ranks);
    switch (bench) {
        case Bench::all_reduce: return 2 * (n - 1) / n;
        case Bench::reduce_scatter:
        case Bench::all_gather:
        case Bench::all_gather_v:
        case Bench::gather:
        case Bench::scatter:
        case Bench::all_to_all: return (n - 1) / n;
        default: return 1;
    }
}

// --- values: small integers that every dtype represents exactly, and that identify their rank and position

// The value of rank `rank` at element i, for operations that move data.
double datum(int rank, uint64_t i) { return static_cast<double>((static_cast<uint64_t>(rank) * 31 + i) % 97); }

// Likewise for reductions: one rank's number differs from the others' and determines the result, also of prod.
double addend(int rank, int ranks, uint64_t i, ReduceOp op) {
    if (i % static_cast<uint64_t>(ranks) == static_cast<uint64_t>(rank)) return 1 + static_cast<double>(i % 61);
    return op == ReduceOp::min ? 100 : 1;
}

double reduced(int ranks, uint64_t i, ReduceOp op, DType dtype) {
    const auto own = static_cast<double>(i % 61);
    const double sum = ranks + own;
    if (op == ReduceOp::sum) return sum;
    if (op != ReduceOp::avg) return 1 + own;
    // As the kernels do: in single precision except for f64; truncated for integers.
    const bool in_double = dtype == DType::f64 || !is_floating(dtype);
    return in_double ? sum / ranks : static_cast<double>(static_cast<float>(sum) / static_cast<float>(ranks));
}

using ValueAt = FunctionRef<double(uint64_t)>;
constexpr uint64_t block = 1024;

template <class T>
void store_as(const std::array<double, block>& values, uint64_t n, std::byte* to) {
    for (uint64_t i = 0; i < n; ++i) {
        const auto value = static_cast<T>(static_cast<int64_t>(values[i]));  // wraps, as a sum of integers does
        std::memcpy(to + i * sizeof(T), &value, sizeof(T));
    }
}

// Elements [begin, begin + n) as memory of the dtype.
void make_block(std::byte* to, DType dtype, uint64_t begin, uint64_t n, ValueAt value) {
    std::array<double, block> values{};
    for (uint64_t i = 0; i < n; ++i) values[i] = value(begin + i);
    switch (dtype) {
        case DType::i8: return store_as<int8_t>(values, n, to);
        case DType::u8: return store_as<uint8_t>(values, n, to);
        case DType::i32: return store_as<int32_t>(values, n, to);
        case DType::i64: return store_as<int64_t>(values, n, to);
        default:
            convert(reinterpret_cast<const std::byte*>(values.data()), DType::f64, to, dtype, static_cast<int64_t>(n));
    }
}

void fill(const Tensor& tensor, ValueAt value) {
    const auto count = static_cast<uint64_t>(tensor.numel());
    for (uint64_t begin = 0; begin < count; begin += block) {
        make_block(tensor.data + begin * size_of(tensor.dtype), tensor.dtype, begin, std::min(block, count - begin),
                   value);
    }
}

int64_t count_wrong(const Tensor& tensor, ValueAt value) {
    const auto count = static_cast<uint64_t>(tensor.numel());
    const size_t element = size_of(tensor.dtype);
    std::array<std::byte, block * sizeof(double)> expected{};
    int64_t wrong = 0;
    for (uint64_t begin = 0; begin < count; begin += block) {
        const uint64_t n = std::min(block, count - begin);
        make_block(expected.data(), tensor.dtype, begin, n, value);
        const std::byte* found = tensor.data + begin * element;
        if (std::memcmp(found, expected.data(), n * element) == 0) continue;
        for (uint64_t i = 0; i < n; ++i) {
            wrong += std::memcmp(found + i * element, expected.data() + i * element, element) != 0 ? 1 : 0;
        }
    }
    return wrong;
}

// --- one case: its tensors on this rank, the call, and the expected result

// Where rank r's part of an all_gather_v of `count` elements begins: parts grow with the rank.
uint64_t part_begin(uint64_t count, int ranks, int rank) {
    const auto n = static_cast<uint64_t>(ranks);
    const auto r = static_cast<uint64_t>(rank);
    return count * (r * (r + 1)) / (n * (n + 1));
}

class Case {
   public:
    Case(Communicator& comm, const BenchOptions& options, uint64_t count, std::byte* input, std::byte* output)
        : comm_(comm), options_(options), count_(count), rank_(comm.rank()), ranks_(comm.world_size()) {
        const uint64_t part = count / static_cast<uint64_t>(ranks_);
        const auto over = [&](std::byte* data, uint64_t n) {
            return Tensor{data, Dims{static_cast<int64_t>(n)}, options.dtype, {}};
        };
        const bool is_root = rank_ == options.root;
        switch (options.bench) {
            case Bench::barrier: return;
            case Bench::all_reduce:
            case Bench::broadcast: outputs_ = {over(output, count)}; return;  // in place
            case Bench::reduce_scatter:
                inputs_ = {over(input, count)};
                outputs_ = {over(output, part)};
                return;
            case Bench::all_gather:
                inputs_ = {over(input, part)};
                outputs_ = {over(output, count)};
                return;
            case Bench::all_gather_v:
                for (int r = 0; r < ranks_; ++r) {
                    const uint64_t begin = part_begin(count, ranks_, r);
                    outputs_.push_back(
                        over(output + begin * size_of(options.dtype), part_begin(count, ranks_, r + 1) - begin));
                }
                inputs_ = {over(input, static_cast<uint64_t>(outputs_[static_cast<size_t>(rank_)].numel()))};
                return;
            case Bench::reduce:
                inputs_ = {over(input, count)};
                if (is_root) outputs_ = {over(output, count)};
                return;
            case Bench::gather:
                inputs_ = {over(input, part)};
                if (is_root) outputs_ = {over(output, count)};
                return;
            case Bench::scatter:
                if (is_root) inputs_ = {over(input, count)};
                outputs_ = {over(output, part)};
                return;
            case Bench::all_to_all:
            case Bench::send_recv:
                inputs_ = {over(input, count)};
                outputs_ = {over(output, count)};
                return;
        }
    }

    void call() const {
        if (options_.bench != Bench::send_recv) return comm_.run(request());
        const WorkPtr received =
            comm_.submit({.collective = Collective::recv, .outputs = outputs_, .peer = (rank_ + ranks_ - 1) % ranks_});
        const WorkPtr sent =
            comm_.submit({.collective = Collective::send, .inputs = inputs_, .peer = (rank_ + 1) % ranks_});
        const Deadline deadline = Deadline::in(comm_.options().timeout);
        received->wait(deadline);
        sent->wait(deadline);
    }

    void fill_inputs() const {
        const bool in_place = inputs_.empty() && !outputs_.empty();
        for (const Tensor& tensor : in_place&& options_.bench != Bench::scatter ? outputs_ : inputs_) {
            fill(tensor, [&](uint64_t i) {
                return has_op(options_.bench) ? addend(rank_, ranks_, i, options_.op) : datum(rank_, i);
            });
        }
    }

    [[nodiscard]] int64_t wrong() const {
        const uint64_t part = count_ / static_cast<uint64_t>(ranks_);
        const uint64_t own_begin = part * static_cast<uint64_t>(rank_);
        int64_t wrong = 0;
        for (size_t k = 0; k < outputs_.size(); ++k) {
            wrong += count_wrong(outputs_[k], [&](uint64_t i) -> double {
                switch (options_.bench) {
                    case Bench::all_reduce:
                    case Bench::reduce: return reduced(ranks_, i, options_.op, options_.dtype);
                    case Bench::reduce_scatter: return reduced(ranks_, own_begin + i, options_.op, options_.dtype);
                    case Bench::all_gather:
                    case Bench::gather: return datum(static_cast<int>(i / part), i % part);
                    case Bench::all_gather_v: return datum(static_cast<int>(k), i);
                    case Bench::broadcast: return datum(options_.root, i);
                    case Bench::scatter: return datum(options_.root, own_begin + i);
                    case Bench::all_to_all: return datum(static_cast<int>(i / part), own_begin + i % part);
                    case Bench::send_recv: return datum((rank_ + ranks_ - 1) % ranks_, i);
                    case Bench::barrier: break;
                }
                return 0;
            });
        }
        return wrong;
    }

   private:
    [[nodiscard]] Request request() const {
        Request request{collective(), inputs_, outputs_};
        if (has_op(options_.bench)) request.op = options_.op;
        if (has_root(options_.bench)) request.peer = options_.root;
        return request;
    }

    [[nodiscard]] Collective collective() const {
        switch (options_.bench) {
            case Bench::all_reduce: return Collective::all_reduce;
            case Bench::reduce_scatter: return Collective::reduce_scatter;
            case Bench::all_gather: return Collective::all_gather;
            case Bench::all_gather_v: return Collective::all_gather_v;
            case Bench::broadcast: return Collective::broadcast;
            case Bench::reduce: return Collective::reduce;
            case Bench::gather: return Collective::gather;
            case Bench::scatter: return Collective::scatter;
            case Bench::all_to_all: return Collective::all_to_all;
            case Bench::send_recv:
            case Bench::barrier: break;
        }
        return Collective::barrier;
    }

    Communicator& comm_;
    const BenchOptions& options_;
    const uint64_t count_;
    const int rank_;
    const int ranks_;
    std::vector<Tensor> inputs_;
    std::vector<Tensor> outputs_;
};

// The same for all ranks, since it depends only on the size.
int calls_of(const BenchOptions& options, uint64_t bytes) {
    if (options.iterations > 0) return options.iterations;
    if (bytes <= (uint64_t{64} << 10)) return 100;
    return bytes <= (uint64_t{1} << 20) ? 20 : 3;
}

template <class T>
void reduce_here(Communicator& comm, std::span<T> values, DType dtype, ReduceOp op) {
    const Tensor tensor = tensor_of(values, dtype);
    comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = op});
}

}  // namespace

std::string_view name_of(Bench bench) { return names[static_cast<size_t>(bench)].second; }

std::optional<Bench> bench_from(std::string_view name) {
    const auto* found = std::ranges::find(names, name, &std::pair<Bench, std::string_view>::second);
    return found == names.end() ? std::nullopt : std::optional(found->first);
}

std::vector<std::string> bench_names() {
    std::vector<std::string> result;
    for (const auto& [bench, name] : names) result.emplace_back(name);
    return result;
}

bool has_op(Bench bench) {
    return bench == Bench::all_reduce || bench == Bench::reduce_scatter || bench == Bench::reduce;
}

bool has_root(Bench bench) {
    return bench == Bench::broadcast || bench == Bench::reduce || bench == Bench::gather || bench == Bench::scatter;
}

uint64_t bench_count(const BenchOptions& options, int ranks, uint64_t bytes) {
    if (options.bench == Bench::barrier) return 0;
    const uint64_t count = std::max<uint64_t>(1, bytes / size_of(options.dtype));
    const auto parts = static_cast<uint64_t>(ranks);
    return is_divided(options.bench) ? std::max(parts, count / parts * parts) : count;
}

BenchMemory::BenchMemory(std::shared_ptr<Communicator> comm, const BenchOptions& options, uint64_t most_count)
    : comm_(std::move(comm)), options_(options) {
    constexpr size_t alignment = 4096;
    const size_t each = round_up(std::max<size_t>(1, most_count * size_of(options_.dtype)), alignment);
    if (options_.foreign) {
        own_.resize(2 * each);
        input_ = own_.data();
    } else {
        shared_ = comm_->allocate(2 * each);
        input_ = shared_->data();
    }
    output_ = input_ + each;
}

BenchRow BenchMemory::run(uint64_t count) {
    const int ranks = comm_->world_size();
    BenchRow row;
    row.count = count;
    row.bytes = count * size_of(options_.dtype);
    row.iterations = calls_of(options_, row.bytes);
    const Case one(*comm_, options_, count, input_, output_);
    // Zeros stay zeros however often they are reduced in place.
    std::memset(input_, 0, row.bytes);
    std::memset(output_, 0, row.bytes);
    for (int i = 0; i < options_.warmup; ++i) one.call();
    std::array<double, bench_rounds> times{};
    for (double& time : times) {
        comm_->run({});
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < row.iterations; ++i) one.call();
        const std::chrono::duration<double, std::micro> span = std::chrono::steady_clock::now() - begin;
        time = span.count() / row.iterations;
    }
    one.fill_inputs();
    one.call();
    row.wrong = one.wrong();
    reduce_here(*comm_, std::span<double>(times), DType::f64, ReduceOp::max);
    reduce_here(*comm_, std::span<int64_t>(&row.wrong, 1), DType::i64, ReduceOp::sum);
    std::ranges::sort(times);
    row.time_us = times[bench_rounds / 2];
    row.algbw = row.time_us > 0 ? static_cast<double>(row.bytes) / row.time_us / 1e3 : 0;
    row.busbw = row.algbw * bus_factor(options_.bench, ranks);
    return row;
}

}  // namespace tsr::cli
