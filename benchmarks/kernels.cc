// Reduction kernels of one core, by dtype, op and instruction set, in the cache and in memory: GB/s of what is read and
// written. A memcpy of as many bytes stands beside them. The best of many short runs, which other work disturbs least.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "comm/reduce.hpp"

namespace {

using tsr::DType;
using tsr::ReduceOp;
using tsr::Vectors;

template <class Body>
double best_seconds(int runs, Body&& body) {
    double best = std::numeric_limits<double>::max();
    for (int run = 0; run <= runs; ++run) {
        const auto begin = std::chrono::steady_clock::now();
        body();
        const std::chrono::duration<double> span = std::chrono::steady_clock::now() - begin;
        if (run > 0) best = std::min(best, span.count());
    }
    return best;
}

std::string_view name_of(Vectors vectors) {
    return vectors == Vectors::plain ? "plain" : vectors == Vectors::avx2 ? "avx2" : "avx512";
}

}  // namespace

int main() {
    struct Size {
        const char* place;
        size_t bytes;
        int runs;
    };
    for (const auto& [place, bytes, runs] :
         {Size{"cache", size_t{16} << 10, 400}, Size{"memory", size_t{64} << 20, 5}}) {
        std::array<std::vector<std::byte>, 3> memory;
        // In every dtype a number whose square is one of its numbers, too, and not a subnormal one.
        for (auto& one : memory) one.assign(bytes, std::byte{0x3c});
        const std::array<const std::byte*, 2> inputs{memory[0].data(), memory[1].data()};
        const auto rate = [&, n = bytes](double seconds, int streams) {
            return streams * static_cast<double>(n) / seconds / 1e9;
        };
        const double copy =
            rate(best_seconds(runs, [&, n = bytes] { std::memcpy(memory[2].data(), memory[0].data(), n); }), 2);
        for (const DType dtype :
             {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i8, DType::u8, DType::i32, DType::i64}) {
            for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
                for (const Vectors vectors : {Vectors::plain, Vectors::avx2, Vectors::avx512}) {
                    if (vectors > tsr::widest_vectors()) break;
                    const double seconds = best_seconds(runs, [&, n = bytes] {
                        reduce(memory[2].data(), inputs, n / size_of(dtype), dtype, op, inputs.size(), vectors);
                    });
                    std::printf(
                        "{\"place\":\"%s\",\"dtype\":\"%s\",\"op\":\"%s\",\"vectors\":\"%s\",\"gb_s\":%.2f,\"memcpy\":%"
                        ".2f}\n",
                        place, std::string(name_of(dtype)).c_str(), std::string(name_of(op)).c_str(),
                        std::string(name_of(vectors)).c_str(), rate(seconds, 3), copy);
                }
            }
        }
    }
    return 0;
}
