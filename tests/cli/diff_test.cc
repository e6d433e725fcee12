// `tessera ckpt diff`: what differs, where and how much, between checkpoints of different world sizes.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "cli/command.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

class Diff : public ::testing::TestWithParam<int> {
   protected:
    TempDir dir_;
    std::string a_ = dir_ / "a";
    std::string b_ = dir_ / "b";
    std::string both_ = a_ + " " + b_;
};

TEST_P(Diff, OtherWorldSizesAreNoDifference) {
    save_numbers(a_, 1);
    save_numbers(b_, GetParam());
    const Json json = json_of("diff --json " + both_);
    EXPECT_TRUE(json.at("same").as_bool());
    EXPECT_EQ(json.at("compared").as_int(), 6);
    EXPECT_THAT(tessera("diff " + both_).output, HasSubstr("no difference in 6 tensors"));
}

TEST_P(Diff, ElementsAreToldWithPlaceAndSize) {
    Numbers numbers;
    save_numbers(a_, 2, numbers);
    numbers.grid = [](int64_t i) {
        return static_cast<float>(i) + (i == 13 ? 0.5F : i == 20 ? -4.0F : i == 34 ? 1.0F : 0.0F);
    };
    numbers.values = {{"epoch", Json(int64_t{4})}, {"new", Json(true)}};
    save_numbers(b_, GetParam(), numbers);
    const Json json = json_of("diff --json " + both_, 1);
    EXPECT_FALSE(json.at("same").as_bool());
    ASSERT_EQ(json.at("tensors").as_array().size(), 1u);
    const Json& grid = json.at("tensors").as_array()[0];
    EXPECT_EQ(grid.at("name").as_string(), "grid");
    EXPECT_EQ(grid.at("differing").as_int(), 3);
    EXPECT_EQ(grid.at("count").as_int(), 35);
    EXPECT_EQ(grid.at("max_abs").as_double(), 4);
    EXPECT_EQ(grid.at("where").dump(), "[4,0]");
    EXPECT_EQ(grid.at("a").as_double(), 20);
    EXPECT_EQ(grid.at("b").as_double(), 16);
    EXPECT_DOUBLE_EQ(grid.at("mean_abs").as_double(), 5.5 / 35);
    EXPECT_DOUBLE_EQ(grid.at("max_rel").as_double(), 4.0 / 20);
    EXPECT_EQ(json.at("values").as_array()[0].at("b").as_int(), 4);
    EXPECT_EQ(json.at("only_in_b").dump(), "[\"new\"]");
    const Result text = tessera("diff " + both_);
    EXPECT_EQ(text.code, 1);
    EXPECT_THAT(text.output, HasSubstr("grid  f32 [7, 5]: 3 of 35 differ, max abs 4 at [4, 0] (20.0 in A, 16.0 in B)"));
    EXPECT_THAT(text.output, HasSubstr("epoch: 3 in A, 4 in B\n"));

    EXPECT_EQ(json_of("diff --json --atol 1 " + both_, 1).at("tensors").as_array()[0].at("differing").as_int(), 1);
    EXPECT_TRUE(json_of("diff --json --atol 1 --rtol 0.1875 " + both_, 1).at("tensors").as_array().empty());
}

TEST_F(Diff, WhatCannotBeReadIsNoSameness) {
    const std::string a = dir_ / "a.safetensors";
    const std::string b = dir_ / "b.safetensors";
    save_unreadable(a, 2);
    save_unreadable(b, 2);
    const Json json = json_of("diff --json " + a + " " + b, 2);
    EXPECT_TRUE(json.at("same").is(Json::Kind::null));
    EXPECT_EQ(json.at("compared").as_int(), 1);
    const Json& odd = json.at("unreadable").as_array().at(0);
    EXPECT_EQ(odd.at("name").as_string(), "odd");
    EXPECT_THAT(odd.at("a").as_string(), HasSubstr("F6_E3M2"));
    EXPECT_THAT(odd.at("b").as_string(), HasSubstr("F6_E3M2"));
    const Result text = tessera("diff " + a + " " + b);
    EXPECT_EQ(text.code, 2);
    EXPECT_THAT(text.output, HasSubstr("odd: not compared, A and B cannot be read: dtype F6_E3M2"));
    EXPECT_THAT(text.output, HasSubstr("no difference in 1 tensor, 8 B; 1 not compared"));

    save_unreadable(b, 3, "more");
    const Result other = tessera("diff " + a + " " + b);
    EXPECT_EQ(other.code, 1);
    EXPECT_THAT(other.output, HasSubstr("B only: more\n"));
    EXPECT_THAT(other.output, HasSubstr("w  f32 [2]: 1 of 2 differ"));
    EXPECT_THAT(other.output, HasSubstr("odd: not compared"));
}

