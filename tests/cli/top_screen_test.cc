// What `tessera top` shows, at several widths.
#include "top/screen.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tsr::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

JobStatus a_job(int ranks) {
    JobStatus job;
    job.job = "0123456789abcdef";
    job.host = "node-with-a-long-name-0";
    job.state = "running";
    job.time = 5000;
    job.started = 1000;
    job.max_restarts = 3;
    job.world_size = ranks;
    job.programs = {"train.py"};
    job.hosts = {{"node-with-a-long-name-0", ranks, true}};
    for (int rank = 0; rank < ranks; ++rank) {
        RankFigures figures{
            .steps = 1200, .step = 41200 - rank, .step_time = 4999, .exposed_s = 1, .bytes = 1 << 30, .saves = 3};
        figures.saved_bytes = 3'500'000'000;
        figures.save = {41000, 4965, 1.24};
        job.ranks.push_back({rank, job.host, "train.py", 4000 + rank, "running", figures});
    }
    job.save = SaveFigures{41000, 4965, 1.24};
    return job;
}

std::vector<RankRates> rates_of(const JobStatus& job) {
    return std::vector<RankRates>(job.ranks.size(), RankRates{8.317, 0.123, 1.25e9});
}

std::string text_of(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    return text;
}

size_t widest(const std::vector<std::string>& lines) {
    size_t most = 0;
    for (const std::string& line : lines) {
        most = std::max<size_t>(most, static_cast<size_t>(std::ranges::count_if(line, [](char c) {
                                    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
                                })));
    }
    return most;
}

TEST(TopScreen, SaysInEightyColumnsHowTheJobIsDoing) {
    const JobStatus job = a_job(2);
    const auto lines = top_screen(job, rates_of(job), {.columns = 80});
    EXPECT_LE(widest(lines), 80U);
    const std::string text = text_of(lines);
    EXPECT_THAT(text, AllOf(HasSubstr("train.py: running for 01:06:40, 2 ranks on 1 host, job 0123456789abcdef\n"),
                            HasSubstr("step 41199, 8.32 steps/s, exposed communication 12.3 %, 2.5 GB/s\n"),
                            HasSubstr("checkpoint of step 41000, 35 s ago, took 1.2 s; round 0, 0 of 3 restarts\n")));
    EXPECT_THAT(lines[lines.size() - 3], AllOf(HasSubstr("RANK"), HasSubstr("STEPS/S"), HasSubstr("COMM"),
                                               HasSubstr("SAVED"), Not(HasSubstr("TOOK"))));
    EXPECT_THAT(lines.back(),
                AllOf(HasSubstr("   1 "), HasSubstr("node-with…"), HasSubstr(" 4001 "), HasSubstr(" 41199 "),
                      HasSubstr(" 8.32 "), HasSubstr(" 12.3 % "), HasSubstr(" 1.2 GB "), HasSubstr(" 35 s")));
    EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

TEST(TopScreen, ShowsMoreWhereThereIsRoom) {
    const JobStatus job = a_job(1);
    const auto lines = top_screen(job, rates_of(job), {.columns = 120});
    EXPECT_LE(widest(lines), 120U);
    EXPECT_THAT(text_of(lines),
                AllOf(HasSubstr("TOOK"), HasSubstr("train.py  "), HasSubstr("node-with-a-long"), HasSubstr("3.5 GB")));
}

TEST(TopScreen, FitsEveryWidthAndHeight) {
    const JobStatus job = a_job(40);
    for (size_t columns = 1; columns <= 200; ++columns) {
        for (const size_t rows : {size_t{0}, size_t{5}, size_t{24}}) {
            const auto lines = top_screen(job, rates_of(job), {.columns = columns, .rows = rows});
            EXPECT_LE(widest(lines), columns);
            if (rows > 0) EXPECT_LE(lines.size(), rows);
            if (rows == 24 && columns >= 36) EXPECT_EQ(lines.back(), "and 22 more ranks; --json shows all");
        }
    }
}

TEST(TopScreen, ARankOfWhichNothingIsKnownHasDashes) {
    JobStatus job = a_job(2);
    job.ranks[1].figures.reset();
    job.ranks[1].pid = 0;
    job.save.reset();
    auto rates = rates_of(job);
    rates[1] = {};
    const auto lines = top_screen(job, rates, {.columns = 80});
    EXPECT_THAT(lines.back(), HasSubstr("-       -"));
    EXPECT_THAT(text_of(lines), HasSubstr("no checkpoint yet"));
}

TEST(TopScreen, ARankThatFailedIsRedWhereThereAreColours) {
    JobStatus job = a_job(2);
    job.ranks[1].state = "SIGKILL";
    const auto lines = top_screen(job, rates_of(job), {.columns = 80, .colours = true});
    EXPECT_THAT(lines.back(),
                AllOf(::testing::StartsWith("\x1b[31m"), HasSubstr("SIGKILL"), ::testing::EndsWith("\x1b[0m")));
}

TEST(TopScreen, NamesReachTheTerminalWithoutControlCharacters) {
    JobStatus job = a_job(1);
    job.programs = {"a\x1b[2Jb"};
    job.ranks[0].host = job.hosts[0].host = "h\nx";
    const std::string text = text_of(top_screen(job, rates_of(job), {.columns = 80}));
    EXPECT_THAT(text, AllOf(HasSubstr("a?[2Jb: running"), HasSubstr("h?x"), Not(HasSubstr("\x1b"))));
}

TEST(TopScreen, AnotherHostsAgentSaysThatItKnowsItsOwnRanks) {
    JobStatus job = a_job(1);
    job.coordinates = false;
    EXPECT_THAT(text_of(top_screen(job, rates_of(job), {.columns = 80})), HasSubstr("only the ranks of this host"));
}

TEST(TopScreen, AgesAndSizesAreShort) {
    EXPECT_EQ(age_text(-1), "0 s");
    EXPECT_EQ(age_text(99.4), "99 s");
    EXPECT_EQ(age_text(120), "2 min");
    EXPECT_EQ(age_text(7200), "2 h");
    EXPECT_EQ(age_text(4 * 86400), "4 d");
    EXPECT_EQ(bytes_text(999), "999 B");
    EXPECT_EQ(bytes_text(999.6), "1.0 kB");
    EXPECT_EQ(bytes_text(123456789), "123 MB");
    EXPECT_EQ(bytes_text(1.25e9), "1.2 GB");
}

}  // namespace
}  // namespace tsr::cli
