// Sends and receives: order, tags, sizes beyond the ring, both directions at once, mismatches.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <future>
#include <random>

#include "comm/communicator.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "seed.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

Request send(const Tensor& tensor, int to, int tag = 0) {
    return {Collective::send, {&tensor, 1}, {}, ReduceOp::none, to, tag, {}};
}
Request recv(const Tensor& tensor, int from, int tag = 0) {
    return {Collective::recv, {}, {&tensor, 1}, ReduceOp::none, from, tag, {}};
}

std::vector<int32_t> pattern(size_t count, int seed) {
    std::vector<int32_t> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<int32_t>(i * 7) + seed;
    return values;
}

Tensor over(std::vector<int32_t>& values) { return tensor_of(std::span<int32_t>(values), DType::i32); }

void finish(const std::vector<WorkPtr>& works) {
    for (const WorkPtr& work : works) work->wait(soon());
}

TEST(Transfers, EverySizeArrives) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        for (const size_t count : {0, 1, 1000, 65528, 65536, 65537, 1000003}) {
            std::vector<int32_t> values = comm.rank() == 0 ? pattern(count, 5) : std::vector<int32_t>(count, -1);
            const Tensor tensor = over(values);
            comm.run(comm.rank() == 0 ? send(tensor, 1, 3) : recv(tensor, 0, 3));
            ASSERT_EQ(values, pattern(count, 5)) << count;
        }
    }));
}

TEST(Transfers, BothMaySendFirstIfAsynchronously) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        const size_t count = 500000;  // more than a ring holds
        std::vector<int32_t> out = pattern(count, comm.rank());
        std::vector<int32_t> in(count);
        const Tensor from = over(out);
        const Tensor to = over(in);
        const int peer = 1 - comm.rank();
        std::vector<WorkPtr> works{comm.submit(send(from, peer)), comm.submit(recv(to, peer))};
        finish(works);
        ASSERT_EQ(in, pattern(count, peer));
        // And with the second of the two synchronous, behind the first.
        std::fill(in.begin(), in.end(), 0);
        works = {comm.submit(send(from, peer))};
        comm.run(recv(to, peer));
        finish(works);
        ASSERT_EQ(in, pattern(count, peer));
    }));
}

// What nobody asked for takes no more than 64 MiB of a sender; what fits is still delivered.
TEST(Transfers, AMessageSetAsideIsRefusedBeyondTheBound) {
    const auto outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        const auto bytes_with = [&](size_t size) { return std::vector<int32_t>(size / sizeof(int32_t), 7); };
        std::vector<int32_t> large = bytes_with(size_t{40} << 20);
        std::vector<int32_t> small(1, 3);
        const Tensor whole = over(large);
        const Tensor one = over(small);
        if (comm.rank() == 1) {
            for (const int tag : {3, 5}) comm.run(send(tag == 3 ? whole : one, 0, tag));
            for (const int tag : {3, 4, 5}) comm.run(send(tag == 5 ? one : whole, 0, tag));
            return;
        }
        small[0] = 0;
        comm.run(recv(one, 1, 5));  // 40 MiB are set aside
        EXPECT_EQ(small[0], 3);
        large.assign(large.size(), 0);
        comm.run(recv(whole, 1, 3));
        EXPECT_EQ(large.back(), 7);
        comm.run(recv(one, 1, 5));  // 40 MiB, then 40 more
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::no_memory) << outcomes[0]->what();
    EXPECT_EQ(outcomes[0]->record()->peer, 1);
    EXPECT_THAT(outcomes[0]->what(), AllOf(HasSubstr("rank 1 sends 41943040 bytes with tag 4"), HasSubstr("64 MiB")));
    ASSERT_TRUE(outcomes[1]) << "the sender hears of it";
}

// A receive of tag 5 sets aside what comes with tag 3, and goes on looking while receives of tag 3 are posted: those must
// still get the older message first.
TEST(Transfers, AMessageSetAsideComesBeforeALaterOneOfItsTag) {
    std::promise<void> posted;
    std::promise<void> held;
    std::promise<void> sent;
    std::promise<void> go;
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        std::vector<int32_t> first(1, 1);
        std::vector<int32_t> second(1, 2);
        std::vector<int32_t> other(1, 9);
        const Tensor a = over(first);
        const Tensor b = over(second);
        const Tensor c = over(other);
        if (comm.rank() == 1) {
            posted.get_future().wait();
            comm.run(send(a, 0, 3));
            comm.run(send(c, 0, 7));
            held.get_future().wait();
            comm.run(send(b, 0, 3));
            sent.set_value();
            comm.run(send(c, 0, 5));
            return;
        }
        std::vector<int32_t> got(4, -1);
        const auto place = [&](size_t i) { return tensor_of(std::span<int32_t>(&got[i], 1), DType::i32); };
        std::vector<Tensor> places{place(0), place(1), place(2), place(3)};
        std::vector<WorkPtr> works{comm.submit(recv(places[2], 1, 5)), comm.submit(recv(places[3], 1, 7))};
        // The callback holds the progress thread until the second message is there and its receives are queued.
        works[1]->on_done([&](const std::optional<Error>&) {
            held.set_value();
            go.get_future().wait();
        });
        posted.set_value();
        sent.get_future().wait();
        works.push_back(comm.submit(recv(places[0], 1, 3)));
        works.push_back(comm.submit(recv(places[1], 1, 3)));
        go.set_value();
        finish(works);
        EXPECT_EQ(got, (std::vector<int32_t>{1, 2, 9, 9}));
    }));
}

