// Issue order, asynchronous work, splitting, buffers, and what may not be asked.
#include "comm/communicator.hpp"

#include <gmock/gmock.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <future>
#include <latch>
#include <random>

#include "comm/plan.hpp"
#include "new_threads.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "seed.hpp"
#include "soon.hpp"
#include "values.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

Request all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum, std::string_view label = {}) {
    return {Collective::all_reduce, {}, {&tensor, 1}, op, -1, 0, label};
}

Request barrier() { return {}; }

template <class T>
Tensor over(std::vector<T>& values, DType dtype) {
    return tensor_of(std::span<T>(values), dtype);
}

TEST(Communicator, OneRankNeedsNoOther) {
    const auto comm = Communicator::self();
    EXPECT_EQ(comm->transport(), "self");
    EXPECT_EQ(comm->world_size(), 1);
    std::vector<float> values{3, 4};
    const Tensor tensor = over(values, DType::f32);
    comm->run(all_reduce(tensor, ReduceOp::avg));
    EXPECT_EQ(values, (std::vector<float>{3, 4}));
    comm->submit(all_reduce(tensor))->wait(soon());
    comm->run(barrier());
    EXPECT_EQ(comm->allocate(100)->size(), 100U);
    EXPECT_EQ(comm->split(0, 0, comm->options())->world_size(), 1);
    comm->finalize();
}

TEST(Communicator, AsynchronousWorkIsDoneInIssueOrder) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        std::vector<double> value{1};
        const Tensor tensor = over(value, DType::f64);
        std::vector<WorkPtr> works;
        std::vector<int> order;
        for (int i = 0; i < 20; ++i) {
            works.push_back(comm.submit(all_reduce(tensor)));
            works.back()->on_done([&order, i](const std::optional<Error>& error) {
                if (!error) order.push_back(i);
            });
        }
        comm.run(all_reduce(tensor, ReduceOp::max));  // behind them
        EXPECT_EQ(value[0], std::pow(3, 20));
        for (const WorkPtr& work : works) EXPECT_TRUE(work->done());
        EXPECT_EQ(order.size(), 20U);
        EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
        comm.run(barrier());  // inline again
    }));
}

TEST(Communicator, AllRanksAndRunsGiveTheSameBits) {
    const Seed seed;
    for (const size_t count : {size_t{11}, size_t{3000}, size_t{200003}}) {
        std::vector<std::vector<float>> results(5);
        for (const bool buffers : {false, true}) {
            expect_all_well(run_ranks(5, test_options(), [&](Communicator& comm) {
                std::mt19937 random(seed + static_cast<unsigned>(comm.rank()));
                std::normal_distribution<float> normal(0, 1000);
                std::vector<float> input(count);
                for (float& value : input) value = normal(random);
                const auto buffer = comm.allocate(count * sizeof(float));
                std::vector<float> own(count);
                float* data = buffers ? reinterpret_cast<float*>(buffer->data()) : own.data();
                const Tensor tensor = tensor_of(std::span(data, count), DType::f32);
                for (int repeat = 0; repeat < 3; ++repeat) {
                    std::copy(input.begin(), input.end(), data);
                    comm.run(all_reduce(tensor));
                    auto& result = results[static_cast<size_t>(comm.rank())];
                    const std::vector<float> now(data, data + count);
                    if (result.empty()) result = now;
                    ASSERT_EQ(std::memcmp(result.data(), now.data(), count * sizeof(float)), 0);
                }
            }));
        }
        for (const auto& result : results) {
            ASSERT_EQ(std::memcmp(result.data(), results[0].data(), count * sizeof(float)), 0);
        }
    }
}