TEST_F(Diff, NumbersAreAsShortAsReadsBackAsTheirDtype) {
    Numbers numbers;
    numbers.grid = [](int64_t) { return 0.1F; };
    numbers.values = {{"rate", Json(static_cast<double>(0.001F))},
                      {"betas", parse_value(R"({"~":"tuple","v":[0.9,0.25]})", "")}};
    save_numbers(a_, 1, numbers);
    numbers.grid = [](int64_t) { return 16777216.0F; };
    numbers.values = {{"rate", Json(0.002)},
                      {"betas", parse_value(R"({"~":"tuple","v":[1.0,{"~":"double","v":"nan"}]})", "")}};
    save_numbers(b_, 1, numbers);
    const std::string text = tessera("diff " + both_).output;
    EXPECT_THAT(text, HasSubstr("(0.1 in A, 16777216.0 in B)"));
    EXPECT_THAT(text, HasSubstr("rate: 0.001 in A, 0.002 in B\n"));
    EXPECT_THAT(text, HasSubstr("betas: (0.9, 0.25) in A, (1.0, nan) in B\n"));
    EXPECT_EQ(json_of("diff --json " + both_, 1).at("tensors").as_array()[0].at("a").as_double(), double{0.1F})
        << "JSON is exact";
}

INSTANTIATE_TEST_SUITE_P(Worlds, Diff, ::testing::Values(1, 2, 3));

TEST_F(Diff, NaNEqualsNaNAndNothingElse) {
    Numbers numbers;
    numbers.grid = [](int64_t i) {
        return i == 0 ? std::nanf("") : i == 1 ? std::numeric_limits<float>::infinity() : 1.0F;
    };
    save_numbers(a_, 1, numbers);
    save_numbers(b_, 2, numbers);
    EXPECT_TRUE(json_of("diff --json " + both_).at("same").as_bool());
    numbers.grid = [](int64_t i) { return i == 1 ? std::numeric_limits<float>::infinity() : 1.0F; };
    const std::string c = dir_ / "c";
    save_numbers(c, 2, numbers);
    const Json grid = json_of("diff --json --atol 1e30 " + a_ + " " + c, 1).at("tensors").as_array()[0];
    EXPECT_EQ(grid.at("differing").as_int(), 1);
    EXPECT_EQ(grid.at("max_abs").at("v").as_string(), "inf");
    EXPECT_EQ(grid.at("a").at("v").as_string(), "nan");
}

TEST_F(Diff, IntegersAreComparedExactly) {
    Numbers numbers;
    numbers.columns = [](int64_t i) { return std::numeric_limits<int64_t>::max() - i; };
    save_numbers(a_, 1, numbers);
    numbers.columns = [](int64_t i) { return std::numeric_limits<int64_t>::max() - i - (i == 9 ? 1 : 0); };
    save_numbers(b_, 3, numbers);
    const Json columns = json_of("diff --json " + both_, 1).at("tensors").as_array().at(0);
    EXPECT_EQ(columns.at("differing").as_int(), 1);
    EXPECT_EQ(columns.at("max_abs").as_double(), 1);
    EXPECT_EQ(columns.at("where").dump(), "[1,3]");
}

TEST_F(Diff, NamesAndKindsAreTold) {
    Numbers numbers;
    save_numbers(a_, 1, numbers);
    const std::string c = dir_ / "c";
    numbers.prefix = "model.";
    save_numbers(c, 2, numbers);
    const Json names = json_of("diff --json " + a_ + " " + c, 1);
    EXPECT_EQ(names.at("only_in_a").as_array().size(), 6u);
    EXPECT_EQ(names.at("only_in_b").as_array()[0].as_string(), "model.columns");
    EXPECT_THAT(tessera("diff " + a_ + " " + c).output, HasSubstr("A only: grid\n"));

    expect_all_well(run_meeting(1, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"grid", DType::f64, {5, 7}});
        Saver saver(comm, b_, saver_options());
        saver.save(1, owned.state);
    }));
    const Json kinds = json_of("diff --json " + both_, 1).at("kinds");
    ASSERT_EQ(kinds.as_array().size(), 1u);
    EXPECT_EQ(kinds.as_array()[0].at("a").at("dtype").as_string(), "f32");
    EXPECT_EQ(kinds.as_array()[0].at("b").at("shape").dump(), "[5,7]");
}

TEST_F(Diff, TroubleIsTwo) {
    const std::string save = save_numbers(a_, 1);
    EXPECT_EQ(json_of("diff --json " + a_ + " " + b_, 2).at("error").at("code").as_string(), "NOT_FOUND");
    EXPECT_EQ(tessera("diff " + a_).code, 2);
    EXPECT_EQ(tessera("diff --atol -1 " + a_ + " " + a_).code, 2);
    const std::string path = save + "/rank-00000.safetensors";
    std::string bytes = slurp(path);
    bytes[bytes.size() - 1] ^= 1;
    spill(path, bytes);
    EXPECT_EQ(json_of("diff --json " + a_ + " " + a_, 2).at("error").at("code").as_string(), "CORRUPT");
    EXPECT_THAT(tessera("diff --help").output, HasSubstr("1  the checkpoints differ"));
}

}  // namespace
}  // namespace tsr::testing
