// What is said of a job that failed: its cause once and in full, the rest in a line each.
#include "launch/report.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>

#include "base/json.hpp"
#include "ends.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::end_of;
using testing::end_saying;
using testing::end_with;
using testing::ended_by_agent;
using ::testing::EndsWith;
using testing::exit_1;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using testing::with_code;
using testing::with_error_of;
using testing::with_failure;

std::string report(const std::vector<RankEnd>& ends, size_t width = 0) {
    return report_of(failures_of(ends), ends, width);
}

int count(const std::string& text, const std::string& part) {
    int found = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
    return found;
}

TEST(Report, TellsTheCauseOnceAndItsVictimsInALine) {
    const std::string error = "LookupError: there is no sample 17";
    const std::string trace =
        "Traceback (most recent call last):\n  File \"a.py\", line 3, in look_up\n" + error + "\n";
    const auto victim = [](int rank) {
        return with_code(end_saying(rank, fmt::format("PeerLost: rank {}: barrier #1 ended: rank 0 failed: "
                                                      "LookupError: there is no sample 17",
                                                      rank)),
                         Code::peer_lost, 0);
    };
    const std::string text = report({end_saying(0, error, trace), victim(1), victim(2), victim(3), end_of(4, 0, 0.5, 0),
                                     end_with(end_of(5, SIGSEGV, 2, 2), {"own trouble", "deep"})});
    EXPECT_THAT(text,
                StartsWith("the job failed: rank 0 ended with exit code 1: " + error + "\n\n  root cause: rank 0 "));
    EXPECT_EQ(count(text, error), 1) << text;
    EXPECT_THAT(text, AllOf(HasSubstr("    File \"a.py\", line 3, in look_up\n"),
                            HasSubstr("ranks 1-3  exit 1    PEER_LOST because rank 0 failed\n"),
                            HasSubstr("rank 5     SIGSEGV   last stderr line: deep\n"),
                            HasSubstr("rank 4 had already ended with exit code 0")));
}

// C programs print what they like, or nothing.
TEST(Report, ARankThatRecordedNothingIsKnownByItsCommunicatorsFailure) {
    const RankEnd victim = with_failure(end_with(end_of(1, exit_1, 2, 2), {"giving up"}), Code::aborted, 0);
    EXPECT_THAT(report({end_saying(0, "boom"), victim}), HasSubstr("  ABORTED because rank 0 failed"));
    EXPECT_THAT(report({end_of(0, SIGKILL, 1, 0), victim}), HasSubstr("  ABORTED because rank 0 died"));
    EXPECT_THAT(report({with_failure(end_of(0, exit_1, 1, 0), Code::io, -1)}),
                StartsWith("the job failed: rank 0 ended with exit code 1: the communicator of rank 0\n"));
}

TEST(Report, RanksThatDifferFromEachOtherSayItOnce) {
    const auto differing = [](int rank) {
        return end_saying(rank, fmt::format("Mismatch: rank {}: all_reduce #3: rank 1 has i64, the others f32", rank));
    };
    const std::string text = report({differing(0), differing(1), differing(2)});
    EXPECT_EQ(count(text, "rank 1 has i64"), 1) << text;
    EXPECT_THAT(text, HasSubstr("ranks 1 and 2  exit 1    the same as rank 0"));
}

TEST(Report, RanksThatSayTheSameOfAThirdOneSayItOnce) {
    const std::string words = "Mismatch: rank 0: tensor 'w' has a layout of 4 ranks, but the saver has 2";
    const std::string text = report({end_saying(0, words), end_saying(1, words)});
    EXPECT_EQ(count(text, "a layout of 4 ranks"), 1) << text;
    EXPECT_THAT(text, HasSubstr("rank 1  exit 1    the same as rank 0"));
}

