#include "base/json.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "base/error.hpp"

namespace tsr {
namespace {

std::string round_trip(std::string_view text) { return Json::parse(text, "test").dump(); }

std::string refusal(std::string_view text, int depth = Json::default_depth) {
    try {
        (void)Json::parse(text, "test", depth);
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::corrupt);
        return error.what();
    }
    return "taken";
}

TEST(Json, KeepsOrderAndKinds) {
    const std::string text = R"({"b":[1,-2,3.0,1e+30,true,null],"a":{"":"é\n\"\\ok"}})";
    EXPECT_EQ(round_trip(text), text);
    const Json json = Json::parse(text, "test");
    EXPECT_EQ(json.at("b").as_array()[0].kind(), Json::Kind::int64);
    EXPECT_EQ(json.at("b").as_array()[2].kind(), Json::Kind::number);
}

TEST(Json, IntegersKeep64Bits) {
    EXPECT_EQ(Json::parse("9223372036854775807", "t").as_int(), INT64_MAX);
    EXPECT_EQ(Json::parse("-9223372036854775808", "t").as_int(), INT64_MIN);
    EXPECT_EQ(Json::parse("9223372036854775808", "t").kind(), Json::Kind::uint64);
    EXPECT_EQ(round_trip("18446744073709551615"), "18446744073709551615");
    EXPECT_NE(refusal("18446744073709551616"), "taken");
}

TEST(Json, DoublesAreShortestAndExact) {
    std::mt19937_64 random(3);
    for (int i = 0; i < 20000; ++i) {
        const uint64_t bits = random();
        const auto value = std::bit_cast<double>(bits);
        if (!std::isfinite(value)) continue;
        const std::string text = Json(value).dump();
        ASSERT_NE(text.find_first_of(".e"), std::string::npos) << text;
        const double back = Json::parse(text, "t").as_double();
        ASSERT_EQ(std::bit_cast<uint64_t>(back), bits) << text;
    }
    EXPECT_EQ(Json(0.1).dump(), "0.1");
    EXPECT_EQ(Json(1.0).dump(), "1.0");
    EXPECT_EQ(Json(-0.0).dump(), "-0.0");
    EXPECT_THROW((void)Json(std::nan("")).dump(), Error);
    EXPECT_THROW((void)Json(std::numeric_limits<double>::infinity()).dump(), Error);
}

TEST(Json, ControlCharactersAreEscaped) {
    const std::string text("\x01\x1f\0z", 4);
    EXPECT_EQ(Json(text).dump(), R"("\u0001\u001f\u0000z")");
    EXPECT_EQ(Json::parse(Json(text).dump(), "t").as_string(), text);
}

TEST(Json, RefusesWhatReadersCouldTakeDifferently) {
    EXPECT_NE(refusal(R"({"a":1,"a":2})").find("\"a\" occurs twice"), std::string::npos);
    EXPECT_NE(refusal(R"([{"x":{"a":1,"b":2,"\u0061":2}}])").find("occurs twice"), std::string::npos);
    EXPECT_NE(refusal("{} x"), "taken");
    EXPECT_NE(refusal("{}{}"), "taken");
    EXPECT_NE(refusal(""), "taken");
    EXPECT_NE(refusal("[1,]"), "taken");
    EXPECT_NE(refusal("NaN"), "taken");
    EXPECT_NE(refusal("\"\xff\""), "taken");
    EXPECT_NE(refusal("{\"a\":1"), "taken");
}

TEST(Json, NestingIsCapped) {
    const auto nested = [](int depth) {
        return std::string(static_cast<size_t>(depth), '[') + "1" + std::string(static_cast<size_t>(depth), ']');
    };
    EXPECT_EQ(refusal(nested(8), 8), "taken");
    EXPECT_NE(refusal(nested(9), 8), "taken");
    EXPECT_NE(refusal(nested(200000)), "taken");
}

TEST(Json, AMissingKeyOrAnotherKindIsNamed) {
    const Json json = Json::parse(R"({"a":"text"})", "t");
    EXPECT_EQ(json.find("b"), nullptr);
    try {
        (void)json.at("b");
        FAIL();
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "the key \"b\" is missing");
    }
    try {
        (void)json.at("a").as_int();
        FAIL();
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "expected an integer below 2^63, found a string");
    }
}

}  // namespace
}  // namespace tsr
