#include "parallel/fsdp/gradient_scatter.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/clock.hpp"
#include "parallel/fsdp/unit_plan.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "soon.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::run_ranks;
using testing::shared;
using testing::test_options;

// Two units of a parameter each; the gradients of the second have another dtype than its shards.
std::shared_ptr<const FsdpPlan> two_units(const Communicator& comm) {
    auto plan = std::make_shared<FsdpPlan>();
    plan->ranks = comm.world_size();
    for (size_t u = 0; u < 2; ++u) {
        FsdpParam param;
        param.name = "w" + std::to_string(u);
        param.shape = Dims{640, 4};
        param.grad_dtype = u == 0 ? DType::f32 : DType::bf16;
        param.unit = u;
        plan->params.push_back(param);
        UnitPlan unit;
        unit.name = "unit" + std::to_string(u);
        unit.params = {u};
        plan->units.push_back(unit);
    }
    lay_out(*plan, comm.rank());
    return plan;
}

TEST(GradientScatter, TakesMemoryBesideGradientsAndShardsOnlyForWhatIsConvertedOrAdded) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        const auto plan = two_units(comm);
        const auto shards = comm.allocate(plan->shard_grad_size);
        const auto scratch_of = [&](size_t unit, bool add) {
            GradientScatter scatter(shared(comm), nullptr, plan, {}, {shards, shards->data()});
            const auto grads = comm.allocate(plan->units[unit].grad_size);
            comm.submit_job([&] { scatter.reduce(unit, grads->data(), add); })->wait(testing::soon());
            return scatter.scratch_size();
        };
        const auto chunk = static_cast<size_t>(plan->units[0].pieces[0].chunk);
        EXPECT_EQ(scratch_of(0, false), 0U) << "straight into the shard";
        EXPECT_GE(scratch_of(0, true), chunk * size_of(DType::f32));
        EXPECT_GE(scratch_of(1, false), chunk * size_of(DType::bf16));
    }));
}

}  // namespace
}  // namespace tsr
