#include "parallel/tensor/regions.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "parallel/tensor/helpers.hpp"

namespace tsr {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<double> summand(int rank, size_t count) { return random_numbers(100 + static_cast<uint64_t>(rank), count); }

// The summands of all ranks, added in rank order.
std::vector<double> sum_of_all(int ranks, size_t count) {
    std::vector<double> sum(count, 0);
    for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<double> own = summand(rank, count);
        for (size_t i = 0; i < count; ++i) sum[i] += own[i];
    }
    return sum;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-14) << i;
}

class TpMovesOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TpMovesOf, ::testing::Values(1, 2, 3, 4));

// Every dimension of shapes that divide, that do not, and of which some ranks have nothing.
TEST_P(TpMovesOf, GatherAndReduceScatterAlongAnyDimension) {
    const std::vector<Dims> shapes{{12, 4}, {5, 7}, {2, 3, 12}, {3, 1, 5}, {4, 0, 2}, {13}};
    expect_all_well(run_ranks(GetParam(), test_options(), [&](Communicator& comm) {
        const auto shared = comm.split(0, comm.rank(), comm.options());
        TpMoves moves(shared);
        const int n = comm.world_size();
        for (const Dims& shape : shapes) {
            for (int dim = 0; dim < shape.ndim(); ++dim) {
                SCOPED_TRACE(::testing::Message() << shape.str() << " along " << dim << " of " << n << " ranks");
                const auto count = static_cast<size_t>(shape.product());
                const Dims own_shape = part_shape(shape, dim, n, comm.rank());
                std::vector<double> whole = random_numbers(7, count);
                std::vector<double> part = part_of(whole, shape, dim, n, comm.rank());
                std::vector<double> gathered(count, -1);
                moves.gather(tensor_of_shape(part, own_shape), tensor_of_shape(gathered, shape), dim, nullptr);
                EXPECT_EQ(gathered, whole);

                std::vector<double> cut(part.size(), -1);
                moves.split(tensor_of_shape(whole, shape), tensor_of_shape(cut, own_shape), dim, nullptr);
                EXPECT_EQ(cut, part);

                std::vector<double> own = summand(comm.rank(), count);
                std::vector<double> reduced(part.size(), -1);
                moves.sum_scatter(tensor_of_shape(own, shape), tensor_of_shape(reduced, own_shape), dim, nullptr);
                expect_near(reduced, part_of(sum_of_all(n, count), shape, dim, n, comm.rank()));
                EXPECT_EQ(own, summand(comm.rank(), count));  // the input is left alone

                std::vector<double> total(count, -1);
                moves.sum(tensor_of_shape(own, shape), tensor_of_shape(total, shape), nullptr);
                expect_near(total, sum_of_all(n, count));
            }
        }
    }));
}

// <gather x, y> = <x, reduce-scatter y>, summed over the ranks: each is the other's adjoint.
TEST_P(TpMovesOf, GatherAndReduceScatterAreAdjoint) {
    const Dims shape{3, 7, 2};
    expect_all_well(run_ranks(GetParam(), test_options(), [&](Communicator& comm) {
        const auto shared = comm.split(0, comm.rank(), comm.options());
        TpMoves moves(shared);
        const int n = comm.world_size();
        const Dims own_shape = part_shape(shape, 1, n, comm.rank());
        std::vector<double> x =
            random_numbers(50 + static_cast<uint64_t>(comm.rank()), static_cast<size_t>(own_shape.product()));
        std::vector<double> y = summand(comm.rank(), static_cast<size_t>(shape.product()));
        std::vector<double> gathered;
        std::vector<double> scattered;
        moves.gather(tensor_of_shape(x, own_shape), tensor_of_shape(gathered, shape), 1, nullptr);
        moves.sum_scatter(tensor_of_shape(y, shape), tensor_of_shape(scattered, own_shape), 1, nullptr);
        std::vector<double> products(2, 0);
        for (size_t i = 0; i < y.size(); ++i) products[0] += gathered[i] * y[i];
        for (size_t i = 0; i < x.size(); ++i) products[1] += x[i] * scattered[i];
        moves.sum(tensor_of_shape(products, Dims{2}), tensor_of_shape(products, Dims{2}), nullptr);
        EXPECT_NEAR(products[0], products[1], 1e-12);
    }));
}

