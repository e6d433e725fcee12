// However a model is cut over ranks - by width, depth, data or all of them - it trains like that of one process: in f64 to
// eight digits after 50 steps; in f32 in each step's loss and gradients; a pipeline alone to the bit; and twice to the same
// bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "parallel/together/job.hpp"
#include "sampling.hpp"

namespace tsr::testing {
namespace {

// Relative to the number, or to the largest of the tensor if it is much smaller: sums of numbers of either sign lose digits.
template <class T>
void expect_close(std::span<const T> found, const std::vector<T>& expected, double tolerance, const std::string& what) {
    ASSERT_EQ(found.size(), expected.size()) << what;
    double largest = 0;
    for (const T number : expected) largest = std::max(largest, std::abs(static_cast<double>(number)));
    for (size_t i = 0; i < found.size(); ++i) {
        const auto wanted = static_cast<double>(expected[i]);
        EXPECT_NEAR(static_cast<double>(found[i]), wanted, tolerance * std::max(std::abs(wanted), largest / 10))
            << what << " " << i;
    }
}

class Together : public ::testing::TestWithParam<Cut> {};

TEST_P(Together, FiftyStepsAreThoseOfOneProcess) {
    constexpr int steps = 50;
    constexpr double tolerance = 1e-8;
    const Cut& cut = GetParam();
    const Trace<double> expected = train_alone<double>(cut.blocks(), steps, true);
    expect_all_well(run_ranks(cut.ranks(), test_options(), [&](Communicator& comm) {
        Job<double> job(comm, cut);
        for (size_t step = 0; step < steps; ++step) {
            const double loss = job.backward(Examples<double>(cut.blocks(), static_cast<int>(step)));
            EXPECT_NEAR(loss, expected.losses[step], tolerance * expected.losses[step]) << "step " << step;
            const double norm = job.adam().clip_grad_norm(clip_at, 2);
            EXPECT_NEAR(norm, expected.norms[step], tolerance * expected.norms[step]) << "step " << step;
            job.adam().step();
        }
        for (size_t p = 0; p < job.params(); ++p) {
            expect_close<double>(job.value(p), held_part(expected.values[steps][job.whole(p)], job.held(p)), tolerance,
                                 Chain<double>::name(job.whole(p)));
        }
    }));
}

// Each step begins with what the one process had.
TEST_P(Together, LossesAndGradientsOfF32AreThoseOfOneProcess) {
    constexpr int steps = 8;
    constexpr double tolerance = 1e-5;
    const Cut& cut = GetParam();
    const Trace<float> expected = train_alone<float>(cut.blocks(), steps, false);
    expect_all_well(run_ranks(cut.ranks(), test_options(), [&](Communicator& comm) {
        Job<float> job(comm, cut);
        for (size_t step = 0; step < steps; ++step) {
            job.take(expected, step);
            const double loss = job.backward(Examples<float>(cut.blocks(), static_cast<int>(step)));
            EXPECT_NEAR(loss, expected.losses[step], tolerance * expected.losses[step]) << "step " << step;
            for (size_t p = 0; p < job.params(); ++p) {
                expect_close<float>(job.grad(p), held_part(expected.grads[step][job.whole(p)], job.held(p)), tolerance,
                                    "gradient of " + Chain<float>::name(job.whole(p)));
            }
            job.adam().step();
            for (size_t p = 0; p < job.params(); ++p) {
                expect_close<float>(job.value(p), held_part(expected.values[step + 1][job.whole(p)], job.held(p)),
                                    tolerance, Chain<float>::name(job.whole(p)));
            }
        }
    }));
}

// Of a rank.
struct Bits {
    std::vector<double> losses;
    std::vector<std::vector<float>> values;