TEST(Communicator, SplitsByColorAndOrdersByKey) {
    expect_all_well(run_ranks(5, test_options(), [](Communicator& comm) {
        const int color = comm.rank() == 4 ? -1 : comm.rank() % 2;
        const auto group = comm.split(color, -comm.rank(), comm.options());
        if (color < 0) {
            EXPECT_EQ(group, nullptr);
            comm.run(barrier());
            return;
        }
        ASSERT_NE(group, nullptr);
        EXPECT_EQ(group->world_size(), 2);
        EXPECT_EQ(group->rank(), comm.rank() < 2 ? 1 : 0);
        std::vector<int32_t> value{comm.rank()};
        const Tensor tensor = over(value, DType::i32);
        group->run(all_reduce(tensor));
        EXPECT_EQ(value[0], color == 0 ? 0 + 2 : 1 + 3);
        // Both at work at once, and a split of the split.
        std::vector<int32_t> other{1};
        const Tensor other_tensor = over(other, DType::i32);
        const auto work = group->submit(all_reduce(other_tensor));
        comm.run(barrier());
        work->wait(soon());
        EXPECT_EQ(other[0], 2);
        EXPECT_EQ(group->split(group->rank(), 0, comm.options())->transport(), "self");
    }));
}

TEST(Communicator, OutlivesItsParentAndTwoLiveOnOneStore) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    expect_all_well(run_threads(3, [&](int rank) {
        auto first = join_job(store, rank, 3, test_options());
        auto second = join_job(store, rank, 3, test_options());
        const auto group = first->split(0, 0, test_options());
        first.reset();
        for (const auto& comm : {second, group}) {
            std::vector<int64_t> value{rank};
            const Tensor tensor = over(value, DType::i64);
            comm->run(all_reduce(tensor));
            EXPECT_EQ(value[0], 3);
        }
    }));
}

TEST(Communicator, BuffersAreZeroedAlignedAndOutliveIt) {
    std::array<std::shared_ptr<Buffer>, 2> kept;
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        for (const size_t size : {size_t{0}, size_t{1}, size_t{4097}, size_t{3} << 20}) {
            const auto buffer = comm.allocate(size);
            EXPECT_EQ(buffer->size(), size);
            EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 4096, 0U);
            EXPECT_TRUE(
                std::all_of(buffer->data(), buffer->data() + size, [](std::byte b) { return b == std::byte{0}; }));
            kept[static_cast<size_t>(comm.rank())] = buffer;
        }
    }));
    for (const auto& buffer : kept) std::memset(buffer->data(), 1, buffer->size());
}

TEST(Communicator, TensorsAtDifferentPlacesOfABufferAreFine) {
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        const size_t count = 50000;
        const auto buffer = comm.allocate(2 * count * sizeof(float));
        auto* data = reinterpret_cast<float*>(buffer->data()) + static_cast<size_t>(comm.rank()) * 37;
        for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(i);
        const Tensor tensor = tensor_of(std::span(data, count), DType::f32);
        comm.run(all_reduce(tensor));
        for (size_t i = 0; i < count; ++i) ASSERT_EQ(data[i], static_cast<float>(3 * i));
    }));
}

TEST(Communicator, TooLargeABufferIsRefusedEverywhereAndTheRanksGoOn) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        for (const size_t size : {size_t{1} << 50, ~size_t{0}}) {
            try {
                static_cast<void>(comm.allocate(size));
                FAIL() << "allocated";
            } catch (const Error& e) {
                EXPECT_EQ(e.code(), Code::no_memory) << e.what();
            }
        }
        comm.run(barrier());
        EXPECT_EQ(comm.error(), std::nullopt);
    }));
}

TEST(Communicator, ManyRanksOnFewCores) {
    expect_all_well(run_ranks(40, test_options(), [](Communicator& comm) {
        std::vector<int32_t> values(10000, 1);
        const Tensor tensor = over(values, DType::i32);
        comm.run(all_reduce(tensor));
        EXPECT_EQ(values.front(), 40);
        EXPECT_EQ(values.back(), 40);
    }));
}

// --- bad requests: a clear error before anything is sent, and the communicator goes on

void expect_refused(Communicator& comm, const Request& request, const std::string& text,
                    Code code = Code::invalid_argument) {
    try {
        comm.run(request);
        ADD_FAILURE() << "accepted, but should say: " << text;
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), code) << e.what();
        EXPECT_THAT(e.what(), HasSubstr(text));
    }
}

