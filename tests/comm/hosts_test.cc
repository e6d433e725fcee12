// Ranks on several hosts, some of them together: which transport they get, and that what happens on one host is told on
// all. The other tests of communicators run over such hosts too (tests/CMakeLists.txt).
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <atomic>

#include "comm/communicator.hpp"
#include "patience.hpp"
#include "ranks.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A communicator whose ranks are on the hosts of these names.
Outcomes run_on(const std::vector<std::string>& hosts, const CommOptions& options,
                const std::function<void(Communicator& comm)>& body) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    const auto world_size = static_cast<int>(hosts.size());
    return run_threads(world_size, [&](int rank) {
        CommOptions own = options;
        own.host_id = hosts[static_cast<size_t>(rank)];
        const auto comm = Communicator::create(store, rank, world_size, own);
        body(*comm);
    });
}

template <class T>
Tensor over(std::vector<T>& values, DType dtype) {
    return tensor_of(std::span<T>(values), dtype);
}

Request all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum) {
    return {Collective::all_reduce, {}, {&tensor, 1}, op, -1, 0, {}};
}

TEST(Hosts, TransportGoesByWhichRanksAreTogether) {
    const auto expect = [](const std::vector<std::string>& hosts, const char* backend, const char* transport) {
        expect_all_well(run_on(hosts, test_options(backend), [&](Communicator& comm) {
            EXPECT_EQ(comm.transport(), transport);
            std::vector<int32_t> value{1};
            const Tensor tensor = over(value, DType::i32);
            comm.run(all_reduce(tensor));
            EXPECT_EQ(value[0], comm.world_size());
        }));
    };
    expect({"a", "a", "a"}, "auto", "shm");
    expect({"a", "b", "c"}, "auto", "gloo");
    expect({"a", "b", "a"}, "auto", "hierarchical");
    expect({"a", "b", "a"}, "gloo", "gloo");
}

TEST(Hosts, AnEncryptedJobIsRefusedOnSeveral) {
    ::setenv("TESSERA_TLS", "1", 1);
    for (const auto& hosts : {std::vector<std::string>{"a", "b", "c"}, {"a", "b", "a"}}) {
        for (const char* backend : {"auto", "gloo", "cpu:auto,cuda:nccl"}) {
            const auto outcomes =
                run_on(hosts, test_options(backend), [](Communicator&) { ADD_FAILURE() << "they joined"; });
            for (const auto& outcome : outcomes) {
                ASSERT_TRUE(outcome);
                EXPECT_EQ(outcome->code(), Code::unsupported) << outcome->what();
                EXPECT_THAT(outcome->what(), AllOf(HasSubstr("TESSERA_TLS"), HasSubstr("Gloo is used without"),
                                                   HasSubstr("Run the job on one host")));
                const bool names_nccl = std::string(outcome->what()).find("NCCL") != std::string::npos;
                EXPECT_EQ(names_nccl, std::string(backend).ends_with("nccl"));
            }
        }
    }
    for (const char* backend : {"auto", "gloo"}) {  // within a host nothing is on a network
        expect_all_well(run_on({"a", "a"}, test_options(backend), [](Communicator& comm) { comm.run({}); }));
    }
    ::unsetenv("TESSERA_TLS");
}

TEST(Hosts, GroupsOfASplitAreAsTheirRanksLie) {
    expect_all_well(run_on({"a", "a", "b", "b"}, test_options("auto"), [](Communicator& comm) {
        EXPECT_EQ(comm.split(comm.rank() / 2, 0, test_options("auto"))->transport(), "shm");
        EXPECT_EQ(comm.split(comm.rank() % 2, 0, test_options("auto"))->transport(), "gloo");
        const auto three = comm.split(comm.rank() == 0 ? -1 : 0, -comm.rank(), test_options("auto"));
        if (!three) return;
        EXPECT_EQ(three->transport(), "hierarchical");
        std::vector<int32_t> value{comm.rank()};
        const Tensor tensor = over(value, DType::i32);
        three->run(all_reduce(tensor));
        EXPECT_EQ(value[0], 6);
    }));
}

