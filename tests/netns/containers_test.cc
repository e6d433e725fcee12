// What containers see of each other: pid, mount, network and host name spaces, as root may make them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/proc.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/root/lease.hpp"
#include "comm/host.hpp"
#include "temporary_directory.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

enum class Proc { outer, own, none };

// What `body` returns in a process of new name spaces: the first one there, if `flags` has CLONE_NEWPID. nullopt: this user
// may not make them.
std::optional<std::string> within(int flags, Proc proc, const std::function<std::string()>& body) {
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC) != 0) throw os_error("pipe", errno);
    const Fd from(fds[0]);
    Fd to(fds[1]);
    const pid_t maker = ::fork();
    if (maker == 0) {
        if (::unshare(flags | CLONE_NEWNS) != 0) ::_exit(77);
        const pid_t inside = ::fork();
        if (inside == 0) {
            std::string said;
            try {
                ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
                if (proc == Proc::own && ::mount("proc", "/proc", "proc", 0, nullptr) != 0) ::_exit(77);
                if (proc == Proc::none && ::mount("none", "/proc", "tmpfs", 0, nullptr) != 0) ::_exit(77);
                said = body();
            } catch (const std::exception& error) {
                said = error.what();
            }
            ::_exit(::write(to.get(), said.data(), said.size()) == static_cast<ssize_t>(said.size()) ? 0 : 1);
        }
        int status = 1;
        ::waitpid(inside, &status, 0);
        ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
    }
    to.reset();
    std::string said;
    char bytes[4096];
    for (ssize_t got = 0; (got = ::read(from.get(), bytes, sizeof bytes)) > 0;)
        said.append(bytes, static_cast<size_t>(got));
    int status = 1;
    ::waitpid(maker, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return std::nullopt;
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    return said;
}

class Containers : public ::testing::Test {
   protected:
    void SetUp() override {
        ::unsetenv("TESSERA_HOST_ID");
        if (!within(CLONE_NEWPID, Proc::own, [] { return std::string(); }))
            GTEST_SKIP() << "root may make pid name spaces";
    }

    // Why a job cannot take the root; empty: it can.
    [[nodiscard]] std::string refusal() const {
        try {
            const Lease lease(posix_file_system(), directory_.path().string(), random_id());
            return "";
        } catch (const Error& error) {
            return error.what();
        }
    }

    TemporaryDirectory directory_;
};

TEST_F(Containers, AHostIsWhereMemoryAndLoopbackAreShared) {
    const auto id = [] { return host_id(); };
    const std::string here = host_id();
    EXPECT_EQ(within(CLONE_NEWUTS | CLONE_NEWIPC, Proc::outer, id), here);
    for (const int flags : {CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWPID | CLONE_NEWNET}) {
        for (const Proc proc : {Proc::own, Proc::outer}) {
            if (proc == Proc::own && (flags & CLONE_NEWPID) == 0) continue;
            const auto there = within(flags, proc, id);
            ASSERT_TRUE(there);
            EXPECT_NE(*there, here) << flags;
            EXPECT_EQ(there->substr(0, 36), here.substr(0, 36)) << "the boot is the same";
        }
    }
    // Nothing tells two such processes of one host from two of different hosts.
    const auto blind = within(CLONE_NEWNS, Proc::none, id);
    ASSERT_TRUE(blind);
    EXPECT_THAT(*blind, HasSubstr("unknown:"));
    EXPECT_NE(within(CLONE_NEWNS, Proc::none, id), blind);
}

// Process 1 is another one in each.
TEST_F(Containers, AProcOfAnotherNamespaceTellsNothing) {
    const auto look = [] { return std::string(process_stat(1) ? "seen" : "not seen"); };
    EXPECT_EQ(within(CLONE_NEWPID, Proc::own, look), "seen");
    EXPECT_EQ(within(CLONE_NEWPID, Proc::outer, look), "not seen");
    EXPECT_EQ(within(CLONE_NEWNS, Proc::outer, look), "seen");
}

// There is no process of that number inside, or another one.
TEST_F(Containers, AJobOutsideHoldsItsRootAgainstThoseInside) {
    const Lease lease(posix_file_system(), directory_.path().string(), random_id());
    for (const Proc proc : {Proc::own, Proc::outer}) {
        const auto told = within(CLONE_NEWPID, proc, [&] { return refusal(); });
        ASSERT_TRUE(told);
        EXPECT_THAT(*told,
                    AllOf(HasSubstr("process " + std::to_string(::getpid())), HasSubstr("not visible from here")));
    }
}

// Outside, number 1 is a process that started at another time; and the one inside has gone, of which nobody outside can be
// sure.
TEST_F(Containers, AJobInsideHoldsItsRootUntilItsLeaseIsOld) {
    const std::string owner = (directory_.path() / owner_name).string();
    for (const Proc proc : {Proc::own, Proc::outer}) {
        const auto wrote = within(CLONE_NEWPID, proc, [&] {
            std::ofstream(owner) << Holder::this_process("inside").dump();
            return std::to_string(::getpid());
        });
        ASSERT_EQ(wrote, "1");
        EXPECT_THAT(refusal(), AllOf(HasSubstr("process 1 on "), HasSubstr("its lease expires in")));
        const timespec old[] = {{::time(nullptr) - 120, 0}, {::time(nullptr) - 120, 0}};
        ASSERT_EQ(::utimensat(AT_FDCWD, owner.c_str(), old, 0), 0);
        EXPECT_EQ(refusal(), "");
    }
}

TEST_F(Containers, WithinOneADeadJobsRootIsFreeAtOnce) {
    const auto told = within(CLONE_NEWPID, Proc::own, [&] {
        const pid_t child = ::fork();
        if (child == 0) {
            std::ofstream(directory_.path() / owner_name) << Holder::this_process("dead").dump();
            ::_exit(0);
        }
        ::waitpid(child, nullptr, 0);
        return refusal();
    });
    EXPECT_EQ(told, "");
}

}  // namespace
}  // namespace tsr::testing
