// Plans: what they do, and what a launch costs in allocations.
#include "comm/plan.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <functional>
#include <new>

#include "comm/any_call.hpp"
#include "patience.hpp"
#include "ranks.hpp"

namespace {

std::atomic<uint64_t> allocations{0};

}  // namespace

// Of this test program: they count. A sanitizer has its own, so under one nothing is counted. Inlined, GCC takes free() for
// a mistake.
#if !defined(TESSERA_SANITIZED)
[[gnu::noinline]] void* operator new(size_t size) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    if (void* memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
    allocations.fetch_add(1, std::memory_order_relaxed);
    return std::malloc(size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
#endif

namespace tsr {
namespace {

using testing::expect_all_well;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::test_options;

Request sum_of(const Tensor& tensor) {
    return {.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum};
}

TEST(Plan, DoesWhatTheCollectiveDoes) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        std::vector<float> one(5, static_cast<float>(comm.rank()));
        std::vector<float> all(15);
        const Tensor own = tensor_of(std::span<float>(one), DType::f32);
        const Tensor whole = tensor_of(std::span<float>(all), DType::f32);
        const auto gather =
            comm.prepare({.collective = Collective::all_gather, .inputs = {&own, 1}, .outputs = {&whole, 1}});
        const auto sum = comm.prepare(sum_of(whole));
        for (int repeat = 0; repeat < 3; ++repeat) {
            gather->run();
            EXPECT_EQ(all[14], 2.0F);
            sum->start();
            sum->wait(Deadline::in(testing::patience(milliseconds{30000})));
            EXPECT_EQ(all[5], 3.0F);
            comm.run(sum_of(whole));  // an ordinary call between them
            EXPECT_EQ(all[14], 18.0F);
        }
    }));
}

TEST(Plan, MeetsWhatTheOthersCall) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<float> values(4 + static_cast<size_t>(comm.rank()));
        const Tensor tensor = tensor_of(std::span<float>(values), DType::f32);
        const auto plan = comm.prepare(sum_of(tensor));
        plan->run();
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("all_reduce of 4 f32"));
    }
}

TEST(Plan, IsNotLaunchedTwiceAtOnce) {
    std::barrier both(2);
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        std::vector<float> values(4);
        const Tensor tensor = tensor_of(std::span<float>(values), DType::f32);
        const auto plan = comm.prepare(sum_of(tensor));
        if (comm.rank() == 0) {
            plan->start();
            EXPECT_THROW(plan->wait(Deadline::in(milliseconds{0})), Error) << "the other rank has not come";
            for (const bool inline_too : {false, true}) {
                try {
                    inline_too ? plan->run() : plan->start();
                    ADD_FAILURE() << "launched twice";
                } catch (const Error& error) {
                    EXPECT_EQ(error.code(), Code::invalid_state);
                    EXPECT_THAT(error.what(), HasSubstr("before its previous launch finished"));
                }
            }
            both.arrive_and_wait();
        } else {
            both.arrive_and_wait();
            plan->start();
        }
        plan->wait(Deadline::in(testing::patience(milliseconds{30000})));
    }));
}

TEST(Plan, OfAFailedCommunicatorOrOfAMessageIsRefused) {
    std::barrier both_are_done(2);
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        std::vector<float> values(4);
        const Tensor tensor = tensor_of(std::span<float>(values), DType::f32);
        EXPECT_THROW(
            (void)comm.prepare({.collective = Collective::send, .inputs = {&tensor, 1}, .peer = 1 - comm.rank()}),
            Error);
        const auto plan = comm.prepare(sum_of(tensor));
        plan->run();
        both_are_done.arrive_and_wait();
        comm.abort("enough");
        EXPECT_THROW(plan->run(), Error);
        EXPECT_THROW(plan->start(), Error);
        EXPECT_THROW((void)comm.prepare(sum_of(tensor)), Error);
    }));
}

// Counts what launches allocate. A wait that takes long composes a message for its errors, so the best of some rounds counts:
// one allocation a launch would be in all of them.
class Launches {
   public:
    explicit Launches(int world) : world_(world), all_(world) {}

    // Whether in some round no rank has allocated. Every rank calls this.
    bool allocate_nothing(const std::function<void()>& launch) {
        for (int round = 0; round < 40; ++round) {
            all_.arrive_and_wait();
            const uint64_t before = allocations.load();
            all_.arrive_and_wait();
            for (int repeat = 0; repeat < 5; ++repeat) launch();
            all_.arrive_and_wait();
            const bool none = allocations.load() == before;
            all_.arrive_and_wait();              // all have looked
            if (none && round > 0) return true;  // in the first one a transport may make what it keeps
        }
        return false;
    }
    // Through shared memory, or of one rank: Gloo allocates for every message.
    void expect_none(const std::function<void(Communicator&)>& body) {
        const auto store = make_memory_store(testing::patience(milliseconds{30000}));
        expect_all_well(testing::run_threads(
            world_, [&](int rank) { body(*Communicator::create(store, rank, world_, test_options("shm"))); }));
    }

   private:
    const int world_;
    std::barrier<> all_;
};

void expect_no_collective_allocates(int world) {
    Launches launches(world);
    launches.expect_none([&](Communicator& comm) {
        constexpr size_t large = 40000;  // several segments
        const size_t most = testing::Asked{.count = large}.bytes(world);
        const auto buffer = comm.allocate(2 * most);
        std::vector<std::byte> own(2 * most);
        for (std::byte* memory : {own.data(), buffer->data()}) {
            for (const size_t count : {size_t{3}, size_t{1000}, large}) {
                for (const Collective collective : testing::every_collective) {
                    const testing::AnyCall call({.collective = collective, .count = count}, comm.rank(), world, memory,
                                                memory + most);
                    const auto plan = comm.prepare(call.request());
                    const std::string what = fmt::format("{} of {} in {} memory", name_of(collective), count,
                                                         memory == own.data() ? "foreign" : "the communicator's");
                    EXPECT_TRUE(launches.allocate_nothing([&] { plan->run(); })) << what;
                    EXPECT_TRUE(launches.allocate_nothing([&] {
                        plan->start();
                        plan->wait(Deadline::in(testing::patience(milliseconds{30000})));
                    })) << what
                        << ", queued";
                    call.fill(count);
                    plan->run();
                    EXPECT_EQ(call.first_wrong(count), -1) << what;
                }
            }
        }
    });
}

TEST(Plan, LaunchAllocatesNothing) { expect_no_collective_allocates(3); }

TEST(Plan, LaunchOfARankAloneAllocatesNothing) { expect_no_collective_allocates(1); }

TEST(Plan, LaunchOfListsAllocatesNothing) {
    Launches launches(2);
    launches.expect_none([&](Communicator& comm) {
        std::vector<float> large(100000, 1.0F);
        std::vector<float> parts(50000 + 7, 1.0F);
        const Tensor wholes[] = {tensor_of(std::span<float>(large).first(20), DType::f32),
                                 tensor_of(std::span<float>(large).subspan(30, 60000), DType::f32)};
        const Tensor halves[] = {tensor_of(std::span<float>(parts).first(10), DType::f32),
                                 tensor_of(std::span<float>(parts).subspan(12, 30000), DType::f32)};
        const auto scatter = comm.prepare(
            {.collective = Collective::reduce_scatter, .inputs = wholes, .outputs = halves, .op = ReduceOp::max});
        const auto gather = comm.prepare({.collective = Collective::all_gather, .inputs = halves, .outputs = wholes});
        EXPECT_TRUE(launches.allocate_nothing([&] {
            scatter->run();
            gather->run();
        }));
    });
}

}  // namespace
}  // namespace tsr