TEST(Communicator, BadRequestsAreRefusedBeforeTheyBegin) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<float> values(8);
        std::vector<double> doubles(8);
        const Tensor four = tensor_of(std::span(values).first(4), DType::f32);
        const Tensor eight = over(values, DType::f32);
        const Tensor wide = over(doubles, DType::f64);
        Tensor gpu = four;
        gpu.device.type = DeviceType::cuda;
        Tensor boolean = four;
        boolean.dtype = DType::boolean;
        Tensor nowhere = four;
        nowhere.data = nullptr;
        Tensor crooked = four;
        crooked.data += 1;
        const std::vector<Tensor> two_types{four, wide};
        expect_refused(comm, all_reduce(four, static_cast<ReduceOp>(9)), "unknown reduction 9");
        expect_refused(comm, all_reduce(four, ReduceOp::none), "unknown reduction 0");
        expect_refused(comm, all_reduce(gpu), "CUDA", Code::unsupported);
        expect_refused(comm, all_reduce(boolean), "bool cannot be reduced; use f16, bf16, f32", Code::unsupported);
        expect_refused(comm, all_reduce(nowhere), "no data");
        expect_refused(comm, all_reduce(crooked), "not aligned");
        expect_refused(comm, {Collective::all_reduce, {}, two_types, ReduceOp::sum, -1, 0, {}},
                       "different dtypes, f32 and f64");
        const Tensor empty = tensor_of(std::span(values).first(0), DType::f32);
        const std::vector<Tensor> twice{four, empty, four};
        const std::vector<Tensor> partly{four, tensor_of(std::span(values).subspan(3, 4), DType::f32)};
        const std::vector<Tensor> side_by_side{empty, tensor_of(std::span(values).last(4), DType::f32), four};
        expect_refused(comm, {Collective::all_reduce, {}, twice, ReduceOp::sum, -1, 0, {}},
                       "tensors [0] and [2] overlap");
        expect_refused(comm, {Collective::all_reduce, {}, partly, ReduceOp::sum, -1, 0, {}},
                       "tensors [0] and [1] overlap");
        for (const int root : {0, 1}) {
            expect_refused(comm, {Collective::broadcast, {}, twice, ReduceOp::none, root, 0, {}},
                           "broadcast: tensors [0] and [2] overlap");
            expect_refused(comm, {Collective::broadcast, {}, partly, ReduceOp::none, root, 0, {}},
                           "broadcast: tensors [0] and [1] overlap");
        }
        std::vector<float> own(4);
        const Tensor other = over(own, DType::f32);
        expect_refused(comm, {Collective::all_gather_v, {&other, 1}, partly, ReduceOp::none, -1, 0, {}},
                       "tensors [0] and [1] overlap");
        comm.run({Collective::all_reduce, {}, side_by_side, ReduceOp::sum, -1, 0, {}});
        comm.run({Collective::broadcast, {}, side_by_side, ReduceOp::none, 0, 0, {}});
        expect_refused(comm, {Collective::broadcast, {}, {&four, 1}, ReduceOp::none, 2, 0, {}}, "root 2 is not a rank");
        expect_refused(comm, {Collective::broadcast, {}, {&four, 1}, ReduceOp::none, -1, 0, {}}, "root -1");
        expect_refused(comm, {Collective::all_gather, {&four, 1}, {&four, 1}, ReduceOp::none, -1, 0, {}},
                       "but 2 ranks with an input of");
        expect_refused(comm, {Collective::all_gather, {&four, 1}, {&wide, 1}, ReduceOp::none, -1, 0, {}},
                       "different dtypes");
        expect_refused(comm, {Collective::reduce_scatter, {&four, 1}, {}, ReduceOp::sum, -1, 0, {}},
                       "the same number of inputs and outputs, at least one each; got 1 and 0");
        expect_refused(comm, {Collective::all_to_all, {&eight, 1}, {&eight, 1}, ReduceOp::none, -1, 0, {}}, "overlap");
        expect_refused(comm, {Collective::all_gather_v, {&four, 1}, {&eight, 1}, ReduceOp::none, -1, 0, {}},
                       "one output per rank, 2");
        expect_refused(comm, {Collective::send, {&four, 1}, {}, ReduceOp::none, comm.rank(), 0, {}}, "own peer");
        expect_refused(comm, {Collective::send, {&four, 1}, {}, ReduceOp::none, 5, 0, {}}, "peer 5 is not a rank");
        expect_refused(comm, {Collective::recv, {}, {&four, 1}, ReduceOp::none, 1 - comm.rank(), -1, {}}, "tag -1");
        expect_refused(comm, {static_cast<Collective>(77), {}, {}, ReduceOp::none, -1, 0, {}}, "unknown operation 77");
        comm.run(barrier());
    }));
}

