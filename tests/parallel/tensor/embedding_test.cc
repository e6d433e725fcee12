#include "parallel/tensor/embedding.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parallel/tensor/helpers.hpp"

namespace tsr {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t features = 3;

struct Case {
    int64_t words;
    TpStyle style;
};

TensorParallel model_of(Communicator& comm, std::vector<double>& weight, int64_t words, TpStyle style) {
    const NamedTensor param{"tok.weight", tensor_of_shape(weight, Dims{words, features})};
    const TpRule rule{"tok", style, 0, {}};
    return {mesh_of(comm), {&param, 1}, {&rule, 1}, {}};
}

Tensor ids_of(std::vector<int64_t>& ids, const Dims& shape) {
    return {reinterpret_cast<std::byte*>(ids.data()), shape, DType::i64, {}};
}

class TpEmbedding : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TpEmbedding, ::testing::Values(1, 2, 3, 4));

// Ids at the borders of all slices, repeated ones, fewer words than ranks, and an embedding that every rank has.
TEST_P(TpEmbedding, LooksUpAndAddsGradientsLikeOneRank) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        const int n = comm.world_size();
        for (const Case& one :
             {Case{13, TpStyle::vocabulary}, Case{2, TpStyle::vocabulary}, Case{5, TpStyle::replicate}}) {
            std::vector<double> weight = random_numbers(1, static_cast<size_t>(one.words * features));
            const std::vector<double> original = weight;
            TensorParallel tp = model_of(comm, weight, one.words, one.style);
            std::vector<int64_t> ids;
            for (int rank = 0; rank < n; ++rank) {
                const Range range = chunk(one.words, n, rank);
                if (range.begin < range.end) ids.insert(ids.end(), {range.begin, range.end - 1});
            }
            ids.resize(8, one.words - 1);
            const Tensor tensor = ids_of(ids, Dims{2, 4});
            const Dims whole{2, 4, features};
            std::vector<double> expected;
            for (const int64_t id : ids) {
                for (int64_t f = 0; f < features; ++f)
                    expected.push_back(original[static_cast<size_t>(id * features + f)]);
            }
            std::vector<double> dout = random_numbers(2, expected.size());
            std::vector<double> dweight(original.size(), 1);  // gradients are added
            for (size_t i = 0; i < dout.size(); ++i) {
                dweight[static_cast<size_t>(ids[i / features] * features) + i % features] += dout[i];
            }
            for (const int dim : {-1, 0, 1, 2}) {
                SCOPED_TRACE(::testing::Message() << one.words << " words along " << dim);
                const Dims own = dim < 0 ? whole : part_shape(whole, dim, n, comm.rank());
                std::vector<double> out;
                embed(tp, 0, tensor, tensor_of_shape(out, own), dim, nullptr, nullptr);
                EXPECT_EQ(out, dim < 0 ? expected : part_of(expected, whole, dim, n, comm.rank()));
                std::vector<double> grad = dim < 0 ? dout : part_of(dout, whole, dim, n, comm.rank());
                std::vector<double> sum(static_cast<size_t>(tp.slice_shape(0).product()), 1);
                embed_backward(tp, 0, tensor, tensor_of_shape(grad, own), dim, tensor_of_shape(sum, tp.slice_shape(0)),
                               nullptr, nullptr);
                EXPECT_EQ(sum, one.style == TpStyle::replicate
                                   ? dweight
                                   : part_of(dweight, Dims{one.words, features}, 0, n, comm.rank()));
            }
        }
    }));
}

TEST(TpEmbedding, BadIdsAndParametersAreRefusedBeforeAnythingIsSent) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<double> weight = random_numbers(1, 4 * features);
        TensorParallel tp = model_of(comm, weight, 4, TpStyle::vocabulary);
        std::vector<double> out(2 * features);
        const Tensor to = tensor_of_shape(out, Dims{2, features});
        const auto refusal = [&](std::vector<int64_t> ids, TensorParallel& model) -> std::string {
            try {
                embed(model, 0, ids_of(ids, Dims{2}), to, -1, nullptr, nullptr);
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), Code::invalid_argument);
                return error.what();
            }
            return "accepted";
        };
        EXPECT_THAT(refusal({0, 4}, tp), AllOf(HasSubstr("id 4 at position 1"), HasSubstr("0 to 3")));
        EXPECT_THAT(refusal({-1, 0}, tp), HasSubstr("id -1 at position 0"));
        EXPECT_EQ(refusal({0, 3}, tp), "accepted");  // the ranks are still together
        const NamedTensor other{"tok.weight", tensor_of_shape(weight, Dims{4, features})};
        const TpRule rule{"tok", TpStyle::row, 0, {}};
        TensorParallel cut(mesh_of(comm), {&other, 1}, {&rule, 1}, {});
        EXPECT_THAT(refusal({0, 3}, cut), AllOf(HasSubstr("tok.weight"), HasSubstr("not an embedding")));
    }));
}

}  // namespace
}  // namespace tsr
