// A JSON text that is walked: the same refusals as those of a document.
#include "base/json_view.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "sanitized.hpp"

namespace tsr {
namespace {

std::string refusal(const std::function<void()>& body) {
    try {
        body();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::corrupt);
        return error.what();
    }
    return "taken";
}

TEST(JsonView, WalksMembersAndItemsInTheirOrder) {
    const std::string document = R"({"b":[1,-2,9223372036854775807],"a":"x\u00fc","c":null})";
    const JsonText text(document, "it");
    std::string seen;
    text.root().for_each_member([&](std::string_view key, JsonView value) {
        seen += key;
        if (!value.is(Json::Kind::array)) return;
        value.for_each_item([&](JsonView item) { seen += " " + std::to_string(item.as_int()); });
    });
    EXPECT_EQ(seen, "b 1 -2 9223372036854775807ac");
    const auto [a, c] = text.root().at<2>({"a", "c"});
    EXPECT_EQ(a.as_string(), "x\u00fc");
    EXPECT_TRUE(c.is(Json::Kind::null));
    EXPECT_FALSE(text.root().find<1>({"d"})[0].has_value());
    EXPECT_EQ(text.root().tree(), Json::parse(document, "it"));
}

TEST(JsonView, OtherKindsAndMissingKeysAreNamed) {
    const JsonText text(R"({"number":1.5,"large":18446744073709551615,"list":[]})", "it");
    const auto [number, large, list] = text.root().at<3>({"number", "large", "list"});
    EXPECT_EQ(refusal([&, number = number] { (void)number.as_int(); }),
              "expected an integer below 2^63, found a number");
    EXPECT_EQ(refusal([&, large = large] { (void)large.as_int(); }),
              "expected an integer below 2^63, found an integer");
    EXPECT_EQ(refusal([&, list = list] { (void)list.as_string(); }), "expected a string, found an array");
    EXPECT_EQ(refusal([&, list = list] { list.for_each_member([](std::string_view, JsonView) {}); }),
              "expected an object, found an array");
    EXPECT_EQ(refusal([&] { text.root().for_each_item([](JsonView) {}); }), "expected an array, found an object");
    EXPECT_EQ(refusal([&] { (void)text.root().at<1>({"x"}); }), "the key \"x\" is missing");
}

TEST(JsonView, KeysThatComeTwiceAreRefused) {
    const auto walk = [](const std::string& open) {
        return refusal([&] {
            const JsonText text(open + "}", "it");
            text.root().for_each_member([](std::string_view, JsonView) {});
        });
    };
    // Few and many, neighbours and not.
    for (const int more : {0, 1, 5, 6, 7, 8, 100}) {
        std::string ordered = R"({"a":1,"a":2)";
        std::string apart = R"({"a":1)";
        std::string once = R"({"zz":1,"a":2)";
        for (int i = 0; i < more; ++i) {
            for (std::string* text : {&ordered, &apart, &once}) *text += ",\"k" + std::to_string(i) + "\":0";
        }
        apart += R"(,"a":2)";
        EXPECT_EQ(walk(ordered), "it is not valid JSON: the key \"a\" occurs twice") << more;
        EXPECT_EQ(walk(apart), "it is not valid JSON: the key \"a\" occurs twice") << more;
        EXPECT_EQ(walk(once), "taken") << more;
    }
}

TEST(JsonView, WhatIsNoJsonIsRefusedAtOnce) {
    for (const char* text : {"", "{", "{\"a\":1}x", "\"\xff\"", "[01]"}) {
        EXPECT_TRUE(refusal([&] { const JsonText parsed(text, "it"); }).starts_with("it is not valid JSON: ")) << text;
    }
    EXPECT_NE(refusal([] { const JsonText deep(std::string(20, '[') + std::string(20, ']'), "it", 10); }), "taken");
}

// Keys and values as they come, or "refused".
std::string walked(const std::function<void(FunctionRef<void(std::string_view, JsonView)>)>& walk) {
    std::string seen;
    const auto note = [&](std::string_view key, JsonView value) {
        append_json_string(seen, key);
        seen += ':' + value.tree().dump() + '\n';
    };
    try {
        walk(note);
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::corrupt);
        return "refused";
    }
    return seen;
}

std::string walked_whole(std::string_view text) {
    return walked([&](auto visit) {
        const JsonText parsed(text, "it");
        parsed.root().for_each_of_any_key(visit);
    });
}

constexpr std::string_view sound =
    R"( {"a":{"b":[1,{"c":"}]"}]}, "t\\\"," : {"x":1,"y":[2,3], "z":{}} ,"e\\":"\u00fc,{","t":{"k":null},"n":-1.5} )";

// Calls visit(text) for the sound text and for many like it, most of which are no JSON.
void for_each_edit(const std::function<void(const std::string& text)>& visit) {
    const uint32_t seed = 7;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    visit(std::string(sound));
    for (int i = 0; i < (testing::sanitized ? 4000 : 20000); ++i) {
        std::string text(sound);
        for (uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
            const size_t at = random() % text.size();
            switch (random() % 4) {
                case 0: text[at] = R"(,:{}[]"\ 1)"[random() % 10]; break;
                case 1: text.erase(at, 1 + random() % 4); break;
                case 2: text.insert(at, 1, text[random() % text.size()]); break;
                default: text.insert(at, text.substr(random() % text.size(), random() % 8));
            }
        }
        visit(text);
    }
}

TEST(JsonMembers, AFewAtATimeAreWhatTheWholeHolds) {
    int taken = 0;
    for_each_edit([&](const std::string& text) {
        const std::string whole = walked_whole(text);
        taken += whole != "refused" ? 1 : 0;
        for (const size_t window : {size_t{0}, size_t{9}, size_t{1} << 18}) {
            const std::string few = walked([&](auto visit) { for_each_member_of(text, "it", visit, window); });
            ASSERT_EQ(few, whole) << text << " by " << window;
        }
    });
    EXPECT_GT(taken, 100);
}

TEST(JsonMembers, AnObjectFoundInATextIsTheOneThatTheWholeHolds) {
    int found = 0;
    for_each_edit([&](const std::string& text) {
        const std::string_view object = object_in(text, "t");
        if (object.empty()) return;
        const std::string before(text.data(), object.data());
        const std::string apart = walked([&](auto visit) {
            const std::string behind(text.data() + (object.end() - text.data()), text.data() + text.size());
            const JsonText rest(before + "{}" + behind, "it");
            for_each_member_of(object, "it", visit, 0);
        });
        const std::string within = walked([&](auto visit) {
            const JsonText whole(text, "it");
            bool first = true;
            whole.root().for_each_of_any_key([&](std::string_view key, JsonView value) {
                if (key == "t" && std::exchange(first, false)) value.for_each_of_any_key(visit);
            });
        });
        ASSERT_EQ(apart, within) << text;
        found += within != "refused" ? 1 : 0;
    });
    EXPECT_GT(found, 100);
    EXPECT_TRUE(object_in(R"({"s":"t","u":{}})", "t").empty());
    EXPECT_TRUE(object_in(R"({"t":[]})", "t").empty());
    EXPECT_TRUE(object_in("[]", "t").empty());
}

}  // namespace
}  // namespace tsr