    bool operator==(const Bits&) const = default;
};

constexpr int few_steps = 5;

Bits bits_of(Communicator& comm, const Cut& cut) {
    Job<float> job(comm, cut);
    Bits bits;
    for (int step = 0; step < few_steps; ++step) {
        bits.losses.push_back(job.backward(Examples<float>(cut.blocks(), step)));
        if (cut.dp * cut.tp > 1) (void)job.adam().clip_grad_norm(clip_at, 2);
        job.adam().step();
    }
    for (size_t p = 0; p < job.params(); ++p) bits.values.emplace_back(job.value(p).begin(), job.value(p).end());
    return bits;
}

TEST_P(Together, ASecondRunHasTheSameBits) {
    const Cut& cut = GetParam();
    std::vector<Bits> first(static_cast<size_t>(cut.ranks()));
    for (const bool again : {false, true}) {
        expect_all_well(run_ranks(cut.ranks(), test_options(), [&](Communicator& comm) {
            Bits& kept = first[static_cast<size_t>(comm.rank())];
            const Bits bits = bits_of(comm, cut);
            if (!again) kept = bits;
            EXPECT_TRUE(bits == kept) << "rank " << comm.rank();
        }));
    }
}

constexpr std::array<const char*, 8> schedules{
    "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev", "zb_h2"};

// The schedules of one stage a rank have one here, the others two.
Cut pipeline_of(const std::string& schedule, int ranks, Data data = Data::alone) {
    Cut cut;
    cut.data = data;
    cut.pp = ranks;
    cut.schedule = *std::ranges::find(schedules, schedule);
    const bool is_one = schedule == "gpipe" || schedule == "1f1b" || schedule == "zb_h2";
    cut.per_rank = is_one ? 1 : 2;
    cut.microbatches = 2 * ranks;  // the 13 rows are no multiple
    return cut;
}

std::vector<Cut> pipelines() {
    std::vector<Cut> cuts;
    for (const char* schedule : schedules) {
        for (const int ranks : {2, 4}) cuts.push_back(pipeline_of(schedule, ranks));
    }
    return cuts;
}

std::vector<Cut> cuts_of_tensors() {
    std::vector<Cut> cuts;
    for (const int ranks : {2, 3, 4}) {
        for (const bool sequence : {false, true}) cuts.push_back({.tp = ranks, .sequence = sequence});
    }
    cuts.push_back({.tp = 2, .sequence = true, .batches = 2});
    return cuts;
}

Cut with(Cut cut, Data data, int dp, int tp, int microbatches = 0, bool sequence = true) {
    cut.data = data;
    cut.dp = dp;
    cut.tp = tp;
    cut.sequence = sequence && tp > 1;
    if (microbatches > 0) cut.microbatches = microbatches;
    return cut;
}

std::vector<Cut> mixtures() {
    std::vector<Cut> cuts;
    for (const Data data : {Data::ddp, Data::fsdp}) {
        for (const bool sequence : {false, true}) cuts.push_back(with({}, data, 2, 2, 1, sequence));
    }
    cuts.push_back(with({.batches = 2}, Data::ddp, 2, 2));
    cuts.push_back(with({}, Data::hsdp, 4, 2));
    cuts.push_back(with(pipeline_of("1f1b", 2), Data::ddp, 2, 1, 3));
    cuts.push_back(with(pipeline_of("zbv", 2), Data::fsdp, 2, 1));
    cuts.push_back(with(pipeline_of("interleaved_zero_bubble", 2), Data::alone, 1, 2, 0, false));
    cuts.push_back(with(pipeline_of("dualpipev", 2), Data::alone, 1, 2));
    for (const Data data : {Data::ddp, Data::fsdp}) cuts.push_back(with(pipeline_of("1f1b", 2), data, 2, 2, 3));
    cuts.push_back(with(pipeline_of("interleaved_1f1b", 2), Data::ddp, 2, 2));
    for (const char* schedule : {"1f1b", "zbv"}) {
        Cut twice = pipeline_of(schedule, 2);
        twice.batches = 2;
        cuts.push_back(twice);
    }
    return cuts;
}

const auto name_of = [](const auto& info) { return info.param.name(); };

INSTANTIATE_TEST_SUITE_P(Tensors, Together, ::testing::ValuesIn(cuts_of_tensors()), name_of);
INSTANTIATE_TEST_SUITE_P(Mixed, Together, ::testing::ValuesIn(mixtures()), name_of);
INSTANTIATE_TEST_SUITE_P(Pipelines, Together, ::testing::ValuesIn(pipelines()), name_of);

class PipelineAlone : public ::testing::TestWithParam<Cut> {};

// Each block's gradients of the weights are added in the order of the schedule.
TEST_P(PipelineAlone, HasTheBitsOfOneProcess) {
    const Cut& cut = GetParam();
    const pipeline::Schedule schedule = cut.order();
    const Passes passes{
        cut.microbatches, [&](int block) {
            std::vector<int> order;
            for (const auto& action :
                 schedule.orders[static_cast<size_t>(schedule.rank_of_stage[static_cast<size_t>(block)])]) {
                const bool adds =
                    action.work == pipeline::Work::backward || action.work == pipeline::Work::backward_weight;
                if (adds && action.stage == block) order.push_back(static_cast<int>(action.microbatch));
            }
            return order;
        }};
    const Trace<float> expected = train_alone<float>(cut.blocks(), few_steps, false, passes);
    expect_all_well(run_ranks(cut.ranks(), test_options(), [&](Communicator& comm) {
        Job<float> job(comm, cut);
        for (size_t step = 0; step < few_steps; ++step) {
            EXPECT_EQ(job.backward(Examples<float>(cut.blocks(), static_cast<int>(step))), expected.losses[step]);
            for (size_t p = 0; p < job.params(); ++p) {
                EXPECT_THAT(job.grad(p), ::testing::ElementsAreArray(expected.grads[step][job.whole(p)]))
                    << Chain<float>::name(job.whole(p));
            }
            job.adam().step();
        }
        for (size_t p = 0; p < job.params(); ++p) {
            EXPECT_THAT(job.value(p), ::testing::ElementsAreArray(expected.values[few_steps][job.whole(p)]))
                << Chain<float>::name(job.whole(p));
        }
    }));
}

INSTANTIATE_TEST_SUITE_P(Of, PipelineAlone, ::testing::ValuesIn(pipelines()), name_of);
INSTANTIATE_TEST_SUITE_P(WithOneReplica, PipelineAlone,
                         ::testing::Values(pipeline_of("1f1b", 2, Data::ddp), pipeline_of("zbv", 2, Data::ddp),
                                           pipeline_of("zb_h2", 2, Data::fsdp)),
                         name_of);

}  // namespace
}  // namespace tsr::testing
