// One job a root: the lease that a saver holds, who may take it over, and when its holder counts as dead.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "base/crc32c.hpp"
#include "checkpoint/native/lease.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "saver_fixture.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

TEST_F(SaverTest, ASecondLiveJobIsRefusedByHostAndProcess) {
    Saver first(nullptr, dir_.path(), saver_options());
    const Error error = error_of([&] { Saver second(nullptr, dir_.path(), saver_options()); });
    EXPECT_EQ(error.code(), Code::invalid_state);
    EXPECT_NE(std::string(error.what()).find("process " + std::to_string(::getpid()) + " on "), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("which is this one: close the saver"), std::string::npos);
    first.save(1, owned_.state);
}

// A child of fork has copies of everything but the threads; what it destroys is still its parent's.
TEST_F(SaverTest, AForkedChildLeavesTheRootToItsParent) {
    auto saver = std::make_unique<Saver>(nullptr, dir_.path(), saver_options());
    const pid_t child = ::fork();
    if (child == 0) {
        saver.reset();
        ::_exit(0);
    }
    int status = -1;
    try {
        wait_until([&] { return ::waitpid(child, &status, WNOHANG) == child; }, soon(), "child");
    } catch (const Error&) {
        ::kill(child, SIGKILL);
        ::waitpid(child, &status, 0);
    }
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    saver->save(1, owned_.state);
}

TEST_F(SaverTest, ADeadJobsRootIsTakenOver) {
    const pid_t child = ::fork();
    if (child == 0) {
        // Dies without giving the root back.
        const Holder holder = Holder::this_process("child");
        std::ofstream(dir_ / ".owner") << holder.dump();
        ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(std::filesystem::exists(dir_ / ".owner"));
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, owned_.state);
    EXPECT_EQ(Holder::parse(slurp(dir_ / ".owner")).pid, ::getpid());
}

TEST_F(SaverTest, AZombiesRootIsTakenOver) {
    const pid_t child = ::fork();
    if (child == 0) {
        const Holder holder = Holder::this_process("child");
        std::ofstream(dir_ / ".owner") << holder.dump();
        ::_exit(0);
    }
    siginfo_t info{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);  // dead, not yet reaped
    EXPECT_NO_THROW(Saver(nullptr, dir_.path(), saver_options()).save(1, owned_.state));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
}

TEST_F(SaverTest, OneOfManySaversGetsADeadRoot) { expect_one_winner(saver_options()); }

// A job that died between making the mark of a takeover and writing it.
TEST_F(SaverTest, AnEmptyMarkOfATakeoverHoldsNobodyUpForEver) {
    Holder dead = Holder::this_process("dead");
    dead.start_time -= 1;
    spill(dir_ / ".owner", dead.dump());
    const std::string mark = dir_ / fmt::format(".owner.stale-{}", hex8(crc32c(dead.dump())));
    spill(mark, "");
    std::filesystem::last_write_time(mark, std::filesystem::file_time_type::clock::now() - std::chrono::minutes(5));
    EXPECT_NO_THROW(Saver(nullptr, dir_.path(), saver_options()));
}

// As on FAT, SMB and some file systems in user space.
TEST_F(SaverTest, WhereThereAreNoHardLinksOneJobOwnsARootAllTheSame) {
    for (const int refusal : {EPERM, ENOSYS, EOPNOTSUPP}) {
        FaultyFiles files(posix_file_system(), [refusal](const FaultyFiles::Call& call) -> Verdict {
            return call.name.starts_with("link ") ? Verdict{-refusal, 0} : Verdict{};
        });
        SaverOptions options = saver_options();
        options.files = &files;
        {
            Saver first(nullptr, dir_.path(), options);
            const Error error = error_of([&] { Saver second(nullptr, dir_.path(), options); });
            EXPECT_EQ(error.code(), Code::invalid_state);
            EXPECT_NE(std::string(error.what()).find(fmt::format("process {} on ", ::getpid())), std::string::npos);
            first.save(refusal, owned_.state);
        }
        EXPECT_FALSE(std::filesystem::exists(dir_ / ".owner"));
        expect_one_winner(options);
    }
}

