#include "parallel/tensor/plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

NamedTensor param(const std::string& name, const Dims& shape) { return {name, {nullptr, shape, DType::f32, {}}}; }

TpRule rule(const std::string& pattern, TpStyle style, int dim = 0) { return {pattern, style, dim, {}, 0}; }
TpRule in_heads(const std::string& pattern, TpStyle style, int heads) { return {pattern, style, 0, {}, heads}; }

// The error of a plan, which must be INVALID_ARGUMENT.
std::string refusal(const std::vector<NamedTensor>& params, const std::vector<TpRule>& rules, int ranks = 2) {
    try {
        (void)plan_slices(params, rules, ranks, false);
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        return error.what();
    }
    ADD_FAILURE() << "the plan was accepted";
    return {};
}

TEST(TpPlan, StylesCutWeightsAndBiases) {
    const std::vector<NamedTensor> params{param("tok.weight", {13, 8}),
                                          param("l.0.attn.wq.weight", {8, 6}),
                                          param("l.0.attn.wq.bias", {8}),
                                          param("l.0.attn.wo.weight", {6, 8}),
                                          param("l.0.attn.wo.bias", {6}),
                                          param("l.0.norm.weight", {6}),
                                          param("other", {3})};
    const std::vector<TpRule> rules{rule("tok", TpStyle::vocabulary), rule("l.*.attn.w[qkv]", TpStyle::column),
                                    rule("l.*.attn.wo", TpStyle::row), rule("l.*.norm", TpStyle::sequence)};
    const std::vector<TpParam> plan = plan_slices(params, rules, 4, true);
    EXPECT_EQ(plan[0].cut, 0);
    EXPECT_EQ(plan[0].slice_shape(0), (Dims{4, 8}));
    EXPECT_EQ(plan[0].slice_shape(3), (Dims{1, 8}));
    EXPECT_EQ(plan[1].slice_shape(1), (Dims{2, 6}));
    EXPECT_EQ(plan[2].slice_shape(1), (Dims{2}));
    EXPECT_EQ(plan[3].cut, 1);
    EXPECT_EQ(plan[3].slice_shape(2), (Dims{6, 2}));
    EXPECT_EQ(plan[4].cut, -1);
    EXPECT_TRUE(plan[4].sums_grad);
    EXPECT_TRUE(plan[5].sums_grad);
    EXPECT_EQ(plan[5].cut, -1);
    EXPECT_EQ(plan[6].style, TpStyle::replicate);
    EXPECT_FALSE(plan[6].sums_grad);
    EXPECT_FALSE(plan_slices(params, rules, 4, false)[4].sums_grad);
}

TEST(TpPlan, MoreRanksThanRowsLeaveEmptySlices) {
    const std::vector<TpParam> plan =
        plan_slices(std::vector{param("w", {3, 2})}, std::vector{rule("w", TpStyle::column)}, 4, false);
    EXPECT_EQ(plan[0].slice_shape(2), (Dims{1, 2}));
    EXPECT_EQ(plan[0].slice_shape(3), (Dims{0, 2}));
    EXPECT_TRUE(plan[0].boxes(3).empty());
}

TEST(TpPlan, APatternStaysWithinAPart) {
    EXPECT_THAT(refusal({param("a.b.weight", {2, 2})}, {rule("*", TpStyle::column)}),
                AllOf(HasSubstr("\"*\""), HasSubstr("\"a.b.weight\"")));
    EXPECT_EQ(
        plan_slices(std::vector{param("a.b.weight", {2, 2})}, std::vector{rule("*.b", TpStyle::column)}, 2, false)[0]
            .cut,
        0);
}

TEST(TpPlan, AllPatternsThatMatchNothingAreListed) {
    const std::string text =
        refusal({param("fc1.weight", {4, 4}), param("fc2.weight", {4, 4})},
                {rule("fc1", TpStyle::column), rule("fc3", TpStyle::row), rule("fc4.*", TpStyle::row)});
    EXPECT_THAT(text, AllOf(HasSubstr("2 patterns"), HasSubstr("\"fc3\""), HasSubstr("\"fc4.*\""),
                            HasSubstr("\"fc1.weight\""), Not(HasSubstr("\"fc1\""))));
}

TEST(TpPlan, AParameterThatTwoPatternsMatchIsNamed) {
    EXPECT_THAT(
        refusal({param("fc1.weight", {4, 4})}, {rule("fc1", TpStyle::column), rule("fc?.weight", TpStyle::row)}),
        AllOf(HasSubstr("\"fc1.weight\""), HasSubstr("\"fc1\""), HasSubstr("\"fc?.weight\"")));
}

