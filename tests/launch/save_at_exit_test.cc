// A program that ends with a save in flight: it is durable then, or standard error says which step is lost.
#include <sys/wait.h>

#include <atomic>
#include <cstdlib>

#include "checkpoint/load/checkpoint.hpp"
#include "checkpoint/save/save_queue.hpp"
#include "run_fixture.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Child;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::read_file;
using testing::Result;

class SaveAtExit : public testing::Run {
   protected:
    [[nodiscard]] std::string root() const { return scratch() + "/checkpoints"; }
    // The program, by itself.
    Result leave(const std::string& way) {
        const std::string err = (directory_.path() / "err").string();
        const std::string command = testing::binary_dir() + "/tests/leaves " + way + " " + root() + " 2> " + err;
        const int status = std::system(command.c_str());  // NOLINT(concurrency-mt-unsafe): one thread
        return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), "", read_file(err)};
    }
    // Runs `body` in a child, which then exits.
    Result exit_after(const std::function<void()>& body) {
        std::fflush(nullptr);
        const pid_t pid = ::fork();
        if (pid == 0) {
            const int file = ::open((directory_.path() / "err").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
            if (file < 0 || ::dup2(file, STDERR_FILENO) < 0) ::_exit(127);
            body();
            std::exit(0);  // NOLINT(concurrency-mt-unsafe): what is tested
        }
        Child child(pid);
        const int code = child.wait();
        return {code, "", read_file(directory_.path() / "err")};
    }
};

class SaveInFlight : public SaveAtExit, public ::testing::WithParamInterface<const char*> {};

TEST_P(SaveInFlight, IsWaitedFor) {
    const Result result = leave(GetParam());
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.err, IsEmpty());
    EXPECT_EQ(Checkpoint::open(root())->manifest().step, 7);
}

INSTANTIATE_TEST_SUITE_P(Ways, SaveInFlight, ::testing::Values("return", "exit", "work", "destroy", "fork"),
                         [](const auto& way) { return std::string(way.param); });

TEST_F(SaveAtExit, RanksWaitForTheirSaveTogether) {
    const Result result = run({"-n", "3", testing::binary_dir() + "/tests/leaves", "return", root()});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(Checkpoint::open(root())->manifest().step, 7);
}

// What progress needs is perhaps on the stack of main, which is gone.
TEST_F(SaveAtExit, WhatCallsTheProgramIsNotWaitedForButNamed) {
    for (int i = 0; i < 10; ++i) {  // the save goes on while the process exits, at another place each time
        const Result result = leave("progress");
        EXPECT_EQ(result.code, 0);
        EXPECT_THAT(result.err, AllOf(HasSubstr("the save of step 7 into " + root() + " may be lost"),
                                      HasSubstr("calls functions of the program"), HasSubstr("tsr_saver_wait")));
    }
}

TEST_F(SaveAtExit, WhatTakesLongerThanTheTimeoutIsNamed) {
    const Result result = leave("late");
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.err, AllOf(HasSubstr("the save of step 7 into " + root()), HasSubstr("the saver's timeout")));
}

// A queue that is never destroyed, with a save of each step that runs until `done`.
SaveQueue& forgotten(const std::vector<int64_t>& steps, bool staged, const std::function<void()>& run) {
    auto& queue = *new SaveQueue([] {}, {"/root/of/it", false, milliseconds{20000}});  // NOLINT
    if (!queue.start()) std::abort();
    for (const int64_t step : steps) {
        auto save = std::make_shared<SaveQueue::Save>();
        save->step = step;
        save->run = run;
        if (staged) save->work->staged()->finish(std::nullopt);
        queue.push(std::move(save));
    }
    return queue;
}

TEST_F(SaveAtExit, SavesThatQueueAreWaitedForInTheirOrder) {
    const std::string trail = scratch() + "/trail";
    const Result result = exit_after([&] {
        static std::atomic<bool> ends{false};
        forgotten({1, 2}, true, [&trail] {
            while (!ends) std::this_thread::yield();
            std::ofstream(trail, std::ios::app) << "saved\n";
        });
        std::atexit([] { ends = true; });  // runs before what the queue has registered
    });
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.err, IsEmpty());
    EXPECT_EQ(read_file(trail), "saved\nsaved\n");
}

// Its tensors may be anything by now.
TEST_F(SaveAtExit, WhatIsNotCopiedIsNotWaitedForButNamed) {
    const Result result = exit_after([] {
        forgotten({3, 4}, false, [] {
            for (;;) ::pause();
        });
    });
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.err,
                AllOf(HasSubstr("the saves of steps 3, 4 into /root/of/it may be lost"), HasSubstr("copy_on_demand")));
}

TEST_F(SaveAtExit, ASaveThatEndsTheProgramDoesNotWaitForItself) {
    const Result result = exit_after([] {
        forgotten({5}, true, [] { std::exit(9); });  // NOLINT(concurrency-mt-unsafe): what is tested
        for (;;) ::pause();
    });
    EXPECT_EQ(result.code, 9);
    EXPECT_THAT(result.err, HasSubstr("the program exits in a callback of the save"));
}

// A child's copy of a queue has no thread, and its lock may have been held.
TEST_F(SaveAtExit, AForkedChildWaitsForItsOwnSavesAlone) {
    const std::string trail = scratch() + "/trail";
    const Result result = exit_after([&] {
        std::atomic<bool> child_ended{false};
        forgotten({6}, true, [&] {
            while (!child_ended) std::this_thread::yield();
            std::ofstream(trail, std::ios::app) << "parent\n";
        });
        const pid_t child = ::fork();
        if (child == 0) {
            forgotten({7}, true, [&] { std::ofstream(trail, std::ios::app) << "child\n"; });
            std::exit(0);  // NOLINT(concurrency-mt-unsafe): what is tested
        }
        int status = 0;
        if (::waitpid(child, &status, 0) != child || status != 0) ::_exit(8);
        child_ended = true;
        while (read_file(trail) != "child\nparent\n") std::this_thread::yield();  // child_ended ends with this
    });
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.err, IsEmpty());
    EXPECT_EQ(read_file(trail), "child\nparent\n");
}

}  // namespace
}  // namespace tsr