TEST(Report, OfAnErrorOfOneRankThatAllReportThatRankIsTheCause) {
    const auto all_saying = [](const std::string& words) {
        std::vector<RankEnd> ends;
        for (const int rank : {0, 1, 2, 3}) {
            ends.push_back(end_saying(rank, words));
            ends.back().order = 5 - rank;  // rank 3 ended first
        }
        return ends;
    };
    const auto of_rank = [](std::vector<RankEnd> ends, int job_rank, int rank) {
        for (RankEnd& end : ends) end = with_error_of(std::move(end), job_rank, rank);
        return ends;
    };
    const std::string known = report(of_rank(all_saying("IO: cannot create /proc/x"), 1, 1));
    EXPECT_THAT(known, AllOf(StartsWith("the job failed: rank 1 "), HasSubstr("root cause: rank 1 "),
                             HasSubstr("ranks 0, 2 and 3  exit 1    the same as rank 1")));
    // Its number in the communicator is another one.
    const std::string in_part = report(of_rank(all_saying("IO: rank 1: cannot create /proc/x"), 2, 1));
    EXPECT_THAT(in_part, AllOf(StartsWith("the job failed: rank 2 "), HasSubstr("root cause: rank 2 ")));
    EXPECT_THAT(report(all_saying("IO: rank 0: of an unknown communicator")), StartsWith("the job failed: rank 3 "));
    std::vector<RankEnd> stopped = of_rank(all_saying("IO: rank 0: cannot create /proc/x"), 0, 0);
    stopped[0] = ended_by_agent(stopped[0]);  // while it was exiting
    EXPECT_THAT(report(stopped), AllOf(StartsWith("the job failed: rank 0 failed or left first, "),
                                       HasSubstr("ranks 1-3  exit 1    the same as rank 0")));
    // The rank itself may report it without its number.
    const std::string refused = report({with_error_of(end_saying(1, "BAD: 3 is odd"), 1, 1),
                                        with_error_of(end_saying(0, "BAD: rank 1: 3 is odd"), 1, 1)});
    EXPECT_THAT(refused, AllOf(StartsWith("the job failed: rank 1 "), HasSubstr("rank 0  exit 1    the same as")));
}

TEST(Report, OfAListTheRankThatTellsItToItsEndIsTheCause) {
    const auto saying = [](int rank, const std::string& end) {
        return end_saying(rank, fmt::format("Mismatch: rank {}: ck does not fit:\n  'a' is missing\n{}", rank, end));
    };
    const std::string whole = "  'b' is missing\n  'c' is missing\n  'd' is missing";
    const std::string text = report({saying(0, "  and 3 more lines; rank 1 has the full list"), saying(1, whole),
                                     saying(2, "  and 3 more lines; rank 1 has the full list")});
    EXPECT_THAT(text, AllOf(HasSubstr("root cause: rank 1 "), HasSubstr("'d' is missing"),
                            Not(HasSubstr("rank 1 has the full list")),
                            HasSubstr("ranks 0 and 2  exit 1    the same as rank 1")));
}

// As Rust's tracebacks are.
TEST(Report, OfATraceThatIsTheMessageOnlyTheCodeIsShown) {
    const std::string text = report({end_saying(0, "no such root", "INVALID_ARGUMENT: no such root")});
    EXPECT_THAT(text, StartsWith("the job failed: rank 0 ended with exit code 1: INVALID_ARGUMENT: no such root\n"));
    EXPECT_EQ(count(text, "no such root"), 1) << text;
    EXPECT_THAT(text, Not(HasSubstr("traceback")));

    const std::string words = "the models differ:\n  'a' is on rank 0 alone\n  'b' too";
    const std::string of_many = report({end_saying(0, words, "MISMATCH: " + words)});
    EXPECT_THAT(of_many, HasSubstr(": MISMATCH: the models differ: 'a' is on rank 0 alone\n"));
    EXPECT_EQ(count(of_many, "MISMATCH"), 1) << of_many;
    EXPECT_EQ(count(of_many, "'b' too"), 1) << of_many;

    const std::string caused = report({end_saying(0, "lost", "IO: lost\n  caused by IO: disk is full")});
    EXPECT_THAT(caused, AllOf(StartsWith("the job failed: rank 0 ended with exit code 1: IO: lost\n"),
                              EndsWith("  rank 0's traceback:\n      caused by IO: disk is full")));
}