// Of four ranks such parts would make none at all.
TEST(Communicator, CountsThatNoTensorHasAreRefused) {
    std::array<std::byte, 1> first{};
    const Tensor part{first.data(), Dims{int64_t{1} << 62}, DType::u8, {}};
    const Tensor none{nullptr, Dims{0}, DType::u8, {}};
    const auto refused = [](const Request& request) {
        try {
            (void)validate(request, 0, 4, std::nullopt);
            ADD_FAILURE() << name_of(request.collective) << " was accepted";
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), Code::invalid_argument);
            EXPECT_THAT(e.what(), HasSubstr("need more than any tensor has"));
        }
    };
    refused({Collective::all_gather, {&part, 1}, {&none, 1}, ReduceOp::none, -1, 0, {}});
    refused({Collective::reduce_scatter, {&none, 1}, {&part, 1}, ReduceOp::sum, -1, 0, {}});
    refused({Collective::gather, {&part, 1}, {&none, 1}, ReduceOp::none, 0, 0, {}});
    refused({Collective::scatter, {&none, 1}, {&part, 1}, ReduceOp::none, 0, 0, {}});
}

// Input and output may share memory only as the same part of it.
TEST(Communicator, InputsThatOverlapTheirOutputsAreRefused) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<float> values(16, 1.0F);
        const auto before = values;
        const auto at = [&](size_t begin, size_t count) {
            return tensor_of(std::span(values).subspan(begin, count), DType::f32);
        };
        const int own = comm.rank();  // also the root of each: what a root gives is looked at there
        const size_t others = own == 0 ? 4 : 0;
        const Tensor whole = at(0, 8);
        for (const size_t begin : {others, size_t{2}, size_t{7}}) {  // another rank's part, across both, across the end
            const Tensor part = at(begin, 4);
            for (const auto& [collective, input, output] : {std::tuple{Collective::all_gather, part, whole},
                                                            {Collective::reduce_scatter, whole, part},
                                                            {Collective::gather, part, whole},
                                                            {Collective::scatter, whole, part}}) {
                expect_refused(comm, {collective, {&input, 1}, {&output, 1}, ReduceOp::sum, own, 0, {}}, "overlap");
            }
        }
        const std::vector<Tensor> apart{at(0, 4), at(8, 4)};
        const Tensor shifted = at(own == 0 ? 2 : 9, 4);
        expect_refused(comm, {Collective::all_gather_v, {&shifted, 1}, apart, ReduceOp::none, -1, 0, {}}, "overlap");
        const Tensor later = at(1, 8);
        expect_refused(comm, {Collective::reduce, {&whole, 1}, {&later, 1}, ReduceOp::sum, own, 0, {}}, "overlap");
        expect_refused(comm, {Collective::reduce, {&later, 1}, {&whole, 1}, ReduceOp::sum, own, 0, {}}, "overlap");
        expect_refused(comm, {Collective::all_to_all, {&whole, 1}, {&later, 1}, ReduceOp::none, -1, 0, {}}, "overlap");
        EXPECT_EQ(values, before);
        comm.run(barrier());
    }));
}

