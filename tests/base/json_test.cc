#include "base/json.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <thread>

#include "base/error.hpp"
#include "soon.hpp"

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

TEST(Json, TextThatIsNotUtf8CanBeMadeReadable) {
    EXPECT_EQ(readable_utf8(""), "");
    EXPECT_EQ(readable_utf8("plain \u20ac \U0001f600"), "plain \u20ac \U0001f600");
    EXPECT_EQ(readable_utf8("caf\xe9 \u20ac"), "caf? \u20ac");
    EXPECT_EQ(readable_utf8("cut \xe2\x82"), "cut ??");
    EXPECT_EQ(readable_utf8("\xf0\x9f\x98"), "???");
    EXPECT_EQ(readable_utf8("\xed\xa0\x80"), "???") << "half of a surrogate pair";
    EXPECT_EQ(Json(readable_utf8("\xff\"")).dump(), "\"?\\\"\"");
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

TEST(Json, TextIsUtf8OrRefused) {
    const std::string_view sound[] = {"",
                                      "plain text of more than eight bytes",
                                      "\x7f",
                                      "\xc2\x80",
                                      "\xdf\xbf",
                                      "\xe0\xa0\x80",
                                      "\xed\x9f\xbf",
                                      "\xee\x80\x80",
                                      "\xef\xbf\xbf",
                                      "\xf0\x90\x80\x80",
                                      "\xf4\x8f\xbf\xbf",
                                      "12345678\xc3\xa4"};
    for (const std::string_view text : sound) {
        EXPECT_TRUE(is_utf8(text)) << text;
        // A byte less or a byte of another sequence in it: none of these is sound but the plain ones.
        if (text.empty() || static_cast<unsigned char>(text.back()) < 0x80) continue;
        EXPECT_FALSE(is_utf8(text.substr(0, text.size() - 1)));
        EXPECT_FALSE(is_utf8(std::string(text) + "\x80"));
    }
    const std::string_view wrong[] = {
        "\x80",         "\xc0\x80",         "\xc1\xbf",         "\xe0\x9f\xbf",         "\xed\xa0\x80",
        "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\xff",
        "\xc3(",        "\xe2\x82(",        "1234567\xc3",      "12345678\xfe"};
    for (const std::string_view text : wrong) EXPECT_FALSE(is_utf8(text)) << text;
}

// Texts that threads in the background have read, or were refused.
std::atomic<int64_t> texts_read{0};
std::atomic<bool> lingers{false};

void await_more_texts() {
    const int64_t enough = texts_read + 1000;
    wait_until([&] { return texts_read >= enough; }, testing::soon(), "the threads that read");
}

// Before all objects of the program are made; what it registers is called after all of them are gone.
[[gnu::constructor(101)]] void linger_at_exit() {
    (void)std::atexit([] {
        if (lingers) await_more_texts();
    });
}

// As a save in the background does when its program ends.
TEST(JsonDeathTest, ThreadsThatStillReadAndWriteDoNotDisturbTheExitOfTheProcess) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto exit_while_parsing = [] {
        lingers = true;
        for (int i = 0; i < 2; ++i) {
            std::thread([] {
                while (true) {
                    try {
                        (void)Json::parse("[1, 2, 3]", "test");
                        (void)Json("text").dump();
                    } catch (const Error& error) {
                        if (error.code() != Code::aborted) std::abort();
                    }
                    ++texts_read;
                }
            }).detach();
        }
        await_more_texts();
        std::exit(0);
    };
    EXPECT_EXIT(exit_while_parsing(), ::testing::ExitedWithCode(0), "");
}

TEST(JsonDeathTest, WhatAProgramHasCalledAtItsExitStillParses) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // so that nothing was parsed before
    const auto exit_parsing = [] {
        (void)std::atexit([] { (void)Json::parse("[1]", "test"); });
        (void)Json::parse("[1]", "test");
        std::exit(0);
    };
    EXPECT_EXIT(exit_parsing(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tsr