TEST(Hosts, DisagreementInsideAHostIsToldOnTheOthers) {
    const auto outcomes = run_on({"a", "b", "b", "a"}, test_options("auto"), [](Communicator& comm) {
        std::vector<float> values(50000, 1);
        const Tensor tensor = over(values, DType::f32);
        try {
            comm.run(comm.rank() == 2 ? Request{Collective::broadcast, {}, {&tensor, 1}, ReduceOp::none, 0, 0, {}}
                                      : all_reduce(tensor));
        } catch (...) {
            EXPECT_EQ(values, std::vector<float>(50000, 1)) << "data moved";
            throw;
        }
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 called all_reduce of 50000 f32 (sum), rank 2 broadcast of 50000 "
                                               "f32 with root 0"));
    }
}

TEST(Hosts, DisagreementBetweenHostsNamesAllTheirRanks) {
    for (const size_t count : {size_t{1}, size_t{50000}, size_t{3000000}}) {
        const auto outcomes = run_on({"a", "b", "b", "a"}, test_options("auto"), [&](Communicator& comm) {
            const bool odd = comm.rank() == 1 || comm.rank() == 2;
            std::vector<float> values(count + (odd ? 1 : 0), 1);
            const std::vector<float> before = values;
            const Tensor tensor = over(values, DType::f32);
            try {
                comm.run(all_reduce(tensor));
            } catch (...) {
                EXPECT_EQ(values, before) << "data moved";
                throw;
            }
        });
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
            EXPECT_THAT(outcome->what(),
                        HasSubstr(fmt::format("ranks 0 and 3 called all_reduce of {} f32 (sum), ranks 1 and 2 "
                                              "all_reduce of {} f32 (sum)",
                                              count, count + 1)));
        }
    }
}

// Whoever is late is named by all, not those who wait for it.
TEST(Hosts, LateRankIsNamedOnAllHosts) {
    for (int late = 0; late < 4; ++late) {
        std::atomic<int> failed{0};
        const auto outcomes = run_on({"a", "a", "b", "b"}, test_options("auto"), [&](Communicator& comm) {
            std::vector<float> values(64, 1);
            const Tensor tensor = over(values, DType::f32);
            comm.run(all_reduce(tensor));
            comm.set_timeout(milliseconds{2000});
            if (comm.rank() == late) {
                wait_until([&] { return failed == 3; }, Deadline::in(patience(milliseconds{30000})),
                           "the others' timeouts");
            }
            try {
                comm.run(all_reduce(tensor));
            } catch (...) {
                ++failed;
                throw;
            }
        });
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::timeout) << outcome->what();
            EXPECT_EQ(outcome->record()->peer, late) << outcome->what();
            EXPECT_THAT(outcome->what(), AllOf(HasSubstr("all_reduce #2 (256 B) timed out after 2 s"),
                                               HasSubstr("never entered it; its last operation was all_reduce #1")));
        }
    }
}

TEST(Hosts, RankThatLeavesAHostIsMissedOnAll) {
    for (int leaving = 0; leaving < 4; ++leaving) {
        const auto begin = Clock::now();
        const auto outcomes = run_on({"a", "a", "b", "b"}, test_options("auto"), [&](Communicator& comm) {
            comm.run({});
            if (comm.rank() != leaving) comm.run({});
        });
        EXPECT_LT(Clock::now() - begin, patience(std::chrono::seconds(10)));
        for (int rank = 0; rank < 4; ++rank) {
            const auto& outcome = outcomes[static_cast<size_t>(rank)];
            ASSERT_EQ(outcome.has_value(), rank != leaving);
            if (!outcome) continue;
            EXPECT_EQ(outcome->code(), Code::peer_lost) << outcome->what();
            EXPECT_EQ(outcome->record()->peer, leaving) << outcome->what();
            EXPECT_THAT(outcome->what(), HasSubstr("left the communicator"));
        }
    }
}

TEST(Hosts, AbortEndsAWaitForAMessageOnAnotherHost) {
    std::atomic<int> waiting{0};
    const auto outcomes = run_on({"a", "a", "b", "b"}, test_options("auto"), [&](Communicator& comm) {
        std::vector<float> values(4);
        const Tensor tensor = over(values, DType::f32);
        if (comm.rank() == 3) {
            wait_until([&] { return waiting == 3; }, Deadline::in(patience(milliseconds{30000})), "the others");
            comm.abort("enough");
            return;
        }
        ++waiting;
        // Of a neighbour, of a rank elsewhere, and of both at once; none of them sends.
        if (comm.rank() < 2) {
            comm.run({Collective::recv, {}, {&tensor, 1}, ReduceOp::none, comm.rank() == 0 ? 1 : 2, 0, {}});
            return;
        }
        std::vector<float> more(4);
        const Tensor second = over(more, DType::f32);
        const auto near = comm.submit({Collective::recv, {}, {&tensor, 1}, ReduceOp::none, 3, 0, {}});
        const auto far = comm.submit({Collective::recv, {}, {&second, 1}, ReduceOp::none, 0, 0, {}});
        near->wait(Deadline::in(patience(milliseconds{30000})));
    });
    for (const int rank : {0, 1, 2}) {
        ASSERT_TRUE(outcomes[static_cast<size_t>(rank)]);
        EXPECT_EQ(outcomes[static_cast<size_t>(rank)]->code(), Code::aborted);
        EXPECT_THAT(outcomes[static_cast<size_t>(rank)]->what(), HasSubstr("enough"));
    }
}

