#include "checkpoint/model/value.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.hpp"
#include "checkpoint/model/state.hpp"

namespace tsr {
namespace {

bool taken(std::string_view text) {
    try {
        (void)parse_value(text, "v");
        return true;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument) << text;
        return false;
    }
}

TEST(TypedValue, TagsAreChecked) {
    EXPECT_TRUE(taken(R"({"~":"bytes","v":""})"));
    EXPECT_TRUE(taken(R"({"~":"bytes","v":"AA=="})"));
    EXPECT_FALSE(taken(R"({"~":"bytes","v":"AB=="})")) << "bits beyond the last byte";
    EXPECT_FALSE(taken(R"({"~":"bytes","v":"AA="})"));
    EXPECT_FALSE(taken(R"({"~":"bytes","v":"A-=="})"));
    EXPECT_FALSE(taken(R"({"~":"bytes","v":"===="})"));
    EXPECT_TRUE(taken(R"({"~":"int","v":"9223372036854775808"})"));
    EXPECT_FALSE(taken(R"({"~":"int","v":"9223372036854775807"})")) << "fits 64 bits";
    EXPECT_TRUE(taken(R"({"~":"int","v":"-9223372036854775809"})"));
    EXPECT_FALSE(taken(R"({"~":"int","v":"-9223372036854775808"})"));
    EXPECT_FALSE(taken(R"({"~":"int","v":"09223372036854775808"})"));
    EXPECT_FALSE(taken(R"({"~":"int","v":"12x"})"));
    EXPECT_FALSE(taken("9223372036854775808"));
    EXPECT_FALSE(taken(R"({"~":"double","v":"NaN"})"));
    EXPECT_FALSE(taken(R"({"~":"set","v":[]})"));
    EXPECT_FALSE(taken(R"({"~":"tuple"})"));
    EXPECT_FALSE(taken(R"({"~":"tuple","v":[],"x":1})"));
    EXPECT_FALSE(taken(R"({"~":1,"v":[]})"));
    EXPECT_TRUE(taken(R"({"~":"map","v":[["~",1],[{"~":"tuple","v":[1]},2]]})"));
    EXPECT_FALSE(taken(R"({"~":"map","v":[[1,1],[1,2]]})"));
    EXPECT_FALSE(taken(R"({"~":"map","v":[[1]]})"));
    EXPECT_FALSE(taken("nope"));
}

TEST(TypedValue, ThePlaceOfAnErrorIsTold) {
    try {
        (void)parse_value(R"({"a":[1,{"~":"bytes","v":"?"}]})", "value 'x'");
        FAIL();
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(),
                     "value 'x' is not a typed value at .a[1].v: expected base64 with padding (RFC 4648)");
    }
}

TEST(TypedValue, NestingIsCappedAt64) {
    const auto nested = [](int depth, const std::string& open, const std::string& close) {
        std::string text;
        for (int i = 0; i < depth; ++i) text += open;
        text += "1";
        for (int i = 0; i < depth; ++i) text += close;
        return text;
    };
    EXPECT_TRUE(taken(nested(64, "[", "]")));
    EXPECT_FALSE(taken(nested(65, "[", "]")));
    EXPECT_TRUE(taken(nested(64, R"({"~":"tuple","v":[)", "]}")));
    EXPECT_FALSE(taken(nested(65, R"({"~":"tuple","v":[)", "]}")));
    EXPECT_FALSE(taken(nested(100000, "[", "]")));
}

TEST(TypedValue, DoublesKeepNanAndInfinities) {
    EXPECT_TRUE(std::isnan(double_of(double_value(NAN), "v")));
    EXPECT_EQ(double_of(double_value(-INFINITY), "v"), -INFINITY);
    EXPECT_EQ(double_of(double_value(0.1), "v"), 0.1);
    EXPECT_THROW((void)double_of(Json(int64_t{1}), "v"), Error);
    EXPECT_THROW((void)int_of(Json(1.0), "v"), Error);
}

TEST(StateNames, AreCheckedAndPrivateOnesRecognised) {
    State state;
    EXPECT_THROW(state.set_value("", Json(true)), Error);
    EXPECT_THROW(state.set_value("a\nb", Json(true)), Error);
    EXPECT_THROW(state.set_value("\xff", Json(true)), Error);
    EXPECT_THROW(state.set_value(std::string(1025, 'x'), Json(true)), Error);
    EXPECT_NO_THROW(state.set_value(std::string(1024, 'x'), Json(true)));
    EXPECT_EQ(private_rank("rank/12/rng"), 12);
    EXPECT_EQ(private_rank("rank/012/rng"), std::nullopt);
    EXPECT_EQ(private_rank("rank/1"), std::nullopt);
    EXPECT_EQ(private_rank("rank/-1/x"), std::nullopt);
    EXPECT_EQ(registered_name("module.a._orig_mod.module.b"), "a.b");
    EXPECT_EQ(registered_name("a.module"), "a.module");
}

// A source's values are its own.
class Counter final : public StateSource {
   public:
    const std::string& prefix() const override { return prefix_; }
    Values collect() const override {
        Values values;
        values.emplace("data.count", count);
        return values;
    }
    void apply(const Values& values) override { count = values.at("data.count").as_int(); }
    int64_t count = 1;

   private:
    std::string prefix_ = "data";
};

TEST(StateSources, OwnWhatIsUnderTheirPrefix) {
    State state;
    const auto counter = std::make_shared<Counter>();
    state.add_source(counter);
    counter->count = 5;
    EXPECT_EQ(state.value("data.count"), Json(int64_t{5}));
    EXPECT_EQ(state.collect().at("data.count"), Json(int64_t{5}));
    EXPECT_THROW(state.set_value("data.count", Json(int64_t{1})), Error);
    EXPECT_THROW(state.set_value("data.other", Json(int64_t{1})), Error);
    EXPECT_NO_THROW(state.set_value("database", Json(int64_t{1})));
    EXPECT_THROW(state.add_source(std::make_shared<Counter>()), Error);
    Values values;
    values.emplace("data.count", int64_t{9});
    values.emplace("database", int64_t{2});
    state.apply(values, {});
    EXPECT_EQ(counter->count, 9);
    EXPECT_EQ(state.value("database"), Json(int64_t{2}));
}

}  // namespace
}  // namespace tsr
