// The launcher's parts that need no process: what the next round is, cutting lines, ports.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "launch/job.hpp"
#include "launch/job_directory.hpp"
#include "launch/log_mux.hpp"
#include "launch/port.hpp"
#include "launch/process.hpp"
#include "processes.hpp"
#include "seed.hpp"

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

std::vector<RankIdentity> first_round(const RunOptions& options) {
    std::vector<int> ranks;
    for (const Program& program : options.programs) ranks.push_back(program.ranks);
    return ranks_of_host(ranks, 0);
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
    EXPECT_EQ(fewer->members, (std::vector<RankIdentity>{{0, 0}, {0, 2}, {1, 0}}));
}

TEST(NextRound, ShrinkComesFirstWhereAskedAndEndsAtTheLeast) {
    const RunOptions options = job(4, 3, OnLoss::shrink);
    const auto members = first_round(options);
    const auto fewer = next_round(options, members, {3}, 5);
    ASSERT_TRUE(fewer);
    EXPECT_EQ(fewer->members, (std::vector<RankIdentity>{{0, 0}, {0, 1}, {0, 2}}));
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

TEST(NextRound, WhyThereIsNoneIsTold) {
    RunOptions options = job(4, 0, OnLoss::restart);
    EXPECT_EQ(why_no_round(options, first_round(options), {1}, 0), "");
    options.max_restarts = 2;
    EXPECT_EQ(why_no_round(options, first_round(options), {1}, 2), "2 of 2 restarts used (--max-restarts)");
    options = job(4, 3, OnLoss::shrink);
    EXPECT_EQ(why_no_round(options, first_round(options), {1, 2}, 0),
              "2 of 4 ranks left (ranks 0 and 3), fewer than --min-ranks 3");
    options.max_restarts = 1;
    EXPECT_EQ(why_no_round(options, first_round(options), {0, 1, 2, 3}, 1),
              "1 of 1 restarts used (--max-restarts); 0 of 4 ranks left, fewer than --min-ranks 3");
}

TEST(RankSpans, AreShort) {
    EXPECT_EQ(rank_spans({4}), "rank 4");
    EXPECT_EQ(rank_spans({5, 4}), "ranks 4 and 5");
    EXPECT_EQ(rank_spans({3, 1, 2}), "ranks 1-3");
    EXPECT_EQ(rank_spans({0, 9, 2, 3, 4, 7}), "ranks 0, 2-4, 7 and 9");
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
    const testing::Seed seed;
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

// What is relied on: tmpfiles.d(5) on flock(), and times.
TEST(JobDirectory, CleanersOfTemporaryFilesLeaveItAlone) {
    const JobDirectory job;
    const Fd cleaner(::open(job.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    EXPECT_EQ(::flock(cleaner.get(), LOCK_EX | LOCK_NB), -1);
    EXPECT_EQ(errno, EWOULDBLOCK);
    const std::string file = job.path() + "/round-0/rank-0.error.json";
    std::filesystem::create_directory(job.path() + "/round-0");
    std::ofstream(file) << "{}";
    const std::array<timespec, 2> long_ago{};
    for (const std::string& path : {job.path(), job.path() + "/round-0", file, job.path() + "/owner"}) {
        ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), long_ago.data(), 0), 0);
    }
    job.renew();
    for (const std::string& path : {job.path(), job.path() + "/round-0", file, job.path() + "/owner"}) {
        struct stat info{};
        ASSERT_EQ(::stat(path.c_str(), &info), 0);
        EXPECT_GT(info.st_mtime, 1'700'000'000) << path;
        EXPECT_GT(info.st_atime, 1'700'000'000) << path;
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
