#include "launch/preempt.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "launch/agent_page.hpp"
#include "processes.hpp"

namespace tsr {
namespace {

int asked(const std::map<std::string, std::string>& variables) {
    testing::Child child = testing::in_child(variables, [] {
        if (preempt_requested()) throw Error(Code::user, "requested");
    });
    return child.wait();
}

TEST(Preempt, RankSeesTheAgentsRequestThroughTheDescriptorAndThePath) {
    AgentPage page;
    const std::string fd = std::to_string(page.fd());
    const std::string path = "/proc/" + std::to_string(::getpid()) + "/fd/" + fd;
    EXPECT_EQ(asked({{"TESSERA_PREEMPT_FD", fd}}), 0);
    EXPECT_EQ(asked({{"TESSERA_PREEMPT_FILE", path}}), 0);
    page.request_preemption();
    EXPECT_EQ(asked({{"TESSERA_PREEMPT_FD", fd}}), 1);
    EXPECT_EQ(asked({{"TESSERA_PREEMPT_FD", "987"}, {"TESSERA_PREEMPT_FILE", path}}), 1);
    EXPECT_EQ(asked({}), 0) << "outside a launcher it is always no";
}

TEST(Preempt, TheAgentLearnsWhoAsks) {
    AgentPage page;
    const testing::TemporaryDirectory directory;
    const std::string file = directory.path() / "listens";
    EXPECT_EQ(asked({{"TESSERA_PREEMPT_ASKED_FILE", file}}), 0);
    EXPECT_FALSE(std::filesystem::exists(file)) << "a rank that cannot see the flag does not listen";
    EXPECT_EQ(asked({{"TESSERA_PREEMPT_FD", std::to_string(page.fd())}, {"TESSERA_PREEMPT_ASKED_FILE", file}}), 0);
    EXPECT_TRUE(std::filesystem::exists(file));
    // As `tessera run` has it: memory, by its number or by its path.
    const std::string number = std::to_string(page.asked_fd());
    for (const auto& [name, value] : {std::pair<std::string, std::string>{"TESSERA_PREEMPT_ASKED_FD", number},
                                      {"TESSERA_PREEMPT_ASKED_FILE", "/proc/self/fd/" + number}}) {
        page.begin_round();
        EXPECT_FALSE(page.somebody_listens());
        for (int rank = 0; rank < 2; ++rank) {
            EXPECT_EQ(asked({{"TESSERA_PREEMPT_FD", std::to_string(page.fd())}, {name, value}}), 0);
            EXPECT_TRUE(page.somebody_listens()) << name;
        }
    }
    // Nowhere to say it: the flag works all the same.
    EXPECT_EQ(asked({{"TESSERA_PREEMPT_FD", std::to_string(page.fd())}, {"TESSERA_PREEMPT_ASKED_FILE", "/no/dir"}}), 0);
}

TEST(Preempt, RequestIsSeenByARankThatAskedBefore) {
    AgentPage page;
    testing::Child child = testing::in_child({{"TESSERA_PREEMPT_FD", std::to_string(page.fd())}}, [&] {
        if (preempt_requested()) throw Error(Code::user, "requested too early");
        page.request_preemption();  // the child's copy of the agent's mapping: the same page
        if (!preempt_requested()) throw Error(Code::user, "not seen");
    });
    EXPECT_EQ(child.wait(), 0);
}

TEST(Preempt, RanksCannotWriteTheFlag) {
    const AgentPage page;
    EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, page.fd(), 0), MAP_FAILED);
    const std::string path = "/proc/self/fd/" + std::to_string(page.fd());
    const Fd again(::open(path.c_str(), O_RDWR | O_CLOEXEC));  // root may open it, but the seal holds
    if (again.valid()) {
        EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0), MAP_FAILED);
        EXPECT_NE(::write(again.get(), "x", 1), 1);
    }
}

TEST(Preempt, AnotherFileInThePlaceOfTheDescriptorIsNotBelieved) {
    testing::TemporaryDirectory directory;
    const std::string path = directory.path() / "file";
    const Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    const std::string ones(4096, '\1');
    ASSERT_EQ(::write(file.get(), ones.data(), ones.size()), 4096);
    EXPECT_EQ(asked({{"TESSERA_PREEMPT_FD", std::to_string(file.get())}}), 0);
}

}  // namespace
}  // namespace tsr
