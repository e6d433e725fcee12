// Ranks that disagree on an operation. Every rank gets an error that says who called what, and no data moves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "ranks.hpp"
#include "requests.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Large enough that a wrong path would move data.
std::vector<float> values_of(int rank) { return std::vector<float>(100000, static_cast<float>(rank)); }

void expect_mismatch(int world_size,
                     const std::function<Request(std::vector<float>&, std::vector<Tensor>&, int rank)>& make,
                     const std::vector<std::string>& told) {
    const auto outcomes = run_ranks(world_size, test_options(), [&](Communicator& comm) {
        std::vector<float> values = values_of(comm.rank());
        std::vector<Tensor> tensors;
        const Request request = make(values, tensors, comm.rank());
        try {
            comm.run(request);
        } catch (...) {
            EXPECT_EQ(values, values_of(comm.rank())) << "data moved";
            EXPECT_TRUE(comm.error().has_value());
            throw;
        }
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_GE(outcome->record()->peer, 0);
        for (const std::string& text : told) EXPECT_THAT(outcome->what(), HasSubstr(text));
    }
}

Tensor front(std::vector<float>& values, size_t count, size_t offset = 0) {
    return tensor_of(std::span(values).subspan(offset, count), DType::f32);
}

TEST(Mismatch, OfTheCollective) {
    expect_mismatch(
        3,
        [](auto& values, auto& tensors, int rank) -> Request {
            tensors = {front(values, 50000)};
            if (rank == 1) return {Collective::broadcast, {}, tensors, ReduceOp::none, 2, 0, {}};
            return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
        },
        {"ranks 0 and 2 called all_reduce of 50000 f32 (sum)", "rank 1 broadcast of 50000 f32 with root 2"});
}

// A finalize is no barrier: the rank that ends is told apart from those that go on.
TEST(Mismatch, OfAFinalizeAndABarrier) {
    const auto outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
        comm.run({});
        if (comm.rank() == 1) {
            comm.finalize();
        } else {
            comm.run({});
        }
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 has called finalize (as operation #2) while ranks 0 and 2 "
                                               "called barrier"));
    }
    EXPECT_EQ(outcomes[0]->record()->peer, 1);
    EXPECT_EQ(outcomes[1]->record()->peer, 0);
    EXPECT_EQ(outcomes[1]->record()->operation, "finalize");
}

TEST(Mismatch, OfTheCount) {
    for (const size_t size : {size_t{1}, size_t{2000}, size_t{50000}}) {
        expect_mismatch(2,
                        [&](auto& values, auto& tensors, int rank) -> Request {
                            tensors = {front(values, size + static_cast<size_t>(rank))};
                            return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
                        },
                        {"of " + std::to_string(size) + " f32", "of " + std::to_string(size + 1) + " f32"});
    }
}

TEST(Mismatch, OfTheDtype) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        Tensor tensor = front(values, 1000);
                        if (rank == 1) tensor.dtype = DType::i32;
                        tensors = {tensor};
                        return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
                    },
                    {"1000 f32", "1000 i32"});
}

TEST(Mismatch, OfTheOperation) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        tensors = {front(values, 1000)};
                        return {
                            Collective::all_reduce, {}, tensors, rank == 0 ? ReduceOp::sum : ReduceOp::max, -1, 0, {}};
                    },
                    {"(sum)", "(max)"});
}

TEST(Mismatch, OfTheRoot) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        tensors = {front(values, 1000)};
                        return {Collective::broadcast, {}, tensors, ReduceOp::none, rank, 0, {}};
                    },
                    {"root 0", "root 1"});
}

TEST(Mismatch, OfTheNumberOfTensors) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        if (rank == 0)
                            tensors = {front(values, 1000)};
                        else
                            tensors = {front(values, 400), front(values, 600, 400)};
                        return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
                    },
                    {"in 2 tensors"});
}

// Of the lists that are broadcast, gathered and reduced and scattered: rank 0 gives `one`, rank 1 `other` lengths, which together are
// the same. A tensor of a reduce_scatter or an all_gather has a part for each of the two ranks.
void expect_lists_named(const std::vector<size_t>& one, const std::vector<size_t>& other, const std::string& told) {
    for (const Collective collective : {Collective::broadcast, Collective::all_gather, Collective::reduce_scatter}) {
        SCOPED_TRACE(name_of(collective));
        expect_mismatch(2,
                        [&](auto& values, auto& tensors, int rank) -> Request {
                            const std::vector<size_t>& lengths = rank == 0 ? one : other;
                            size_t at = 0;
                            for (const size_t length : lengths)
                                tensors.push_back(front(values, length, at)), at += length;
                            if (collective == Collective::broadcast) {
                                return {.collective = collective, .outputs = tensors, .peer = 0};
                            }
                            for (const size_t length : lengths) {
                                tensors.push_back(front(values, 2 * length, at));
                                at += 2 * length;
                            }
                            const std::span<const Tensor> all(tensors);
                            const auto parts = all.first(lengths.size());
                            const auto wholes = all.last(lengths.size());
                            if (collective == Collective::all_gather) {
                                return {.collective = collective, .inputs = parts, .outputs = wholes};
                            }
                            return {.collective = collective, .inputs = wholes, .outputs = parts, .op = ReduceOp::sum};
                        },
                        {told});
    }
}

TEST(Mismatch, OfTheNumberOfTensorsOfOtherLists) {
    for (const size_t size : {size_t{100}, size_t{10000}}) {
        expect_lists_named({size, size}, {size / 2, size / 2, size}, "in 3 tensors");
    }
}

TEST(Mismatch, OfTheLengthOfOneTensorOfOtherLists) {
    for (const size_t size : {size_t{100}, size_t{10000}}) {
        expect_lists_named({size, size}, {size - 1, size + 1}, "lengths of individual tensors differ");
    }
}

TEST(Mismatch, OfTheLengthOfOneTensorOfAList) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        const size_t first = rank == 0 ? 400 : 500;
                        tensors = {front(values, first), front(values, 1000 - first, first)};
                        return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
                    },
                    {"lengths of individual tensors differ"});
}

TEST(Mismatch, OfGatheredLengths) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        static thread_local Tensor input;
                        input = front(values, 100);
                        tensors = {front(values, rank == 0 ? 100 : 200, 1000), front(values, 100, 5000)};
                        return {Collective::all_gather_v, {&input, 1}, tensors, ReduceOp::none, -1, 0, {}};
                    },
                    {"all_gather_v of 200 f32", "all_gather_v of 300 f32"});
}

TEST(Mismatch, OfABuffersSize) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        static_cast<void>(comm.allocate(size_t{100} + static_cast<size_t>(comm.rank())));
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(),
                    AllOf(HasSubstr("allocate of 100 bytes"), HasSubstr("rank 1 allocate of 101 bytes")));
    }
}

TEST(Mismatch, PoisonsTheCommunicator) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<float> values(10);
        const Tensor tensor = front(values, comm.rank() == 0 ? 10 : 5);
        EXPECT_THROW(comm.run(all_reduce(tensor)), Error);
        comm.run({});
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::aborted);
        ASSERT_TRUE(outcome->record()->cause);
        EXPECT_EQ(outcome->record()->cause->code, Code::mismatch);
    }
}

}  // namespace
}  // namespace tsr::testing