TEST(Communicator, BadCreationsAreRefused) {
    const auto store = make_memory_store(milliseconds{1000});
    const auto refused = [&](int rank, int world_size, CommOptions options, const char* text) {
        try {
            static_cast<void>(join_job(store, rank, world_size, options));
            ADD_FAILURE() << "made, but should say: " << text;
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), Code::invalid_argument);
            EXPECT_THAT(e.what(), HasSubstr(text));
        }
    };
    CommOptions no_time = test_options();
    no_time.timeout = milliseconds{0};
    CommOptions no_name = test_options();
    no_name.name.clear();
    CommOptions other_host = test_options();
    other_host.host_id = std::string(128, 'x');
    refused(0, 0, test_options(), "world size is 0");
    refused(0, 1, other_host, "(TESSERA_HOST_ID) has 128 bytes; at most 127 are allowed");
    refused(0, 5000, test_options(), "world size is 5000");
    refused(2, 2, test_options(), "rank 2");
    refused(-1, 2, test_options(), "rank -1");
    refused(0, 1, no_time, "timeout is 0 ms");
    refused(0, 1, no_name, "name");
    refused(0, 1, test_options("carrier-pigeon"), "carrier-pigeon");
}

TEST(Communicator, NothingFollowsFinalize) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<float> values(4);
        const Tensor tensor = over(values, DType::f32);
        const auto work = comm.submit(all_reduce(tensor));
        comm.finalize();
        EXPECT_TRUE(work->done());
        for (const auto& call :
             std::vector<std::function<void()>>{[&] { comm.run(barrier()); }, [&] { comm.finalize(); },
                                                [&] { static_cast<void>(comm.submit(barrier())); }}) {
            try {
                call();
                ADD_FAILURE();
            } catch (const Error& e) {
                EXPECT_EQ(e.code(), Code::invalid_state);
            }
        }
    }));
}

// The progress thread cannot wait for itself: a blocking call from a callback would never return.
// Gloo's own among them.
TEST(Communicator, ItsThreadsTakeNoSignals) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    std::barrier both(2);
    std::optional<NewThreads> threads;
    expect_all_well(run_threads(2, [&](int rank) {
        both.arrive_and_wait();  // the ranks themselves are threads of the program
        if (rank == 0) threads.emplace();
        both.arrive_and_wait();
        const auto comm = join_job(store, rank, 2, test_options("gloo"));
        comm->submit(barrier())->wait(soon());
        if (rank == 0) {
            threads->expect_no_signals_taken("tsr-comm");
            threads->expect_no_signals_taken("tsr-gloo-waker");
        }
        comm->run(barrier());
    }));
}

TEST(Communicator, ACompletionCallbackMayNotBlockOnItsCommunicator) {
    std::promise<void> registered;
    auto ready = registered.get_future().share();
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        if (comm.rank() == 1) {
            ready.wait();
            comm.run(barrier());
            return;
        }
        std::promise<Code> code;
        const auto work = comm.submit(barrier());
        work->on_done([&](const std::optional<Error>&) {
            try {
                comm.run(barrier());
                code.set_value(Code::ok);
            } catch (const Error& e) {
                code.set_value(e.code());
            }
        });
        registered.set_value();
        EXPECT_EQ(code.get_future().get(), Code::invalid_state);
    }));
}

// Bindings cannot help it: the last reference may go away on any thread.
TEST(Communicator, ACompletionCallbackMayDestroyItsCommunicator) {
    std::promise<void> registered;
    auto ready = registered.get_future().share();
    const auto store = make_memory_store(patience(milliseconds{30000}));
    expect_all_well(run_threads(2, [&](int rank) {
        auto comm = join_job(store, rank, 2, test_options());
        if (rank == 1) {
            ready.wait();
            comm->run(barrier());
            // Its peer has gone with a task in its queue; whatever this rank does next ends, and soon.
            try {
                comm->run(barrier());
            } catch (const Error& e) {
                EXPECT_TRUE(e.code() == Code::aborted || e.code() == Code::peer_lost) << e.what();
            }
            return;
        }
        std::promise<void> destroyed;
        const std::weak_ptr<Communicator> watch = comm;
        const auto work = comm->submit(barrier());
        const auto queued = comm->submit(barrier());
        work->on_done([&](const std::optional<Error>&) {
            comm.reset();
            destroyed.set_value();
        });
        registered.set_value();
        destroyed.get_future().wait();
        EXPECT_TRUE(watch.expired());
        EXPECT_THROW(queued->wait(soon()), Error);
    }));
}