TEST(Transfers, RingOfRanksShiftsWithoutDeadlock) {
    expect_all_well(run_ranks(5, test_options(), [](Communicator& comm) {
        const int n = comm.world_size();
        std::vector<int32_t> value = pattern(200000, comm.rank());
        for (int step = 0; step < n; ++step) {
            std::vector<int32_t> next(value.size());
            const Tensor from = over(value);
            const Tensor to = over(next);
            finish({comm.submit(send(from, (comm.rank() + 1) % n, step)),
                    comm.submit(recv(to, (comm.rank() + n - 1) % n, step))});
            value = std::move(next);
        }
        ASSERT_EQ(value, pattern(200000, comm.rank()));
    }));
}

TEST(Transfers, TagsMatchOutOfOrderAndInOrderWithinATag) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        constexpr int messages = 6;
        std::vector<std::vector<int32_t>> values(messages);
        std::vector<Tensor> tensors;
        for (int i = 0; i < messages; ++i) {
            values[static_cast<size_t>(i)] = comm.rank() == 0 ? pattern(40000, i) : std::vector<int32_t>(40000);
            tensors.push_back(over(values[static_cast<size_t>(i)]));
        }
        std::vector<WorkPtr> works;
        if (comm.rank() == 0) {
            for (int i = 0; i < messages; ++i)
                works.push_back(comm.submit(send(tensors[static_cast<size_t>(i)], 1, i % 3)));
        } else {
            // Tag 2 first, though its messages come behind others of the same size as the ring.
            for (const int i : {2, 5, 1, 4, 0, 3}) comm.run(recv(tensors[static_cast<size_t>(i)], 0, i % 3));
        }
        finish(works);
        for (int i = 0; i < messages; ++i) ASSERT_EQ(values[static_cast<size_t>(i)], pattern(40000, i)) << i;
    }));
}

TEST(Transfers, CollectivesKeepTheirPlaceBetweenThem) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<int32_t> a = pattern(100000, 1);
        std::vector<int32_t> b(100000);
        std::vector<int32_t> sum{comm.rank() + 1};
        const Tensor ta = over(a);
        const Tensor tb = over(b);
        const Tensor ts = over(sum);
        const int peer = 1 - comm.rank();
        std::vector<WorkPtr> works;
        for (int i = 0; i < 3; ++i) {
            works.push_back(comm.submit(comm.rank() == 0 ? send(ta, peer) : recv(tb, peer)));
            works.push_back(comm.submit({Collective::all_reduce, {}, {&ts, 1}, ReduceOp::sum, -1, 0, {}}));
            works.push_back(comm.submit(comm.rank() == 1 ? send(ta, peer) : recv(tb, peer)));
        }
        finish(works);
        EXPECT_EQ(sum[0], 3 * 2 * 2);
        EXPECT_EQ(b, a);
    }));
}

TEST(Transfers, RandomTrafficBetweenAllPairs) {
    const Seed seed;
    expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
        // All ranks draw the same plan.
        std::mt19937 random(seed);
        struct Message {
            int from, to, tag;
            size_t count;
        };
        std::vector<Message> plan;
        for (int i = 0; i < 200; ++i) {
            const int from = static_cast<int>(random() % 4);
            const int to = static_cast<int>((static_cast<unsigned>(from) + 1 + random() % 3) % 4);
            plan.push_back({from, to, static_cast<int>(random() % 3), random() % 30000});
        }
        std::vector<std::vector<int32_t>> data(plan.size());
        std::vector<Tensor> tensors(plan.size());
        std::vector<WorkPtr> works;
        for (size_t i = 0; i < plan.size(); ++i) {
            const Message& m = plan[i];
            const bool sends = m.from == comm.rank();
            if (!sends && m.to != comm.rank()) continue;
            data[i] = sends ? pattern(m.count, static_cast<int>(i)) : std::vector<int32_t>(m.count);
            tensors[i] = over(data[i]);
            works.push_back(comm.submit(sends ? send(tensors[i], m.to, m.tag) : recv(tensors[i], m.from, m.tag)));
        }
        finish(works);
        for (size_t i = 0; i < plan.size(); ++i) {
            if (plan[i].to != comm.rank()) continue;
            ASSERT_EQ(data[i], pattern(plan[i].count, static_cast<int>(i))) << i;
        }
    }));
}

