// The hot paths of a collective, to be counted by callgrind (benchmarks/instructions.py): each is run between two client
// requests, under a name that ends with by what its count is divided.
#include <valgrind/callgrind.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/flight_recorder.hpp"
#include "comm/reduce.hpp"
#include "fork_ranks.hpp"
#include "with_comm.hpp"

namespace {

using bench::check;

constexpr int calls = 200;
constexpr int rounds = 100;  // of what threads or ranks do together, of which the least counts
constexpr int rounds_of_calls = 20;
constexpr int calls_of_a_round = 10;
constexpr int messages_of_a_round = 20;
constexpr size_t elements = 4096;

template <class Body>
void once(const std::string& name, size_t divisor, Body&& body) {
    const std::string told = name + "/" + std::to_string(divisor);
    CALLGRIND_ZERO_STATS;
    body();
    CALLGRIND_DUMP_STATS_AT(told.c_str());
}

template <class Body>
void counted(const std::string& name, size_t divisor, Body&& body) {
    body();  // what is done once
    once(name, divisor, body);
}

// Each case has a communicator of its own: which way one stores is found out by time, and each begins with the same.
template <class Prepare>
void on_fresh(tsr_comm* comm, int rank, const std::string& name, Prepare&& prepare) {
    tsr_comm* fresh = nullptr;
    check(tsr_comm_split(comm, 0, 0, nullptr, &fresh));
    {
        const auto call = prepare(fresh);
        const auto body = [&] {
            for (int i = 0; i < calls_of_a_round; ++i) check(call());
        };
        for (int round = 0; round < rounds_of_calls; ++round) rank == 0 ? once(name, calls_of_a_round, body) : body();
    }
    check(tsr_comm_finalize(fresh));
    tsr_comm_destroy(fresh);
}

void all_reduces(tsr_comm* comm, int rank, int ranks) {
    for (const int64_t count : {int64_t{2}, int64_t{2048}}) {
        std::vector<float> values(static_cast<size_t>(count));
        const tsr_tensor tensor = bench::floats(values.data(), &count);
        const std::string size =
            " of " + std::to_string(4 * count) + " B, " + std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks");
        on_fresh(comm, rank, "all_reduce" + size + ", a call", [&](tsr_comm* fresh) {
            return
                [&tensor, fresh] { return tsr_comm_all_reduce(fresh, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr); };
        });
        on_fresh(comm, rank, "planned all_reduce" + size + ", a launch", [&](tsr_comm* fresh) {
            tsr_plan* plan = nullptr;
            check(tsr_plan_create(fresh, TSR_COLLECTIVE_ALL_REDUCE, nullptr, 0, &tensor, 1, TSR_REDUCE_SUM, -1, nullptr,
                                  &plan));
            const std::shared_ptr<tsr_plan> owned(plan, tsr_plan_destroy);
            return [owned] { return tsr_plan_run(owned.get()); };
        });
    }
}

// What is sent has room at the receiver's, and what is received has come before: nobody waits.
void messages(tsr_comm* comm, int rank) {
    const int64_t count = 2;
    std::array<float, 2> values{};
    const tsr_tensor tensor = bench::floats(values.data(), &count);
    const auto send = [&] {
        for (int i = 0; i < messages_of_a_round; ++i)
            check(tsr_comm_send(comm, &tensor, 1 - rank, 0, nullptr, nullptr));
    };
    const auto receive = [&] {
        for (int i = 0; i < messages_of_a_round; ++i)
            check(tsr_comm_recv(comm, &tensor, 1 - rank, 0, nullptr, nullptr));
    };
    const auto meet = [&] { check(tsr_comm_barrier(comm, nullptr)); };
    for (int round = 0; round < rounds; ++round) {
        for (const int sender : {0, 1}) {
            if (rank == 1) {
                sender == 1 ? send() : meet();
                sender == 1 ? meet() : receive();
            } else if (sender == 0) {
                once("send of 8 B, 2 ranks, a call", messages_of_a_round, send);
                meet();
            } else {
                meet();
                once("recv of 8 B, 2 ranks, a call", messages_of_a_round, receive);
            }
            meet();
        }
    }
}

// Long enough for the other thread to end what it was given: whether a wait sleeps is then the same each time.
void let_the_other_thread_end() { std::this_thread::sleep_for(std::chrono::milliseconds{2}); }

// One bucket of many parameters at one rank: what each gradient costs that does not complete it, and what a step does.
void ddp_steps(tsr_comm* comm) {
    constexpr size_t params = 100;
    const int64_t count = 64;
    std::vector<std::vector<float>> values(params, std::vector<float>(64));
    std::vector<std::string> names;
    for (size_t i = 0; i < params; ++i) names.push_back("layer." + std::to_string(i));
    std::vector<tsr_param> list(params);
    for (size_t i = 0; i < params; ++i) {
        list[i].name = names[i].c_str();
        list[i].tensor = bench::floats(values[i].data(), &count);
    }
    tsr_ddp* ddp = nullptr;
    check(tsr_ddp_create(comm, list.data(), params, nullptr, &ddp));
    for (int round = 0; round < rounds; ++round) {
        once("tsr_ddp_ready, a parameter", params - 1, [&] {
            for (size_t i = params - 1; i > 0; --i) check(tsr_ddp_ready(ddp, i));
        });
        let_the_other_thread_end();
        once("the last tsr_ddp_ready and tsr_ddp_wait, a step of one bucket", 1, [&] {
            check(tsr_ddp_ready(ddp, 0));
            let_the_other_thread_end();
            check(tsr_ddp_wait(ddp));
        });
    }
    tsr_ddp_destroy(ddp);
}

void kernels() {
    using tsr::DType;
    using tsr::ReduceOp;
    std::array<std::vector<std::byte>, 3> memory;
    for (auto& bytes : memory) bytes.assign(elements * sizeof(double), std::byte{1});
    const std::array<const std::byte*, 2> inputs{memory[0].data(), memory[1].data()};
    for (const DType dtype :
         {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i8, DType::u8, DType::i32, DType::i64}) {
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
            for (const tsr::Vectors vectors : {tsr::Vectors::plain, tsr::Vectors::avx2}) {
                if (vectors > tsr::widest_vectors()) continue;
                const std::string name = std::string(name_of(op)) + " of two " + std::string(name_of(dtype)) +
                                         (vectors == tsr::Vectors::plain ? ", plain" : ", AVX2") + ", an element";
                counted(name, elements,
                        [&] { reduce(memory[2].data(), inputs, elements, dtype, op, inputs.size(), vectors); });
            }
        }
    }
}

void flight_records() {
    tsr::FlightRecorder recorder;
    const tsr::Operation operation = tsr::operation_of({.collective = tsr::Collective::all_reduce});
    counted("flight record, an operation", calls, [&] {
        for (int i = 0; i < calls; ++i) recorder.ended(recorder.started(operation, 1), true);
    });
}

}  // namespace

int main() {
    kernels();
    flight_records();
    for (const int ranks : {1, 2}) {
        const auto rank = [&](int r, const std::string& directory) {
            return bench::with_comm(r, ranks, directory, [&](tsr_comm* comm) {
                all_reduces(comm, r, ranks);
                if (ranks == 1) ddp_steps(comm);
                if (ranks == 2) messages(comm, r);
            });
        };
        if (bench::fork_ranks(ranks, rank) != 0) return 1;
    }
    return 0;
}
