// A number that the ranks compare in the messages of a step.
#include <gtest/gtest.h>

#include <vector>

#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::run_ranks;
using testing::shared;
using testing::test_options;

// Each bit alone shows a difference, of one rank from the others and of the others from it, in every dtype.
TEST(DdpCompare, FindsEveryBitInEveryDtype) {
    for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
        for (const ReduceOp op : {ReduceOp::avg, ReduceOp::sum}) {
            expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
                std::vector<double> memory(8);
                const Tensor param{reinterpret_cast<std::byte*>(memory.data()), Dims{7}, dtype, {}};
                DdpOptions options;
                options.op = op;
                options.compares = true;
                options.pre_divide = op == ReduceOp::avg ? 3 : 1;
                Ddp ddp(shared(comm), {{"w", param}}, options);
                const uint64_t number = 0x8000'0000'dead'beef;
                const auto agreed = [&](uint64_t own) {
                    ddp.compare(own);
                    ddp.ready_all();
                    ddp.wait();
                    return ddp.ranks_agreed();
                };
                EXPECT_TRUE(agreed(number));
                for (int bit = 0; bit < 64; ++bit) {
                    EXPECT_FALSE(agreed(comm.rank() == bit % 3 ? number ^ uint64_t{1} << bit : number)) << bit;
                }
                EXPECT_TRUE(agreed(0));
            }));
        }
    }
}

TEST(DdpCompare, LeavesGradientsAsTheyAre) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        testing::Model model = testing::three_layers();
        model.add("nothing", {0});
        DdpOptions options;
        options.compares = true;
        options.bucket_bytes = options.first_bucket_bytes = 64;
        options.rebuild_buckets = true;
        options.reduce_dtype = DType::f64;
        Ddp ddp(shared(comm), model.params(), options);
        for (int step = 0; step < 3; ++step) {
            ddp.zero_grad();
            ddp.compare(static_cast<uint64_t>(step + (step == 1 ? comm.rank() : 0)));
            for (size_t i = 0; i < ddp.params().size(); ++i) {
                for (float& g : ddp.grad(i).as<float>()) g = static_cast<float>(comm.rank() + step);
                ddp.ready(i);
            }
            ddp.wait();
            EXPECT_EQ(ddp.ranks_agreed(), step != 1);
            for (size_t i = 0; i < ddp.params().size(); ++i) {
                for (const float g : ddp.grad(i).as<float>()) ASSERT_EQ(g, 0.5F + static_cast<float>(step));
            }
        }
    }));
}

}  // namespace
}  // namespace tsr