TEST(Report, LinesMayBeLong) {
    const std::string much(200000, 'x');
    const std::string trace = "   3: std::" + much + "\n             at " + much + "\n   4: trainer::" + much + "\n";
    const std::string text = report({end_saying(0, "boom", trace), end_saying(1, much)});
    EXPECT_THAT(text, AllOf(HasSubstr("   4: trainer::xxx"), Not(HasSubstr("std::xxx")), Not(HasSubstr(" at xxx"))));
}

TEST(Report, AMessageOfSeveralLinesIsToldInFull) {
    const std::string text = report({end_saying(0, "14 differences:\n  weight: f32\n  bias: gone")});
    EXPECT_THAT(text, AllOf(HasSubstr("exit code 1: 14 differences: weight: f32\n"),
                            HasSubstr("\n      weight: f32\n      bias: gone")));
}

TEST(Report, LinesAreCutToTheTerminalAndBetweenCharacters) {
    RankEnd other = end_saying(1, "ValueError: " + std::string(20, 'x') + "\u00e4\u00f6\u00fc" + std::string(100, 'y'));
    const std::string cause = "the cause is told in full, however long it is: " + std::string(200, 'z');
    RankEnd root = end_saying(0, cause);
    root.order = 0;
    for (size_t width = 60; width < 75; ++width) {
        const std::string text = report({root, other}, width);
        EXPECT_THAT(text, HasSubstr(cause));
        const std::string line = text.substr(text.rfind('\n') + 1);
        EXPECT_TRUE(line.ends_with("\u2026")) << line;
        EXPECT_EQ(std::ranges::count_if(line, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }),
                  static_cast<std::ptrdiff_t>(width));
        EXPECT_TRUE(is_utf8(line));
    }
}

TEST(Report, FramesOfRustsRuntimeAreLeftOut) {
    const std::string trace =
        "   0: tessera::launch::note_panics::{{closure}}::{{closure}}\n             at ./src/launch.rs:90:29\n"
        "   1: <alloc::boxed::Box<F,A> as core::ops::function::Fn<Args>>::call\n             at "
        "/rustc/1/boxed.rs:2036:9\n"
        "   2: std::panicking::rust_panic_with_hook\n   3: rust_begin_unwind\n   4: core::panicking::panic_fmt\n"
        "   5: app::train::step\n             at ./src/train.rs:12:5\n   6: app::main\n"
        "   7: core::ops::function::FnOnce::call_once\n   8: main\n   9: __libc_start_call_main\n  10: _start\n";
    const std::string text = report({end_saying(0, "panicked at src/train.rs:12:5: nan", trace)});
    EXPECT_THAT(text, HasSubstr("rank 0's traceback:\n       5: app::train::step\n                 at "
                                "./src/train.rs:12:5\n       6: app::main"));
    EXPECT_THAT(text, AllOf(Not(HasSubstr("panic_fmt")), Not(HasSubstr("launch.rs")), Not(HasSubstr("main\n      "))));
}

TEST(Report, JavasTraceDoesNotRepeatTheMessage) {
    const std::string error = "java.lang.IllegalStateException: the data is empty";
    const std::string text =
        report({end_saying(0, error, error + "\n\tat a.B.c(B.java:3)\nCaused by: java.io.IOException: no bucket\n")});
    EXPECT_EQ(count(text, error), 1) << text;
    EXPECT_THAT(text, AllOf(HasSubstr("    \tat a.B.c(B.java:3)\n"), HasSubstr("Caused by: java.io.IOException")));
}

