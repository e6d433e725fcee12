// Which ranks failed by themselves, and in which order.
#include "launch/summary.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ends.hpp"

namespace tsr {
namespace {

using testing::end_of;
using testing::end_saying;
using testing::end_with;
using testing::ended_by_agent;
using testing::exit_1;
using ::testing::HasSubstr;
using testing::Ranks;
using testing::ranks_of;
using testing::with_code;
using testing::with_failure;

TEST(Failures, RootCauseIsTheEarliestAndAKilledRankBeforeItsVictims) {
    const std::vector<RankEnd> ends = {end_of(0, exit_1, 10.2, 2, 10.1), end_of(1, exit_1, 10.0, 1, 9.9),
                                       end_of(2, SIGKILL, 10.0, 1), end_of(3, exit_1, 10.0, 1, 9.8),
                                       end_of(4, 0, 9.0, 0)};
    const auto failures = failures_of(ends);
    EXPECT_EQ(ranks_of(failures), (Ranks{2, 3, 1, 0}));
    EXPECT_EQ(exit_code_of(failures), 128 + SIGKILL);
}

TEST(Failures, WithoutARecordedErrorTheLastLineOfStandardErrorSpeaks) {
    const auto message = [](std::vector<std::string> lines) {
        return end_with(end_of(0, exit_1, 1, 1), lines).message();
    };
    EXPECT_EQ(message({"Traceback (most recent call last):", "  File \"a.py\"", "ValueError: nan", "", "  "}),
              "last stderr line: ValueError: nan");
    EXPECT_EQ(message({"Exception in thread \"main\" java.lang.RuntimeException: nan", "\tat a.B.c(B.java:3)",
                       "\t... 3 more"}),
              "last stderr line: Exception in thread \"main\" java.lang.RuntimeException: nan");
    EXPECT_EQ(message({"thread 'main' panicked at a.rs:1:2:", "nan", "note: run with `RUST_BACKTRACE=1` environment"}),
              "last stderr line: nan");
    EXPECT_EQ(message({"thread 'main' panicked at a.rs:1:2:", "nan", "stack backtrace:", "   0: rust_begin_unwind",
                       "             at /rustc/1/library/std/src/panicking.rs:665:5", "   1: app::main",
                       "note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace."}),
              "last stderr line: nan");
    EXPECT_EQ(message({"", "\tat a.B.c(B.java:3)"}), "");
    EXPECT_EQ(message({}), "");
}

// Told by code and peer alone: no words are read.
TEST(Failures, ARankThatDidNotComeIsTheCauseOfThoseThatWaitedForIt) {
    const auto recorded = [](int rank, Code code, int peer, int order) {
        RankEnd end = end_of(rank, exit_1, order, order);
        end.error = RecordedError{fmt::format("words of {}", rank), "", 0, std::string(code_name(code)), peer};
        return end;
    };
    // It never came, and was ended with the others.
    auto failures = failures_of({recorded(0, Code::timeout, 2, 1), ended_by_agent(end_of(2, SIGTERM, 2, 2)),
                                 recorded(1, Code::peer_lost, 0, 1)});
    EXPECT_EQ(ranks_of(failures), (Ranks{2, 0, 1}));
    EXPECT_EQ(failures.front().cause(), "rank 2 was late and other ranks timed out waiting for it");
    EXPECT_EQ(failures.front().message(), "words of 0");
    EXPECT_EQ(exit_code_of(failures), 1);
    // It came later, and failed because the others had.
    failures = failures_of({recorded(0, Code::timeout, 1, 1), recorded(1, Code::aborted, 0, 2)});
    EXPECT_EQ(ranks_of(failures), (Ranks{1, 0}));
    EXPECT_EQ(failures.front().message(), "words of 0");
    // It had a reason of its own.
    failures = failures_of({recorded(0, Code::timeout, 1, 1), recorded(1, Code::io, -1, 2)});
    EXPECT_EQ(ranks_of(failures), (Ranks{1, 0}));
    EXPECT_EQ(failures.front().message(), "words of 1");
    // Each waited for the other: the first that noticed.
    failures = failures_of({recorded(0, Code::timeout, 1, 2), recorded(1, Code::timeout, 0, 1)});
    EXPECT_EQ(ranks_of(failures), (Ranks{1, 0}));
    EXPECT_EQ(failures.front().message(), "words of 1");
    // One waited for one that waited itself.
    failures = failures_of(
        {recorded(0, Code::timeout, 1, 1), recorded(1, Code::timeout, 2, 2), ended_by_agent(end_of(2, SIGTERM, 3, 3))});
    EXPECT_EQ(ranks_of(failures), (Ranks{2, 0, 1}));
    // That a rank differs from another makes neither the cause.
    failures = failures_of({recorded(0, Code::mismatch, 1, 1), recorded(1, Code::mismatch, 0, 1)});
    EXPECT_EQ(ranks_of(failures), (Ranks{0, 1}));
}

// Rank 0 serves PyTorch's store, and knows of the others only how many have come.
TEST(Failures, ARankThatDoesNotComeToPyTorchsStoreIsTheCause) {
    const auto says = [](int rank, const char* line, int order) {
        return end_with(end_of(rank, exit_1, order, order), {"Traceback (most recent call last):", line});
    };
    const char* too_few =
        "torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 2/4 clients joined.";
    const char* lost = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes.";
    const char* nobody =
        "torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while trying to connect to "
        "(127.0.0.1, 26461).";
    RankEnd came = says(1, lost, 1);  // it was there, and fails for want of rank 0
    came.error = RecordedError{"PeerLost: the store was lost", "", 0, std::string(code_name(Code::peer_lost)), 0};
    const RankEnd stays_away = ended_by_agent(end_of(2, SIGTERM, 3, 3));
    const RankEnd left = end_of(3, 0, 0.5, 0);
    auto failures = failures_of({says(0, too_few, 2), came, stays_away, left});
    EXPECT_EQ(ranks_of(failures), (Ranks{2, 1, 0}));
    EXPECT_EQ(failures.front().cause(), "rank 2 was late and other ranks timed out waiting for it");
    EXPECT_EQ(
        failures.front().message(),
        "rank 0 reported: torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 2/4 clients "
        "joined. (ranks 2 and 3 reported nothing)");
    // One that came was too slow to say so: it is not taken for one that did not.
    failures = failures_of({says(0, too_few, 2), ended_by_agent(end_of(1, SIGTERM, 3, 3)), stays_away, left});
    EXPECT_EQ(ranks_of(failures), (Ranks{0}));
    // Nobody serves the store.
    failures = failures_of({ended_by_agent(end_of(0, SIGTERM, 3, 3)), says(1, nobody, 1), says(2, nobody, 1)});
    EXPECT_EQ(ranks_of(failures), (Ranks{0, 1, 2}));
    failures = failures_of({says(0, "OSError: the port is in use", 1), says(1, nobody, 2)});
    EXPECT_EQ(ranks_of(failures), (Ranks{0, 1})) << "it had a reason of its own";
}

TEST(Failures, ARankThatLeftWithExitCodeZeroIsTheCauseOfThoseThatMissIt) {
    const auto missing_1 = [](RankEnd end) { return with_failure(std::move(end), Code::peer_lost, 1); };
    const std::vector<RankEnd> ends = {missing_1(end_with(end_of(0, exit_1, 10.1, 2), {"giving up"})),
                                       end_of(1, 0, 10.0, 1), end_of(2, 0, 9.9, 1)};
    const auto failures = failures_of(ends);
    EXPECT_EQ(ranks_of(failures), (Ranks{1, 0}));
    EXPECT_EQ(exit_code_of(failures), 1);
    EXPECT_THAT(failures.front().cause(), HasSubstr("rank 1 ended with exit code 0 (its peers still needed it"));
    EXPECT_EQ(ranks_of(failures_of({missing_1(end_of(0, exit_1, 1, 1)), end_of(1, 0, 2, 2)})), (Ranks{1, 0}))
        << "the launcher noticed its end later";
    EXPECT_EQ(ranks_of(failures_of({missing_1(end_of(0, SIGABRT, 2, 2)), end_of(1, 0, 1, 1)})), (Ranks{1, 0}))
        << "an exception that nothing caught";
    // What it recorded is its reason, and a crash is nobody else's doing, whatever its communicator went through before.
    EXPECT_EQ(ranks_of(failures_of({missing_1(end_of(0, exit_1, 2, 2, 2)), end_of(1, 0, 1, 1)})), (Ranks{0}));
    EXPECT_EQ(ranks_of(failures_of({missing_1(end_of(0, SIGSEGV, 2, 2)), end_of(1, 0, 1, 1)})), (Ranks{0}));
}

TEST(Failures, ARankThatEndedBeforeItJoinedIsTheCauseOfThoseThatWaited) {
    const auto missing_2 = [](int rank) { return with_code(end_saying(rank, "not joined"), Code::peer_lost, 2); };
    const std::vector<RankEnd> ends = {missing_2(0), missing_2(1), end_of(2, 0, 0.5, 0)};
    EXPECT_EQ(ranks_of(failures_of(ends)), (Ranks{2, 0, 1}));
}

TEST(Failures, AMessageThatEndsInAColonIsToldWithItsNextLine) {
    EXPECT_EQ(end_saying(0, "MISMATCH: 14 differences:\n  weight: f32\n  bias").message(),
              "MISMATCH: 14 differences: weight: f32");
    EXPECT_EQ(end_saying(0, "one\ntwo").message(), "one");
    EXPECT_EQ(end_saying(0, "nothing follows:").message(), "nothing follows:");
}

TEST(Failures, ARankThatWasSlowToEndComesBeforeItsVictims) {
    const RankEnd victim = with_failure(end_of(0, exit_1, 1, 1), Code::aborted, 1);
    const RankEnd root = ended_by_agent(end_of(1, SIGTERM, 2, 2, 0.5));
    EXPECT_EQ(ranks_of(failures_of({victim, root, ended_by_agent(end_of(2, SIGTERM, 2, 2))})), (Ranks{1, 0}));
    EXPECT_EQ(exit_code_of(failures_of({victim, root})), 1) << "how the agent ended it is not the job's end";
    // Two that name each other: the earlier.
    EXPECT_EQ(ranks_of(failures_of({victim, with_failure(end_of(1, exit_1, 0.5, 0), Code::aborted, 0)})),
              (Ranks{1, 0}));
}

TEST(Failures, WhomTheAgentEndedIsToldOfIfItHadLostItsPeer) {
    const RankEnd root = end_of(1, SIGKILL, 1, 1);
    const RankEnd victim = with_code(end_saying(0, "rank 1 was killed"), Code::peer_lost, 1);
    const RankEnd late = with_failure(ended_by_agent(end_of(2, SIGTERM, 2, 2)), Code::peer_lost, 1);
    const RankEnd of_other = with_code(ended_by_agent(end_saying(3, "rank 4 died")), Code::peer_lost, 4);
    const RankEnd silent = ended_by_agent(end_of(4, SIGTERM, 2, 2));
    EXPECT_EQ(ranks_of(failures_of({silent, late, victim, root, of_other})), (Ranks{1, 0, 2}));
    EXPECT_EQ(ranks_of(failures_of({late, silent})), (Ranks{})) << "nobody failed";
    RankEnd survived = root;
    survived.survived = true;
    EXPECT_EQ(ranks_of(failures_of({late, survived})), (Ranks{1})) << "it told of a loss that it outlived";
}

TEST(Failures, NoneIsNone) {
    EXPECT_TRUE(failures_of({end_of(0, 0, 1, 1), ended_by_agent(end_of(1, 15, 2, 2))}).empty());
}

}  // namespace
}  // namespace tsr