// Jobs that share the scratch memory, and synchronous calls between them, keep their order.
TEST(TpQueue, RunsInTheOrderOfTheCalls) {
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        TpQueue queue(comm.split(0, comm.rank(), comm.options()));
        const int n = comm.world_size();
        const Dims shape{4, 8};
        const Dims own_shape = part_shape(shape, 1, n, comm.rank());
        constexpr size_t rounds = 20;
        std::vector<std::vector<double>> parts(rounds);
        std::vector<std::vector<double>> wholes(rounds);
        std::vector<WorkPtr> works(rounds);
        for (size_t i = 0; i < rounds; ++i) {
            parts[i] = part_of(random_numbers(i, 32), shape, 1, n, comm.rank());
            const Tensor in = tensor_of_shape(parts[i], own_shape);
            const Tensor out = tensor_of_shape(wholes[i], shape);
            queue.run([=](TpMoves& moves, StreamHandle on) { moves.gather(in, out, 1, on); }, nullptr, {},
                      i % 7 == 6 ? nullptr : &works[i]);
            if (i % 7 == 6) {
                EXPECT_EQ(wholes[i - 1], random_numbers(i - 1, 32));
            }
        }
        for (const WorkPtr& work : works) {
            if (work) work->wait(soon());
        }
        for (size_t i = 0; i < rounds; ++i) EXPECT_EQ(wholes[i], random_numbers(i, 32)) << i;
    }));
}

// A rank that comes late still finds what its peers have left, while they go on, with other sizes and directions.
TEST(TpMoves, ALateRankReadsWhatBelongsToItsCall) {
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        TpMoves moves(comm.split(0, comm.rank(), comm.options()));
        const int n = comm.world_size();
        for (int i = 0; i < 60; ++i) {
            for (int k = 0; (i + comm.rank()) % 3 == 0 && k < 200; ++k) std::this_thread::yield();
            const Dims shape{4, 40 - i % 7 + (i > 30 ? 3000 : 0)};  // grows once
            const auto count = static_cast<size_t>(shape.product());
            const Dims own_shape = part_shape(shape, 1, n, comm.rank());
            std::vector<double> whole = random_numbers(static_cast<uint64_t>(i), count);
            std::vector<double> part = part_of(whole, shape, 1, n, comm.rank());
            if (i % 3 == 2) {
                std::vector<double> reduced(part.size(), -1);
                moves.sum_scatter(tensor_of_shape(whole, shape), tensor_of_shape(reduced, own_shape), 1, nullptr);
                for (double& number : part) number = number + number + number;
                EXPECT_EQ(reduced, part) << i;
            } else {
                std::vector<double> gathered(count, -1);
                moves.gather(tensor_of_shape(part, own_shape), tensor_of_shape(gathered, shape), 1, nullptr);
                EXPECT_EQ(gathered, whole) << i;
            }
        }
    }));
}

TEST(TpMoves, RanksWhoseShapesDifferAreTold) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        TpMoves moves(comm.split(0, comm.rank(), comm.options()));
        const Dims shape{2, comm.rank() == 0 ? 6 : 8};
        std::vector<double> part(static_cast<size_t>(shape.product() / 2));
        std::vector<double> whole(static_cast<size_t>(shape.product()));
        moves.gather(tensor_of_shape(part, part_shape(shape, 1, 2, comm.rank())), tensor_of_shape(whole, shape), 1,
                     nullptr);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), AllOf(HasSubstr("gather"), HasSubstr("6"), HasSubstr("8")));
    }
}

TEST(TpMoves, MemoryThatIsNotAlignedIsRefused) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        TpMoves moves(comm.split(0, comm.rank(), comm.options()));
        std::vector<double> memory(20);
        Tensor out = tensor_of_shape(memory, {2, 4});
        out.data += 4;
        std::vector<double> whole(16);
        moves.sum_scatter(tensor_of_shape(whole, {2, 8}), out, 1, nullptr);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::invalid_argument);
        EXPECT_THAT(outcome->what(), HasSubstr("not aligned"));
    }
}

TEST(TpMoves, ShapesThatDoNotBelongTogetherAreRefused) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        const auto shared = comm.split(0, comm.rank(), comm.options());
        TpMoves moves(shared);
        std::vector<double> a;
        std::vector<double> b;
        const auto refusal = [&](const Dims& in, const Dims& out, int dim) -> std::string {
            try {
                moves.gather(tensor_of_shape(a, in), tensor_of_shape(b, out), dim, nullptr);
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), Code::invalid_argument);
                return error.what();
            }
            return "accepted";
        };
        EXPECT_THAT(refusal({4, 8}, {4, 8}, 1),  // a whole activation where a part belongs
                    AllOf(HasSubstr("[4, 8]"), HasSubstr("must be [4, 4]"), HasSubstr("along dimension 1")));
        EXPECT_THAT(refusal({4, 4}, {4, 8}, 2), HasSubstr("no dimension 2"));
        EXPECT_THAT(refusal({4, 4}, {4, 8}, -1), HasSubstr("no dimension -1"));
        Tensor other = tensor_of_shape(a, {4, 4});
        other.dtype = DType::i64;
        EXPECT_THROW(moves.copy(other, tensor_of_shape(b, {4, 4}), nullptr), Error);
        EXPECT_THROW(moves.sum(tensor_of_shape(a, {4, 4}), tensor_of_shape(b, {16}), nullptr), Error);
        int stream = 0;
        EXPECT_THROW(moves.copy(tensor_of_shape(a, {4}), tensor_of_shape(b, {4}), &stream), Error);
    });
    expect_all_well(outcomes);
}

}  // namespace
}  // namespace tsr