TEST(Report, ARankThatLeftWhileOthersNeededItIsNamed) {
    const std::string left = "it left the job with exit status 0 (sys.exit)";
    const std::string told =
        "Aborted: rank 0: barrier #1 ended: rank 1 failed: rank 1 aborted communicator 'world': " + left;
    RankEnd leaver = ended_by_agent(end_saying(1, left));
    const RankEnd victim = with_code(end_saying(0, told), Code::aborted, 1);
    const std::string text = report({victim, leaver});
    EXPECT_THAT(text,
                StartsWith("the job failed: rank 1 failed or left first, and was stopped with the others: " + left));
    EXPECT_THAT(text, HasSubstr("rank 0  exit 1    ABORTED because rank 1 failed or left"));
    EXPECT_THAT(text, Not(HasSubstr("(ended)")));

    RankEnd slow = end_saying(1, left);  // it ended by itself, but after its victim
    slow.wait_status = 0;
    slow.order = 1;
    const std::string of_slow = report({victim, slow});
    EXPECT_THAT(of_slow, StartsWith("the job failed: rank 1 ended with exit code 0 "));
    EXPECT_THAT(of_slow, HasSubstr(": " + left + "\n"));
    EXPECT_THAT(of_slow, HasSubstr("rank 0  exit 1    ABORTED because rank 1 "));
    const std::string of_neither = report({end_saying(0, "Timeout: rank 0: barrier #1: rank 1 did not come"), slow});
    EXPECT_THAT(of_neither, StartsWith("the job failed: rank 0 "));
}

TEST(Report, AsJsonItHasTheCauseAndItsVictimsInFull) {
    RankEnd root = with_code(end_saying(0, "first\nsecond", "Traceback:\n  File"), Code::io, -1);
    root.log_file = "/logs/rank-0.log";
    const RankEnd victim = with_code(end_saying(1, "PeerLost: rank 0 failed"), Code::peer_lost, 0);
    RankEnd lost = end_of(4, exit_1, 2, 2);
    lost.gone = "silence";
    lost.pid = 0;
    const std::vector<RankEnd> ends{root, victim, end_of(2, SIGSEGV | 0x80, 2, 2), end_of(3, 0, 0.5, 0), lost};
    const Json report = report_json(failures_of(ends), ends);
    const Json& cause = report.at("root_cause");
    EXPECT_EQ(cause.at("rank").as_int(), 0);
    EXPECT_EQ(cause.at("exit_code").as_int(), 1);
    EXPECT_EQ(cause.at("code").as_string(), "IO");
    EXPECT_EQ(cause.at("error").as_string(), "first\nsecond");
    EXPECT_EQ(cause.at("traceback").as_string(), "Traceback:\n  File");
    EXPECT_EQ(cause.at("log").as_string(), "/logs/rank-0.log");
    EXPECT_EQ(cause.at("because_of_rank").kind(), Json::Kind::null);
    const auto of_rank = [&](int rank) -> const Json& {
        const Json::Array& then = report.at("then").as_array();
        return *std::ranges::find_if(then, [&](const Json& one) { return one.at("rank").as_int() == rank; });
    };
    EXPECT_EQ(of_rank(1).at("because_of_rank").as_int(), 0);
    EXPECT_EQ(of_rank(2).at("signal").as_string(), "SIGSEGV");
    EXPECT_TRUE(of_rank(2).at("core_dumped").as_bool());
    EXPECT_EQ(of_rank(2).at("exit_code").kind(), Json::Kind::null);
    EXPECT_EQ(of_rank(4).at("host_lost").as_string(), "silence");
    EXPECT_EQ(of_rank(4).at("pid").kind(), Json::Kind::null);
    EXPECT_EQ(report.at("exited_with_0").as_array(), Json::Array{Json(3)});
    EXPECT_EQ(report_json({}, {end_of(0, 0, 1, 1)}).at("root_cause").kind(), Json::Kind::null);
}

}  // namespace
}  // namespace tsr
