// The log's function: called without a lock of the library's, released once.
#include "base/log.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "soon.hpp"

namespace tsr {
namespace {

struct Heard {
    std::vector<std::string> lines;
    int destroyed = 0;
};

TEST(LogDeathTest, ALevelThatIsNoneIsTold) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process in which nothing has asked for the level
    const auto ask = [](const char* level) {
        ::setenv("TESSERA_LOG", level, 1);  // NOLINT(concurrency-mt-unsafe)
        std::_Exit(log::enabled(log::Level::warning) ? 0 : 1);
    };
    EXPECT_EXIT(ask("verbose"), ::testing::ExitedWithCode(0),
                "unknown TESSERA_LOG level 'verbose', using warning; use debug, info");
    EXPECT_EXIT(ask("error"), ::testing::ExitedWithCode(1), "^$");
    const auto check = [] {
        ::setenv("TESSERA_LOG", "loud", 1);  // NOLINT(concurrency-mt-unsafe)
        log::check_environment();
        log::check_environment();
        std::_Exit(0);
    };
    EXPECT_EXIT(check(), ::testing::ExitedWithCode(0), "^[^\n]*unknown TESSERA_LOG level 'loud'[^\n]*\n$");
}

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

// Who writes such a function has to know: both threads are inside before either returns.
TEST(Log, ItsFunctionIsCalledOnSeveralThreadsAtOnce) {
    std::atomic<int> inside{0};
    log::set_sink(
        [](int32_t, const char*, void* data) {
            auto& count = *static_cast<std::atomic<int>*>(data);
            ++count;
            EXPECT_NO_THROW(wait_until([&] { return count == 2; }, testing::soon(), "the other thread"));
        },
        &inside, nullptr);
    std::thread other([] { log::error("other"); });
    log::error("one");
    other.join();
    log::set_sink(nullptr, nullptr, nullptr);
}

}  // namespace
}  // namespace tsr
