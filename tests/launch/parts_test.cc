// The launcher's parts that need no process: what the next round is, cutting lines, ordering failures, ports.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "launch/job.hpp"
#include "launch/log_mux.hpp"
#include "launch/port.hpp"
#include "launch/process.hpp"
#include "launch/summary.hpp"
#include "processes.hpp"

namespace tsr {
namespace {

RunOptions job(int ranks, int min_ranks, OnLoss on_loss) {
    RunOptions options;
    options.programs.push_back({{"a"}, ranks - 1, {}});
    options.programs.push_back({{"b"}, 1, {}});
    options.min_ranks = min_ranks;
    options.on_loss = on_loss;
    return options;
}

TEST(NextRound, RestartKeepsTheSizeWhileRestartsLastThenShrinks) {
    const RunOptions options = job(4, 3, OnLoss::restart);
    const auto members = first_round(options);
    const auto again = next_round(options, members, {1}, 1);
    ASSERT_TRUE(again);
    EXPECT_EQ(again->members, members);
    EXPECT_TRUE(again->uses_restart);
    const auto fewer = next_round(options, members, {1}, 0);
    ASSERT_TRUE(fewer);
    EXPECT_FALSE(fewer->uses_restart);
    EXPECT_EQ(fewer->members, (std::vector<Member>{{0, 0}, {0, 2}, {1, 0}}));
}

TEST(NextRound, ShrinkComesFirstWhereAskedAndEndsAtTheLeast) {
    const RunOptions options = job(4, 3, OnLoss::shrink);
    const auto members = first_round(options);
    const auto fewer = next_round(options, members, {3}, 5);
    ASSERT_TRUE(fewer);
    EXPECT_EQ(fewer->members, (std::vector<Member>{{0, 0}, {0, 1}, {0, 2}}));
    const auto again = next_round(options, fewer->members, {0}, 1);
    ASSERT_TRUE(again) << "too few are left, but a restart is";
    EXPECT_TRUE(again->uses_restart);
    EXPECT_EQ(again->members, fewer->members);
    EXPECT_FALSE(next_round(options, fewer->members, {0}, 0));
}

TEST(NextRound, FixedSizeWithoutRestartsEnds) {
    const RunOptions options = job(2, 0, OnLoss::restart);
    EXPECT_FALSE(next_round(options, first_round(options), {0}, 0));
}

TEST(NextRound, AllLostIsNoRound) {
    const RunOptions options = job(2, 1, OnLoss::shrink);
    EXPECT_FALSE(next_round(options, first_round(options), {0, 1}, 0));
}

std::vector<std::string> cut(const std::vector<std::string>& pieces) {
    LineBuffer buffer;
    std::vector<std::string> lines;
    const auto take = [&](std::string_view line) { lines.emplace_back(line); };
    for (const std::string& piece : pieces) buffer.feed(piece, take);
    buffer.finish(take);
    return lines;
}

TEST(LineBuffer, CutsWhereverThePiecesEnd) {
    using Lines = std::vector<std::string>;
    EXPECT_EQ(cut({}), Lines{});
    EXPECT_EQ(cut({"a\nb\n"}), (Lines{"a", "b"}));
    EXPECT_EQ(cut({"a", "b\n\n", "\nc"}), (Lines{"ab", "", "", "c"}));
    EXPECT_EQ(cut({"a\r\n", "b\r", "\n"}), (Lines{"a", "b"}));
    EXPECT_EQ(cut({" 1%\r 2%\r", "100%\nnext\n"}), (Lines{"100%", "next"}));
}

TEST(LineBuffer, AnyCutGivesTheSameLines) {
    const uint32_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::string text;
    for (int i = 0; i < 5000; ++i) text += random() % 7 == 0 ? '\n' : static_cast<char>('a' + random() % 26);
    const auto whole = cut({text});
    std::vector<std::string> pieces;
    for (std::string_view rest = text; !rest.empty();) {
        const size_t size = std::min<size_t>(1 + random() % 20, rest.size());
        pieces.emplace_back(rest.substr(0, size));
        rest.remove_prefix(size);
    }
    EXPECT_EQ(cut(pieces), whole);
}

TEST(LineBuffer, EndlessLineIsCutAndNothingIsLost) {
    const std::string endless(LineBuffer::max_line * 2 + 10, 'x');
    const auto lines = cut({endless, "\n"});
    ASSERT_EQ(lines.size(), 3U);
    EXPECT_EQ(lines[0] + lines[1] + lines[2], endless);
    const auto exact = cut({std::string(LineBuffer::max_line, 'y') + "\nz\n"});
    EXPECT_EQ(exact, (std::vector<std::string>{std::string(LineBuffer::max_line, 'y'), "z"}));
}

RankEnd end_of(int rank, int status, double time, int order, std::optional<double> recorded = std::nullopt) {
    RankEnd end{rank, "host", 100 + rank, status, time, order, false, "", std::nullopt, {}};
    if (recorded) end.error = RecordedError{"boom", "", *recorded};
    return end;
}

RankEnd end_with(RankEnd end, std::vector<std::string> last_lines) {
    end.last_lines = std::move(last_lines);
    return end;
}

RankEnd ended_by_agent(RankEnd end) {
    end.by_agent = true;
    return end;
}

std::vector<int> ranks_of(const std::vector<RankEnd>& ends) {
    std::vector<int> ranks;
    for (const RankEnd& end : ends) ranks.push_back(end.rank);
    return ranks;
}

constexpr int exit_1 = 1 << 8;
using Ranks = std::vector<int>;

TEST(Failures, RootCauseIsTheEarliestAndAKilledRankBeforeItsVictims) {
    const std::vector<RankEnd> ends = {end_of(0, exit_1, 10.2, 2, 10.1), end_of(1, exit_1, 10.0, 1, 9.9),
                                       end_of(2, SIGKILL, 10.0, 1), end_of(3, exit_1, 10.0, 1, 9.8),
                                       end_of(4, 0, 9.0, 0)};
    const auto failures = failures_of(ends);
    EXPECT_EQ(ranks_of(failures), (Ranks{2, 3, 1, 0}));
    const std::string text = summary_of(failures, ends);
    EXPECT_LT(text.find("rank 2 was killed by SIGKILL (somebody killed it, or the kernel"), text.find("boom"));
    EXPECT_THAT(text, ::testing::HasSubstr("rank 4 had ended before, with exit code 0"));
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
    EXPECT_EQ(message({"", "\tat a.B.c(B.java:3)"}), "");
    EXPECT_EQ(message({}), "");
}

TEST(Failures, ARankThatLeftWithExitCodeZeroIsTheCauseOfThoseThatMissIt) {
    const std::string lost = "tessera: PEER_LOST: rank 0: barrier #2 failed: rank 1 (pid 101) died; its last operation";
    const std::vector<RankEnd> ends = {end_with(end_of(0, exit_1, 10.1, 2), {lost, "giving up"}), end_of(1, 0, 10.0, 1),
                                       end_of(2, 0, 9.9, 1)};
    const auto failures = failures_of(ends);
    EXPECT_EQ(ranks_of(failures), (Ranks{1, 0}));
    EXPECT_EQ(exit_code_of(failures), 1);
    EXPECT_THAT(summary_of(failures, ends),
                ::testing::HasSubstr("the job failed: rank 1 ended with exit code 0 (its peers still needed it"));
    // By its number where the process is the child of a wrapper; but not one that ended after the failure.
    const std::string child = "rank 0: barrier #2 failed: rank 1 (pid 7, host x) left the communicator";
    EXPECT_EQ(ranks_of(failures_of({end_with(end_of(0, exit_1, 2, 2), {child}), end_of(1, 0, 1, 1)})), (Ranks{1, 0}));
    EXPECT_EQ(ranks_of(failures_of({end_with(end_of(0, exit_1, 1, 1), {child}), end_of(1, 0, 2, 2)})), (Ranks{0}));
    // A crash of its own is nobody's doing, whatever was said before.
    EXPECT_EQ(ranks_of(failures_of({end_with(end_of(0, SIGSEGV, 2, 2), {child}), end_of(1, 0, 1, 1)})), (Ranks{0}));
}

TEST(Failures, ARankThatWasSlowToEndComesBeforeItsVictims) {
    const std::string told = "rank 0: barrier #2 ended: rank 1 failed: rank 1: out of memory";
    const RankEnd victim = end_with(end_of(0, exit_1, 1, 1), {told});
    const RankEnd root = ended_by_agent(end_of(1, SIGTERM, 2, 2, 0.5));
    EXPECT_EQ(ranks_of(failures_of({victim, root, ended_by_agent(end_of(2, SIGTERM, 2, 2))})), (Ranks{1, 0}));
    EXPECT_EQ(exit_code_of(failures_of({victim, root})), 1) << "how the agent ended it is not the job's end";
    // Two that name each other: the earlier.
    const std::string back = "rank 1: barrier #2 ended: rank 0 failed: rank 0: interrupted";
    EXPECT_EQ(ranks_of(failures_of({victim, end_with(end_of(1, exit_1, 0.5, 0), {back})})), (Ranks{1, 0}));
}

TEST(Failures, NoneIsNone) {
    EXPECT_TRUE(failures_of({end_of(0, 0, 1, 1), ended_by_agent(end_of(1, 15, 2, 2))}).empty());
}

TEST(Tail, KeepsTheLastLinesOnly) {
    Tail tail;
    for (size_t i = 0; i < Tail::max_lines + 5; ++i) tail.add(std::to_string(i));
    tail.add(std::string(Tail::max_line + 10, 'x'));
    EXPECT_EQ(tail.lines().size(), Tail::max_lines);
    EXPECT_EQ(tail.lines().front(), "6");
    EXPECT_EQ(tail.lines().back(), std::string(Tail::max_line, 'x'));
}

TEST(Port, ReservationsNeverGiveTheSamePort) {
    std::set<uint16_t> ports;
    std::vector<PortReservation> held(50);
    for (const PortReservation& reservation : held) {
        EXPECT_TRUE(ports.insert(reservation.port()).second);
        Address address{"127.0.0.1", reservation.port()};
        EXPECT_TRUE(listen_on(address).valid()) << "a rank can listen on it";
    }
}

TEST(Executable, IsFoundInPathOrNamedAsMissing) {
    EXPECT_EQ(find_executable("/bin/sh"), "/bin/sh");
    EXPECT_THAT(find_executable("sh"), ::testing::EndsWith("/sh"));
    const auto code = [](const char* command) {
        try {
            (void)find_executable(command);
        } catch (const Error& error) {
            return error.code();
        }
        return Code::ok;
    };
    EXPECT_EQ(code("/etc/passwd"), Code::permission);
    EXPECT_EQ(code("/tmp"), Code::permission);
    EXPECT_EQ(code("tessera-no-such-program"), Code::not_found);
}

}  // namespace
}  // namespace tsr