TEST_F(SaverTest, ALeaseIsRenewed) {
    SaverOptions options = saver_options();
    options.lease.renew = milliseconds{5};
    Saver saver(nullptr, dir_.path(), options);
    const auto past = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
    std::filesystem::last_write_time(dir_ / ".owner", past);
    wait_until(
        [&] {
            return std::filesystem::last_write_time(dir_ / ".owner") >
                   std::filesystem::file_time_type::clock::now() - std::chrono::minutes(1);
        },
        soon(), "the renewal");
}

TEST_F(SaverTest, ASaverWhoseRootWasTakenSavesNoMore) {
    Saver saver(nullptr, dir_.path(), saver_options());
    spill(dir_ / ".owner", Holder::this_process("thief").dump());
    const Error error = error_of([&] { saver.save(1, owned_.state); });
    EXPECT_EQ(error.code(), Code::invalid_state);
    EXPECT_TRUE(committed(dir_.path()).empty());
}

TEST_F(SaverTest, AnotherHostsLeaseLivesAsLongAsItIsRenewed) {
    Holder elsewhere = Holder::this_process("elsewhere");
    elsewhere.host = "other-host";
    elsewhere.machine = "another boot";
    spill(dir_ / ".owner", elsewhere.dump());
    const Error error = error_of([&] { Saver second(nullptr, dir_.path(), saver_options()); });
    EXPECT_NE(std::string(error.what()).find("on other-host"), std::string::npos);
    // Not renewed for longer than its span.
    const auto past = std::filesystem::file_time_type::clock::now() - std::chrono::minutes(5);
    std::filesystem::last_write_time(dir_ / ".owner", past);
    EXPECT_NO_THROW(Saver third(nullptr, dir_.path(), saver_options()));
}

// Whatever the clock of the file system did: who lives renews the lease by that clock.
TEST_F(SaverTest, ALeaseOfAnotherHostIsJudgedByItsDistanceFromNow) {
    using std::chrono::hours;
    using std::chrono::seconds;
    const auto now = std::filesystem::file_time_type::clock::now();
    const auto epoch = std::filesystem::file_time_type(
        std::chrono::file_clock::from_sys(std::chrono::sys_time<std::chrono::nanoseconds>{}).time_since_epoch());
    Holder elsewhere = Holder::this_process("elsewhere");
    elsewhere.machine = "another boot";
    const auto is_live_at = [&](std::filesystem::file_time_type modified) {
        spill(dir_ / ".owner", elsewhere.dump());
        std::filesystem::last_write_time(dir_ / ".owner", modified);
        return is_live(posix_file_system(), dir_ / ".owner", elsewhere, {});
    };
    EXPECT_TRUE(is_live_at(now));
    EXPECT_TRUE(is_live_at(now - seconds(30)));
    EXPECT_TRUE(is_live_at(now + seconds(30))) << "clocks are corrected a little";
    EXPECT_FALSE(is_live_at(now - hours(1)));
    EXPECT_FALSE(is_live_at(now + hours(1))) << "the clock was set back since it died";
    EXPECT_FALSE(is_live_at(epoch)) << "1970 is a time as any other";
    EXPECT_FALSE(is_live_at(epoch - hours(1)));
    EXPECT_FALSE(is_live_at(now + hours(24 * 365 * 230))) << "beyond what nanoseconds tell";
    is_live_at(epoch);
    EXPECT_NO_THROW(Saver taken(nullptr, dir_.path(), saver_options()));
}

TEST_F(SaverTest, AHostOfAnyNameHoldsALeaseThatAllCanRead) {
    for (const std::string host : {"a \"quoted\" host", "two\nlines", "back\\slash", "tab\there", ""}) {
        Holder holder = Holder::this_process("anyone");
        holder.host = host;
        EXPECT_EQ(Holder::parse(holder.dump()).host, host);
    }
    Holder elsewhere = Holder::this_process("elsewhere");
    elsewhere.host = "a\nb\x1b[31m";
    elsewhere.machine = "another boot";
    spill(dir_ / ".owner", elsewhere.dump());
    const Error error = error_of([&] { Saver second(nullptr, dir_.path(), saver_options()); });
    EXPECT_NE(std::string(error.what()).find("on a?b?[31m;"), std::string::npos) << error.what();
}

}  // namespace
}  // namespace tsr::testing