TEST(CommunicatorJobs, RunInIssueOrderAndCarryOutCollectivesAtOnce) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        std::vector<double> value{1};
        const Tensor tensor = over(value, DType::f64);
        std::vector<WorkPtr> works;
        for (int i = 0; i < 5; ++i) {
            works.push_back(comm.submit(all_reduce(tensor)));
            works.push_back(comm.submit_job([&] {
                value[0] += 1;
                comm.run(all_reduce(tensor));
            }));
        }
        comm.run(all_reduce(tensor, ReduceOp::max));  // behind them
        double expected = 1;
        for (int i = 0; i < 5; ++i) expected = (3 * expected + 1) * 3;
        EXPECT_EQ(value[0], expected);
        for (const WorkPtr& work : works) EXPECT_TRUE(work->done());
    }));
}

TEST(CommunicatorJobs, ThatThrowEndTheCommunicatorHereAndAtThePeers) {
    std::latch submitted(2);
    const Outcomes outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        const WorkPtr work = comm.submit_job([&] {
            wait_until([&] { return submitted.try_wait(); }, soon(), "both ranks' later jobs");
            if (comm.rank() == 1) throw Error(Code::user, "rank 1: the job gave up").with_rank(1);
            comm.run(barrier());
        });
        const WorkPtr later = comm.submit_job([] { ADD_FAILURE() << "ran after a failure"; });
        submitted.count_down();
        try {
            later->wait(soon());
            ADD_FAILURE() << "nothing was thrown";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::aborted);
        }
        work->wait(soon());
    });
    EXPECT_EQ(outcomes[1].value().code(), Code::user);
    EXPECT_EQ(outcomes[0].value().code(), Code::aborted);
    EXPECT_THAT(outcomes[0].value().what(), HasSubstr("the job gave up"));
}

TEST(CommunicatorJobs, MayNotWaitForTheirOwnQueue) {
    const auto comm = Communicator::self();
    comm->submit_job([&] {
            EXPECT_THROW((void)comm->submit(barrier()), Error);
            EXPECT_THROW((void)comm->submit_job([] {}), Error);
        })
        ->wait(soon());
    comm->run(barrier());
}

TEST(CommunicatorJobs, AllocateAtOnce) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        std::shared_ptr<Buffer> buffer;
        comm.submit_job([&] { buffer = comm.allocate(10); })->wait(soon());
        EXPECT_EQ(buffer->size(), 10U);
    }));
}

TEST(CommunicatorJobs, MayHoldTheLastReferenceToTheirCommunicator) {
    auto comm = Communicator::self();
    std::promise<void> released;
    const WorkPtr work = comm->submit_job([kept = comm, ready = released.get_future().share()] { ready.wait(); });
    const std::weak_ptr<Communicator> watch = comm;
    comm.reset();
    released.set_value();
    work->wait(soon());
    wait_until([&] { return watch.expired(); }, soon(), "the communicator's end");
}

// Ends this process's way to another thread: clone and clone3 fail as they do where the process has too many.
void refuse_threads() {
    std::array<sock_filter, 5> code{{
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    }};
    const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) std::_Exit(2);
    if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) std::_Exit(2);
}

[[noreturn]] void start_without_threads() {
    const auto plan = Communicator::self()->prepare({});
    refuse_threads();
    try {
        plan->start();
        std::_Exit(3);
    } catch (const std::exception&) {
        // as it should be
    }
    try {
        plan->wait(Deadline::in(milliseconds{1000}));
        std::_Exit(4);
    } catch (const Error& error) {
        std::_Exit(error.code() == Code::not_ready ? 5 : 0);
    }
}

TEST(CommunicatorDeathTest, APlanThatCouldNotBeStartedIsNotWaitedFor) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(start_without_threads(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tsr::testing
