// The log's function: called without a lock of the library's, released once.
#include "base/log.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tsr {
namespace {

struct Heard {
    std::vector<std::string> lines;
    int destroyed = 0;
};

TEST(Log, ItsFunctionMayLogAndReplaceItself) {
    Heard heard;
    const auto release = [](void* data) { ++static_cast<Heard*>(data)->destroyed; };
    log::set_sink(
        [](int32_t, const char* line, void* data) {
            auto& own = *static_cast<Heard*>(data);
            own.lines.emplace_back(line);
            if (own.lines.size() == 1) log::error("within");  // a handle that it lets go of may have to say something
            if (own.lines.size() == 2) {
                log::set_sink(nullptr, nullptr, nullptr);
                EXPECT_EQ(own.destroyed, 0);  // it is still running
            }
        },
        &heard, release);
    log::error("outer");
    EXPECT_EQ(heard.lines, (std::vector<std::string>{"outer", "within"}));
    EXPECT_EQ(heard.destroyed, 1);
}

}  // namespace
}  // namespace tsr