TEST(Transfers, DifferingCountsAreNamedOnBothSides) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<int32_t> values(comm.rank() == 0 ? 1000000 : 900000, 7);
        const Tensor tensor = over(values);
        try {
            comm.run(comm.rank() == 0 ? send(tensor, 1, 4) : recv(tensor, 0, 4));
        } catch (...) {
            EXPECT_EQ(values, std::vector<int32_t>(values.size(), 7)) << "data moved";
            throw;
        }
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_THAT(outcome->what(), HasSubstr("1000000 i32"));
        EXPECT_THAT(outcome->what(), HasSubstr("900000 i32"));
    }
}

TEST(Transfers, DifferingDtypesAreNamedOnBothSides) {
    for (const size_t count : {size_t{10}, size_t{1000000}}) {
        const auto outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
            std::vector<int32_t> values(count, 7);
            Tensor tensor = over(values);
            if (comm.rank() == 1) tensor.dtype = DType::f32;  // as many bytes
            try {
                comm.run(comm.rank() == 0 ? send(tensor, 1, 4) : recv(tensor, 0, 4));
                comm.run({});  // a small message is sent before anybody looks at it
            } catch (...) {
                EXPECT_EQ(values, std::vector<int32_t>(count, 7)) << "data moved";
                throw;
            }
        });
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome) << count;
            EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
            EXPECT_THAT(outcome->what(), HasSubstr(fmt::format("rank 0 called send of {} i32", count)));
            EXPECT_THAT(outcome->what(), HasSubstr(fmt::format("rank 1 recv of {} f32", count)));
        }
    }
}

// What is larger than what is kept for a receiver waits for it.
TEST(Transfers, ALateReceiverIsNamedAtTheDeadline) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<int32_t> values = pattern(1000000, 3);
        const Tensor tensor = over(values);
        comm.set_timeout(milliseconds{300});
        if (comm.rank() == 0) return comm.run(send(tensor, 1, 9));
        wait_until([&] { return comm.error().has_value(); }, soon(), "rank 0's error");
        comm.run(recv(tensor, 0, 9));
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::timeout);
    EXPECT_EQ(outcomes[0]->record()->peer, 1);
    EXPECT_EQ(outcomes[0]->record()->operation, "send");
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("send #1 (to rank 1, tag 9, 3.8 MiB) timed out after 0.3 s: rank 1"));
    ASSERT_TRUE(outcomes[1]) << "it came after its peer had given it up";
}

TEST(Transfers, SilentPeerIsNamedAtTheDeadline) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        comm.set_timeout(milliseconds{200});
        if (comm.rank() == 1) {
            // It stays until rank 0's error tells it to go.
            wait_until([&] { return comm.error().has_value(); }, soon(), "rank 0's error");
            return;
        }
        std::vector<int32_t> values(10);
        const Tensor tensor = over(values);
        comm.run(recv(tensor, 1, 9));
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_FALSE(outcomes[1]) << outcomes[1]->what();
    EXPECT_EQ(outcomes[0]->code(), Code::timeout);
    EXPECT_EQ(outcomes[0]->record()->peer, 1);
    EXPECT_EQ(outcomes[0]->record()->operation, "recv");
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("recv #1 (from rank 1, tag 9, 40 B) timed out after 0.2 s: rank 1"));
}

TEST(Transfers, MessageOfARankThatHasLeftStillArrives) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    std::atomic<bool> sent{false};
    const auto outcomes = run_threads(2, [&](int rank) {
        auto comm = join_job(store, rank, 2, test_options());
        std::vector<int32_t> values = rank == 0 ? pattern(100, 1) : std::vector<int32_t>(100);
        const Tensor tensor = over(values);
        if (rank == 0) {
            comm->run(send(tensor, 1));
            comm.reset();
            sent = true;
            return;
        }
        wait_until([&] { return sent.load(); }, soon(), "the send");
        comm->run(recv(tensor, 0));
        EXPECT_EQ(values, pattern(100, 1));
        comm->run(recv(tensor, 0));  // there is no second one
    });
    EXPECT_FALSE(outcomes[0]);
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::peer_lost);
    EXPECT_THAT(outcomes[1]->what(), HasSubstr("left the communicator"));
}

}  // namespace
}  // namespace tsr::testing
