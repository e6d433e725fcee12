// A runaway rank meets a limit before the agent's memory ends.
#include "store/table.hpp"

#include <gtest/gtest.h>

#include <string>

#include "base/error.hpp"
#include "stores.hpp"

namespace tsr {
namespace {

using testing::code_of;

TEST(Table, LimitsKeysAndBytesAndRecoversWhenSomeGo) {
    Table table({.keys = 3, .bytes = 100});
    table.set("a", std::string(40, 'x'));
    table.set("b", std::string(40, 'x'));
    EXPECT_EQ(code_of([&] { table.set("c", std::string(40, 'x')); }), Code::no_memory);
    EXPECT_EQ(table.find("c"), nullptr) << "a refused value leaves nothing behind";
    table.set("a", std::string(50, 'y'));  // what it replaces does not count
    table.set("c", "");
    EXPECT_EQ(code_of([&] { table.add("d", 1); }), Code::no_memory);
    EXPECT_TRUE(table.erase("b"));
    EXPECT_EQ(table.add("d", 1), 1);
    table.set("a", "");
    table.set("c", std::string(90, 'z'));
    EXPECT_EQ(table.size(), 3U);
}

TEST(Table, ValueThatWasFoundOutlivesItsReplacement) {
    Table table;
    table.set("a", "old");
    const Value old = table.find("a");
    table.set("a", "new");
    EXPECT_EQ(*old, "old");
    EXPECT_EQ(*table.find("a"), "new");
}

}  // namespace
}  // namespace tsr
