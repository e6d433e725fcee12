// Patterns of names.
#include "base/wildcard.hpp"

#include <gtest/gtest.h>

#include <string>

namespace tsr {
namespace {

struct Row {
    const char* pattern;
    const char* name;
    bool fits;
};

const Row table[] = {
    {"encoder.*", "encoder.layers.0.weight", true},
    {"encoder.*", "encoder.", true},
    {"encoder.*", "encoder", false},
    {"encoder.*", "model.encoder.weight", false},
    {"*", "", true},
    {"", "", true},
    {"", "a", false},
    {"a", "", false},
    {"*.bias", "a.bias.bias", true},
    {"*.bias", "a.bias.weight", false},
    {"*a*b*", "xxaxxbxx", true},
    {"*a*b*", "xxbxxaxx", false},
    {"**", "a", true},
    {"layer.?.w", "layer.3.w", true},
    {"layer.?.w", "layer.10.w", false},
    {"?", "\u00e9", true},
    {"?", "\U0001f600", true},
    {"??", "\u00e9", false},
    {"*\u00e9", "caf\u00e9", true},
    {"layer.[0-2].w", "layer.2.w", true},
    {"layer.[0-2].w", "layer.3.w", false},
    {"[a-z]", "B", false},
    {"[!a-z]", "B", true},
    {"[^a-z]", "b", false},
    {"[\u00e0-\u00ef]", "\u00e9", true},
    {"[\u00e0-\u00ef]", "e", false},
    {"[]a]", "]", true},
    {"[!]a]", "]", false},
    {"[a-]", "-", true},
    {"[\\]]", "]", true},
    {"[ab", "[ab", true},
    {"[ab", "a", false},
    {"[", "[", true},
    {"a\\*", "a*", true},
    {"a\\*", "ab", false},
    {"a\\", "a\\", true},
    {"[!a]*x", "bx", true},
    {"*[0-9]", "layer.12", true},
};

TEST(Wildcard, TakesWhatAShellTakes) {
    for (const Row& row : table) EXPECT_EQ(fits(row.pattern, row.name), row.fits) << row.pattern << " " << row.name;
}

TEST(Wildcard, ManyStarsTakeNoLongTime) {
    std::string pattern;
    for (int i = 0; i < 500; ++i) pattern += "*a";
    EXPECT_FALSE(fits(pattern + "*b", std::string(1024, 'a')));
    EXPECT_TRUE(fits(pattern, std::string(1024, 'a')));
}

TEST(Wildcard, TextThatIsNotUtf8IsNoTrap) {
    EXPECT_TRUE(fits("*\xff", "a\xff"));
    EXPECT_TRUE(fits("?", "\xf0"));
    EXPECT_FALSE(fits("[\xf0", "\xf0"));
    EXPECT_FALSE(fits("\xc3", "\xc3\xa9"));
}

TEST(Wildcard, APatternIsKnownByItsCharacters) {
    for (const char* text : {"*", "a?", "[a]", "a\\*"}) EXPECT_TRUE(is_pattern(text)) << text;
    for (const char* text : {"", "model.layers.0.weight", "a]"}) EXPECT_FALSE(is_pattern(text)) << text;
}

}  // namespace
}  // namespace tsr