// Rank 3 is missed by its neighbour alone, which goes on and comes no more to where the other host waits for it.
TEST(Hosts, AShrinkEndsWaitsInWhatWasSplitOff) {
    std::atomic<bool> gone{false};
    expect_all_well(run_on({"a", "a", "b", "b"}, test_options("auto"), [&](Communicator& comm) {
        const auto half = comm.split(0, 0, test_options("auto"));
        const auto again = half->split(0, 0, test_options("auto"));
        if (comm.rank() == 3) {
            again->leave();
            half->leave();
            comm.leave();
            gone = true;
            return;
        }
        if (comm.rank() == 2) {
            wait_until([&] { return gone.load(); }, Deadline::in(patience(milliseconds{30000})), "rank 3");
        } else {
            try {
                again->run({});
                ADD_FAILURE() << "a barrier without ranks 2 and 3";
            } catch (const Error& e) {
                EXPECT_EQ(e.code(), Code::aborted);
                EXPECT_THAT(e.what(), HasSubstr("from which it was split, is being shrunk"));
            }
        }
        const auto rest = comm.shrink(comm.options());
        EXPECT_EQ(rest->world_size(), 3);
        rest->run({});
    }));
}

// A host's sum would not fit, the average of all does.
TEST(Hosts, AveragesOfSmallTypesDoNotOverflow) {
    expect_all_well(run_on({"a", "a", "b"}, test_options("auto"), [](Communicator& comm) {
        std::vector<int8_t> values(3000, 101);
        const Tensor tensor = over(values, DType::i8);
        comm.run(all_reduce(tensor, ReduceOp::avg));
        EXPECT_EQ(values, std::vector<int8_t>(3000, 101));
        std::vector<uint16_t> halves(3000, 0x7800);  // 32768
        const Tensor half = over(halves, DType::f16);
        comm.run(all_reduce(half, ReduceOp::avg));
        EXPECT_EQ(halves, std::vector<uint16_t>(3000, 0x7800));
        std::vector<uint16_t> part(1000);
        const Tensor out = over(part, DType::f16);
        comm.run({Collective::reduce_scatter, {&half, 1}, {&out, 1}, ReduceOp::avg, -1, 0, {}});
        EXPECT_EQ(part, std::vector<uint16_t>(1000, 0x7800));
        comm.run({Collective::reduce,
                  {&half, 1},
                  {&half, comm.rank() == 1 ? size_t{1} : size_t{0}},
                  ReduceOp::avg,
                  1,
                  0,
                  {}});
        EXPECT_EQ(halves, std::vector<uint16_t>(3000, 0x7800));
    }));
}

// The bits go by which ranks are together, not by the size or by how the tensor is cut.
TEST(Hosts, AnElementHasTheSameBitsInEverySize) {
    std::vector<std::vector<float>> first(5);
    for (const size_t count : {size_t{100}, size_t{5000}, size_t{900001}}) {
        std::vector<std::vector<float>> results(5);
        expect_all_well(run_on({"a", "b", "a", "c", "b"}, test_options("auto"), [&](Communicator& comm) {
            std::vector<float> values(count);
            for (size_t i = 0; i < count; ++i) {
                values[i] = 1.0F / static_cast<float>(i % 100 * 7 + static_cast<size_t>(comm.rank()) + 1);
            }
            const Tensor tensor = over(values, DType::f32);
            comm.run(all_reduce(tensor, ReduceOp::avg));
            results[static_cast<size_t>(comm.rank())].assign(values.begin(), values.begin() + 100);
        }));
        for (const auto& result : results) EXPECT_EQ(result, results[0]);
        if (first[0].empty()) first = results;
        EXPECT_EQ(results[0], first[0]);
    }
}

}  // namespace
}  // namespace tsr::testing
