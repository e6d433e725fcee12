// One job a root: the lease that a saver holds, who may take it over, and when its holder counts as dead.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/crc32c.hpp"
#include "base/log.hpp"
#include "base/proc.hpp"
#include "checkpoint/root/lease.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "launch/processes.hpp"
#include "saver_fixture.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

TEST_F(SaverTest, ASecondLiveJobIsRefusedByHostAndProcess) {
    Saver first(nullptr, dir_.path(), saver_options());
    const Error error = error_of([&] { Saver second(nullptr, dir_.path(), saver_options()); });
    EXPECT_EQ(error.code(), Code::invalid_state);
    EXPECT_NE(std::string(error.what()).find("process " + std::to_string(::getpid()) + " on "), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("this is the same process: close its other saver"), std::string::npos);
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

// Under `tessera run`, on another host than in the round before. What that one has left does not renew its lease; a job
// that does, and another job's, keep the root.
TEST_F(SaverTest, ANewRoundWaitsForTheLeaseOfAnEarlierOneOnALostHost) {
    const testing::Environment environment({{"TESSERA_JOB_ID", "this job"}, {"TESSERA_EPOCH", "4"}});
    const auto taken_from = [&](const std::string& job, int64_t epoch, bool renews = false) {
        Holder lost = Holder::this_process("lost");
        lost.machine = "another boot";
        lost.job = job;
        lost.epoch = epoch;
        spill(dir_ / ".owner", lost.dump());
        std::atomic<bool> decided = false;
        std::thread renewal([&] {
            while (renews && !decided) (void)posix_file_system().touch(dir_ / ".owner");
        });
        const std::optional<Error> refused = [&]() -> std::optional<Error> {
            try {
                const Lease lease(posix_file_system(), dir_.path(), random_uuid(),
                                  {milliseconds{50}, milliseconds{500}});
                return std::nullopt;
            } catch (const Error& error) {
                return error;
            }
        }();
        decided = true;
        renewal.join();
        EXPECT_TRUE(!refused || refused->code() == Code::invalid_state) << refused->what();
        return !refused;
    };
    EXPECT_TRUE(taken_from("this job", 3));
    EXPECT_FALSE(taken_from("this job", 3, true)) << "it lives";
    EXPECT_FALSE(taken_from("this job", 4));
    EXPECT_FALSE(taken_from("another job", 3));
    EXPECT_FALSE(taken_from("", 0));
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

// --- who is dead

constexpr int other_pid = 4242;

// A host on which one other process may be seen.
class FakeView final : public ProcessView {
   public:
    Holder me;
    Look found;
    int64_t asked = 0;

    FakeView() {
        me.machine = "boot pid:[1] time:[1]";
        me.pid = 1000;
        me.start_time = 77;
        me.image = "now";
        found.stat = running();
    }
    [[nodiscard]] static ProcessStat running() {
        ProcessStat stat;
        stat.state = 'S';
        stat.threads = 1;
        stat.start_time = 55;
        return stat;
    }
    [[nodiscard]] Holder self() const override { return me; }
    [[nodiscard]] Look look(int64_t pid) const override { return pid == other_pid || pid == me.pid ? found : Look{}; }
};

Holder other_holder() {
    Holder holder;
    holder.id = "other";
    holder.machine = "boot pid:[1] time:[1]";
    holder.pid = other_pid;
    holder.start_time = 55;
    holder.image = "now";
    return holder;
}

TEST(LeaseDecision, IsKnownDeathOrElseTheAgeOfTheRenewal) {
    const LeaseTimes times;  // 60 s
    const std::vector<LeaseAge> ages = {
        std::chrono::seconds(0),   std::chrono::seconds(59), std::chrono::seconds(-59),       std::chrono::seconds(60),
        std::chrono::seconds(-60), std::chrono::hours(24),   std::chrono::nanoseconds::max(), std::nullopt};
    // 1: it counts. In order of the ages.
    const std::string always = "11111111";
    const std::string never = "00000000";
    const std::string by_age = "11100001";
    const struct {
        Seen seen;
        Boot boot;
        std::string live;
    } rows[] = {
        {Seen::alive, Boot::same, always},          {Seen::alive, Boot::other, by_age},
        {Seen::alive, Boot::unknown, by_age},       {Seen::dead, Boot::same, never},
        {Seen::dead, Boot::other, by_age},          {Seen::dead, Boot::unknown, by_age},
        {Seen::not_visible, Boot::same, by_age},    {Seen::not_visible, Boot::other, by_age},
        {Seen::not_visible, Boot::unknown, by_age},
    };
    for (const auto& row : rows) {
        for (size_t i = 0; i < ages.size(); ++i) {
            EXPECT_EQ(is_live({row.seen, row.boot}, ages[i], times), row.live[i] == '1')
                << "seen " << static_cast<int>(row.seen) << ", boot " << static_cast<int>(row.boot) << ", age " << i;
        }
    }
}

TEST(LeaseSight, TellsTheDeadFromThoseThatCannotBeSeen) {
    struct Row {
        const char* what;
        std::function<void(FakeView&, Holder&)> change;
        Seen seen;
        Boot boot;
    };
    const auto nothing = [](FakeView&, Holder&) {};
    const Row rows[] = {
        {"it runs", nothing, Seen::alive, Boot::same},
        {"it is stopped", [](FakeView& v, Holder&) { v.found.stat->state = 'T'; }, Seen::alive, Boot::same},
        {"no such process", [](FakeView& v, Holder&) { v.found = {true, std::nullopt}; }, Seen::dead, Boot::same},
        {"its pid is another's now", [](FakeView& v, Holder&) { v.found.stat->start_time = 56; }, Seen::dead,
         Boot::same},
        {"a zombie", [](FakeView& v, Holder&) { v.found.stat->state = 'Z'; }, Seen::dead, Boot::same},
        {"its first thread has ended, others live",
         [](FakeView& v, Holder&) {
             v.found.stat->state = 'Z';
             v.found.stat->threads = 3;
         },
         Seen::alive, Boot::same},
        {"hidepid, another user", [](FakeView& v, Holder&) { v.found = {}; }, Seen::not_visible, Boot::same},
        {"it could not tell when it started", [](FakeView&, Holder& h) { h.start_time = 0; }, Seen::not_visible,
         Boot::same},
        {"another time namespace", [](FakeView&, Holder& h) { h.machine = "boot pid:[1] time:[2]"; }, Seen::not_visible,
         Boot::same},
        {"another time namespace, and gone",
         [](FakeView& v, Holder& h) {
             h.machine = "boot pid:[1] time:[2]";
             v.found = {true, std::nullopt};
         },
         Seen::dead, Boot::same},
        {"it named no time namespace", [](FakeView&, Holder& h) { h.machine = "boot pid:[1]"; }, Seen::not_visible,
         Boot::same},
        {"another pid namespace, where the pid is gone",
         [](FakeView& v, Holder& h) {
             h.machine = "boot pid:[2] time:[1]";
             v.found = {true, std::nullopt};
         },
         Seen::not_visible, Boot::same},
        {"no pid namespace can be told",
         [](FakeView& v, Holder& h) {
             v.me.machine = h.machine = "boot ";
             v.found = {true, std::nullopt};
         },
         Seen::not_visible, Boot::same},
        {"another boot, or host",
         [](FakeView& v, Holder& h) {
             h.machine = "reboot pid:[1] time:[1]";
             v.found = {true, std::nullopt};
         },
         Seen::not_visible, Boot::other},
        {"neither knows a boot id: the first pid namespace has the same name on all hosts",
         [](FakeView& v, Holder& h) {
             v.me.machine = h.machine = " pid:[1] time:[1]";
             v.found = {true, std::nullopt};
         },
         Seen::not_visible, Boot::unknown},
        {"its own boot id alone is not known", [](FakeView&, Holder& h) { h.machine = " pid:[1] time:[1]"; },
         Seen::not_visible, Boot::unknown},
        {"an unreadable lease", [](FakeView&, Holder& h) { h = Holder{}; }, Seen::not_visible, Boot::unknown},
        {"this process", [](FakeView& v, Holder& h) { h.pid = v.me.pid; }, Seen::alive, Boot::same},
        {"this process before an exec",
         [](FakeView& v, Holder& h) {
             h.pid = v.me.pid;
             h.image = "before";
         },
         Seen::dead, Boot::same},
        {"this process, which image is not known",
         [](FakeView& v, Holder& h) {
             h.pid = v.me.pid;
             h.image = "";
         },
         Seen::alive, Boot::same},
        {"another process that may have made an exec: nobody else can tell",
         [](FakeView&, Holder& h) { h.image = "before"; }, Seen::alive, Boot::same},
    };
    for (const Row& row : rows) {
        FakeView view;
        Holder holder = other_holder();
        row.change(view, holder);
        const Sight sight = sight_of(holder, view);
        EXPECT_EQ(sight.seen, row.seen) << row.what;
        EXPECT_EQ(sight.boot, row.boot) << row.what;
    }
}

TEST(LeaseSight, OfRealProcesses) {
    const ProcessView view;
    EXPECT_EQ(sight_of(Holder::this_process("me"), view).seen, Seen::alive);
    EXPECT_FALSE(Holder::this_process("me").image.empty());
    EXPECT_EQ(Holder::parse(Holder::this_process("me").dump()).image, Holder::this_process("me").image);
    for (const int64_t pid : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
        EXPECT_FALSE(view.look(pid).gone) << "a damaged lease";
        EXPECT_FALSE(view.look(pid).stat) << "a damaged lease";
    }
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(view.look(child).gone);
}

// As a C program may: main ends by pthread_exit, and other threads go on saving.
TEST_F(SaverTest, AJobWhoseFirstThreadHasEndedKeepsItsRoot) {
    int ended[2];
    ASSERT_EQ(::pipe(ended), 0);
    const pid_t child = ::fork();
    if (child == 0) {
        std::ofstream(dir_ / ".owner") << Holder::this_process("child").dump();
        std::thread([&, at = ::getpid()] {
            while (process_stat(at)->state != 'Z') std::this_thread::yield();
            const bool told = Holder::this_process("child").dump() == slurp(dir_ / ".owner");
            (void)!::write(ended[1], told ? "y" : "n", 1);
            while (true) ::pause();
        }).detach();
        ::syscall(SYS_exit, 0);  // this thread, not the process
    }
    char same = '?';
    ASSERT_EQ(::read(ended[0], &same, 1), 1);
    EXPECT_EQ(same, 'y') << "it tells the same of itself as before";
    const Error error = error_of([&] { Saver second(nullptr, dir_.path(), saver_options()); });
    EXPECT_EQ(error.code(), Code::invalid_state);
    ::kill(child, SIGKILL);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_NO_THROW(Saver(nullptr, dir_.path(), saver_options()));
    ::close(ended[0]);
    ::close(ended[1]);
}

TEST_F(SaverTest, AProcessKeepsItsRootThroughAnExec) {
    Holder before = Holder::this_process("before the exec");
    before.image = "0011223344556677";
    spill(dir_ / ".owner", before.dump());
    const std::string writing = dir_ / "step-00000001-00000000";
    std::filesystem::create_directory(writing);
    spill(writing + "/.writing", before.dump());
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(2, owned_.state);
    EXPECT_FALSE(std::filesystem::exists(writing)) << "what it wrote when it was replaced";
    EXPECT_EQ(committed(dir_.path()), Steps{"2"});
}

TEST_F(SaverTest, TheRefusalSaysWhenALeaseLapses) {
    Holder elsewhere = Holder::this_process("elsewhere");
    elsewhere.machine = "another boot";
    spill(dir_ / ".owner", elsewhere.dump());
    std::filesystem::last_write_time(dir_ / ".owner",
                                     std::filesystem::file_time_type::clock::now() - std::chrono::seconds(30));
    for (const bool looks_only : {true, false}) {
        const std::string what = error_of([&] {
                                     if (looks_only) return check_not_held(posix_file_system(), dir_.path());
                                     Saver second(nullptr, dir_.path(), saver_options());
                                 }).what();
        std::smatch seconds;
        ASSERT_TRUE(std::regex_search(what, seconds, std::regex("expires in ([0-9]+) s"))) << what;
        EXPECT_LE(std::stoi(seconds[1]), 31);
        EXPECT_GT(std::stoi(seconds[1]), 0);
    }
    FaultyFiles files(posix_file_system(), [](const FaultyFiles::Call& call) -> Verdict {
        return call.name.find(".probe-") != std::string::npos ? Verdict{-EACCES, 0} : Verdict{};
    });
    const std::string what = error_of([&] { check_not_held(files, dir_.path()); }).what();
    EXPECT_NE(what.find("remove " + dir_.path() + "/.owner"), std::string::npos) << what;
}

// It would lengthen the life of a thief that is dead.
TEST_F(SaverTest, ASaverDoesNotRenewTheLeaseOfWhoTookItsRoot) {
    std::atomic<bool> gave_up{false};
    log::set_level(log::Level::warning);
    log::set_sink(
        [](int32_t, const char* line, void* told) {
            if (std::string_view(line).find("was taken over") != std::string_view::npos) {
                *static_cast<std::atomic<bool>*>(told) = true;
            }
        },
        &gave_up, nullptr);
    SaverOptions options = saver_options();
    options.lease.renew = milliseconds{1};
    {
        Saver saver(nullptr, dir_.path(), options);
        spill(dir_ / ".owner.new", Holder::this_process("thief").dump());
        std::filesystem::rename(dir_ / ".owner.new", dir_ / ".owner");
        wait_until([&] { return gave_up.load(); }, soon(), "the end of the renewals");
    }
    log::set_sink(nullptr, nullptr, nullptr);
    log::set_level(log::Level::error);
}

}  // namespace
}  // namespace tsr::testing