TEST(TpPlan, AStyleThatAParameterCannotHaveIsRefused) {
    EXPECT_THAT(refusal({param("tok.weight", {4})}, {rule("tok", TpStyle::vocabulary)}),
                AllOf(HasSubstr("\"tok.weight\" [4]"), HasSubstr("vocabulary"), HasSubstr("needs 2")));
    EXPECT_THAT(refusal({param("s", {})}, {rule("s", TpStyle::column)}), HasSubstr("0 dimensions"));
    EXPECT_THAT(refusal({param("w", {4, 4})}, {rule("w", TpStyle::shard, 2)}), HasSubstr("no dimension 2"));
    EXPECT_THAT(refusal({param("w", {4, 4})}, {rule("w", TpStyle::shard, -1)}), HasSubstr("no dimension -1"));
    EXPECT_THAT(refusal({param("w", {4, 4})}, {rule("w", TpStyle::layout)}), HasSubstr("no layout"));
    EXPECT_THAT(refusal({param("w", {4, 4})}, {rule("w", static_cast<TpStyle>(9))}), HasSubstr("style 9"));
}

TEST(TpPlan, HeadsThatTheRanksDoNotDivideAreNamed) {
    const std::vector<NamedTensor> params{param("attn.wq.weight", {12, 6}), param("attn.wq.bias", {12}),
                                          param("attn.wo.weight", {6, 12}), param("attn.wo.bias", {6})};
    const auto plan = plan_slices(
        params, std::vector<TpRule>{in_heads("attn.wq", TpStyle::column, 4), in_heads("attn.wo", TpStyle::row, 4)}, 2,
        false);
    EXPECT_EQ(plan[0].slice_shape(1), (Dims{6, 6}));
    EXPECT_EQ(plan[1].slice_shape(0), (Dims{6}));
    EXPECT_EQ(plan[2].slice_shape(1), (Dims{6, 6}));
    EXPECT_EQ(plan[3].slice_shape(1), (Dims{6})) << "the bias of a row has no heads";
    // 12 rows divide over 3 ranks, but between heads only over 1, 2 and 4.
    EXPECT_THAT(refusal(params, {in_heads("attn.wq", TpStyle::column, 4)}, 3),
                AllOf(HasSubstr("\"attn.wq.weight\" [12, 6]"), HasSubstr("4 heads do not divide over 3 ranks")));
    EXPECT_THAT(refusal(params, {in_heads("attn.wo", TpStyle::row, 2)}, 4),
                AllOf(HasSubstr("\"attn.wo.weight\""), HasSubstr("2 heads do not divide over 4 ranks")));
    EXPECT_THAT(refusal(params, {in_heads("attn.wq", TpStyle::column, 5)}, 5),
                HasSubstr("dimension 0 has 12 elements, which do not divide into 5 heads"));
}

// q, k and v in one weight of 3 x 4 rows: each rank has its half of each.
TEST(TpPlan, ALayoutCutsWeightsThatJoinSeveral) {
    std::vector<Box> boxes;
    for (const int64_t rank : {0, 1}) {
        for (const int64_t part : {0, 1, 2}) boxes.push_back({Dims{part * 4 + rank * 2, 0}, Dims{2, 5}});
    }
    const TpRule fused{"qkv", TpStyle::layout, 0, Layout::from_boxes(Dims{12, 5}, boxes, std::vector{3, 3})};
    const std::vector<TpParam> plan =
        plan_slices(std::vector{param("qkv.weight", {12, 5})}, std::vector{fused}, 2, false);
    EXPECT_EQ(plan[0].cut, 0);
    EXPECT_EQ(plan[0].slice_shape(1), (Dims{6, 5}));
    std::vector<int64_t> begins;
    for (const Range& range : plan[0].ranges(1)) begins.push_back(range.begin);
    EXPECT_THAT(begins, ElementsAre(2, 6, 10));
    EXPECT_EQ(plan[0].replica(1), 0);
}

TEST(TpPlan, ALayoutThatIsNotOneOfSlicesIsRefused) {
    const auto with = [](const Layout& layout) {
        return refusal({param("w", {4, 4})}, {TpRule{"w", TpStyle::layout, 0, layout}});
    };
    const std::vector<Placement> both{Placement::shard(0), Placement::shard(1)};
    EXPECT_THAT(with(Layout::placed(Dims{4, 4}, std::vector{2, 1}, both).of_shape(Dims{5, 4})), HasSubstr("[5, 4]"));
    EXPECT_THAT(with(Layout::replicated(Dims{4, 4}, 3)), HasSubstr("over 3 ranks"));
    const std::vector<Box> corners{{Dims{0, 0}, Dims{2, 2}}, {Dims{2, 2}, Dims{2, 2}}};
    EXPECT_THAT(with(Layout::from_boxes(Dims{4, 4}, corners, std::vector{1, 1})), HasSubstr("more than one dimension"));
    const std::vector<Box> half{{Dims{0, 0}, Dims{2, 4}}, {Dims{0, 0}, Dims{2, 4}}};
    EXPECT_THAT(with(Layout::from_boxes(Dims{4, 4}, half, std::vector{1, 1})), HasSubstr("leaves out 2 of 4"));
    const std::vector<Box> columns{
        {Dims{0, 0}, Dims{4, 1}}, {Dims{0, 2}, Dims{4, 1}}, {Dims{0, 1}, Dims{4, 1}}, {Dims{0, 3}, Dims{4, 1}}};
    EXPECT_THAT(with(Layout::from_boxes(Dims{4, 4}, columns, std::vector{2, 2})), HasSubstr("along dimension 0 only"));
}

}  // namespace
}  // namespace tsr
