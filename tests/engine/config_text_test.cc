// The text of configurations: what is allowed beyond JSON, places in messages, bounds, and damage of every kind.
#include "engine/config_text.hpp"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "configs.hpp"
#include "sanitized.hpp"
#include "seed.hpp"

namespace tsr {
namespace {

using testing::has;
using testing::refusal_of;

constexpr std::string_view commented = R"(# ds_config.json
{
  "train_batch_size": 8,            // samples of all ranks
  "gradient_accumulation_steps": 1, /* one
                                       pass */
  "optimizer": {
    "type": "Adam",
    "params": {"lr": 1.5e-4, "betas": [0.8, 0.999,], "eps": 1e-8, "weight_decay": 3e-7},
  },
  "fp16": {"enabled": true},
  "zero_optimization": true,
  "a": "# no comment // /* \" [,]",
})";

TEST(ConfigText, HasCommentsAndTrailingCommas) {
    const ConfigText text(commented);
    EXPECT_EQ(text.root().at("train_batch_size").as_int(), 8);
    EXPECT_EQ(text.root().at("optimizer").at("params").at("betas").as_array().size(), 2U);
    EXPECT_EQ(text.root().at("a").as_string(), "# no comment // /* \" [,]");
}

TEST(ConfigText, KnowsThePlacesOfItsKeys) {
    const ConfigText text(commented);
    EXPECT_EQ(text.place_of(text.root().at("gradient_accumulation_steps")), "line 4, column 3");
    EXPECT_EQ(text.place_of(text.root().at("optimizer").at("params").at("eps")), "line 8, column 54");
    const ConfigText second("{\"ü\": [{\"é\": 1}], \"b\": 2}");
    EXPECT_EQ(second.place_of(second.root().at("b")), "line 1, column 19");  // in characters
}

TEST(ConfigText, AByteOrderMarkIsSkipped) {
    EXPECT_EQ(ConfigText("\xef\xbb\xbf{\"a\": 1}").root().at("a").as_int(), 1);
}

struct Fault {
    const char* text;
    const char* message;
};

TEST(ConfigText, FaultsAreNamedWithTheirPlace) {
    for (const Fault& fault : {
             Fault{"", "line 1, column 1: expected a value, found the end of the text"},
             Fault{"{\"a\": 1", "line 1, column 8: expected a comma or }, found the end of the text"},
             Fault{"{\"a\": 1,\n \"b\" 2}", "line 2, column 6: expected a colon after the key, found '2'"},
             Fault{"{a: 1}", "line 1, column 2: expected a key in double quotes, found 'a'"},
             Fault{"{\"a\": }", "line 1, column 7: expected a value, found '}'"},
             Fault{"{\"a\": [1 2]}", "line 1, column 10: expected a comma or ], found '2'"},
             Fault{"{\"a\": True}", "line 1, column 7: expected a value, found 'True'"},
             Fault{"{\"a\": NaN}", "line 1, column 7: expected a value, found 'NaN'"},
             Fault{"{,}", "line 1, column 2: expected a key in double quotes, found ','"},
             Fault{"{\"a\": 1,,}", "line 1, column 9: expected a key in double quotes, found ','"},
             Fault{"{} x", "line 1, column 4: 'x' comes after the end"},
             Fault{"{\n/* ", "line 2, column 1: the comment that begins here has no end"},
             Fault{"{\"a\": \"b\n\"}", "line 1, column 7: the string that begins here has no end"},
             Fault{"{\"a\": 1, \"b\": 01}", "line 1, column 15: 01"},
             Fault{"{\"a\": 1e999}", "line 1, column 7: 1e999"},
             Fault{"{\"a\": \"\\x\"}", "line 1, column 7: \"\\x\""},
             Fault{"[1]", "a configuration is an object"},
         }) {
        const Error error = refusal_of(fault.text);
        EXPECT_EQ(error.code(), Code::invalid_argument) << fault.text;
        EXPECT_PRED2(has, error.what(), fault.message);
    }
}

TEST(ConfigText, DuplicateKeysAreRefusedWithBothPlaces) {
    EXPECT_STREQ(
        refusal_of("{\"a\": {\"b\": 1,\n\"c\": 2, \"b\": 3}}").what(),
        "the configuration, line 2, column 9: the key \"b\" occurs twice, first in line 1, column 8; remove one");
    EXPECT_PRED2(has, refusal_of(R"({"a": 1, "\u0061": 2})").what(), "occurs twice");
    EXPECT_EQ(ConfigText(R"({"a": {"b": 1}, "c": {"b": 1}})").root().as_object().size(), 2U);
}

TEST(ConfigText, SizeAndDepthAreBounded) {
    const auto nested = [](int depth) {
        return "{\"a\": " + std::string(static_cast<size_t>(depth), '[') +
               std::string(static_cast<size_t>(depth), ']') + "}";
    };
    EXPECT_NO_THROW(ConfigText(nested(ConfigText::max_depth - 1)));
    EXPECT_PRED2(has, refusal_of(nested(ConfigText::max_depth)).what(), "nested more than 32 levels deep");
    EXPECT_PRED2(has, refusal_of(nested(100000)).what(), "nested more than 32 levels deep");
    const std::string longest = "{}" + std::string(ConfigText::max_bytes - 2, ' ');
    EXPECT_NO_THROW((void)ConfigText(longest));
    EXPECT_PRED2(has, refusal_of(longest + " ").what(), "has 262145 bytes; at most 262144 are allowed");
}

// As an error it is one of the configuration's own.
void try_to_read(std::string_view text) {
    try {
        (void)testing::parsed(text);
    } catch (const Error& error) {
        const bool is_typed = error.code() == Code::invalid_argument || error.code() == Code::unsupported;
        ASSERT_TRUE(is_typed) << error.what();
        ASSERT_NE(std::string_view(error.what()), "");
    }
}

TEST(ConfigText, EveryTruncationIsRefused) {
    for (size_t size = 0; size < commented.size() - 1; ++size) {
        const Error error = refusal_of(commented.substr(0, size));
        ASSERT_EQ(error.code(), Code::invalid_argument) << size;
    }
}

TEST(ConfigText, RandomDamageNeverCrashes) {
    const testing::Seed seed;
    std::mt19937 random(seed);
    constexpr std::string_view structure = "{}[]\",:#/*\\\n0e-t";
    for (int i = testing::sanitized ? 2000 : 20000; i > 0; --i) {
        std::string text(commented);
        for (unsigned edits = 1 + random() % 4; edits > 0; --edits) {
            const size_t at = random() % text.size();
            switch (random() % 4) {
                case 0: text[at] = static_cast<char>(random()); break;
                case 1: text[at] = structure[random() % structure.size()]; break;
                case 2: text.insert(at, 1, structure[random() % structure.size()]); break;
                default: text.erase(at, 1 + random() % 8);
            }
            if (text.empty()) break;
        }
        try_to_read(text);
    }
}

}  // namespace
}  // namespace tsr
