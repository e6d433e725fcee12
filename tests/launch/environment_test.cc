// Which rank a process is, under each launcher, and how ranks without an agent meet.
#include "launch/environment.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "launch/meeting.hpp"
#include "patience.hpp"
#include "processes.hpp"
#include "soon.hpp"
#include "store/server.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Environment;
using ::testing::HasSubstr;

TEST(JobEnvironment, WithoutALauncherIsOneRank) {
    const Environment environment({});
    const JobEnvironment job = JobEnvironment::detect();
    EXPECT_EQ(job.launcher, Launcher::none);
    EXPECT_EQ(job.world_size, 1);
}

TEST(JobEnvironment, UnderTesseraRunTheAgentServes) {
    const Environment environment({{"TESSERA_RANK", "2"},
                                   {"TESSERA_WORLD_SIZE", "4"},
                                   {"TESSERA_LOCAL_RANK", "2"},
                                   {"TESSERA_LOCAL_WORLD_SIZE", "4"},
                                   {"TESSERA_STORE", "tcp://127.0.0.1:5"},
                                   {"TESSERA_JOB_ID", "j"},
                                   {"TESSERA_EPOCH", "7"},
                                   {"RANK", "1"},
                                   {"WORLD_SIZE", "2"}});
    const JobEnvironment job = JobEnvironment::detect();
    EXPECT_EQ(job.launcher, Launcher::tessera);
    EXPECT_EQ(job.rank, 2);
    EXPECT_EQ(job.world_size, 4);
    EXPECT_EQ(job.store_uri, "tcp://127.0.0.1:5");
    EXPECT_EQ(job.job_id, "j");
    EXPECT_EQ(job.epoch, 7U);
}

TEST(JobEnvironment, UnderTorchrunRankZeroServesOnThePortsAfterTorchs) {
    const Environment environment({{"RANK", "3"},
                                   {"WORLD_SIZE", "8"},
                                   {"LOCAL_RANK", "3"},
                                   {"LOCAL_WORLD_SIZE", "4"},
                                   {"MASTER_ADDR", "node1"},
                                   {"MASTER_PORT", "29500"},
                                   {"TORCHELASTIC_RESTART_COUNT", "2"},
                                   {"TORCHELASTIC_RUN_ID", "run"}});
    const JobEnvironment job = JobEnvironment::detect();
    EXPECT_EQ(job.launcher, Launcher::torchrun);
    EXPECT_EQ(job.rank, 3);
    EXPECT_EQ(job.local_rank, 3);
    EXPECT_EQ(job.epoch, 2U);
    ASSERT_FALSE(job.candidates.empty());
    EXPECT_EQ(job.candidates.front().host, "node1");
    EXPECT_EQ(job.candidates.front().port, 29501) << "29500 is torch's own";
    EXPECT_TRUE(job.store_uri.empty());
}

TEST(JobEnvironment, OnOneHostTheRanksMeetOnLoopback) {
    const Environment environment({{"RANK", "1"},
                                   {"WORLD_SIZE", "2"},
                                   {"LOCAL_WORLD_SIZE", "2"},
                                   {"MASTER_ADDR", "some.name.nobody.resolves"},
                                   {"MASTER_PORT", "65535"}});
    const JobEnvironment job = JobEnvironment::detect();
    EXPECT_EQ(job.candidates.front().host, "127.0.0.1");
    for (const Address& candidate : job.candidates) EXPECT_GT(candidate.port, 1024);
}

TEST(JobEnvironment, UnderOpenMpi) {
    const Environment environment({{"OMPI_COMM_WORLD_RANK", "1"},
                                   {"OMPI_COMM_WORLD_SIZE", "4"},
                                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                   {"PMIX_NAMESPACE", "123456"}});
    const JobEnvironment job = JobEnvironment::detect();
    EXPECT_EQ(job.launcher, Launcher::open_mpi);
    EXPECT_EQ(job.rank, 1);
    EXPECT_EQ(job.world_size, 4);
    EXPECT_THAT(job.job_id, HasSubstr("123456"));
    EXPECT_EQ(job.candidates.front().host, "127.0.0.1");
}

TEST(JobEnvironment, UnderMpich) {
    const Environment environment(
        {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}});
    const JobEnvironment job = JobEnvironment::detect();
    EXPECT_EQ(job.launcher, Launcher::pmi);
    EXPECT_EQ(job.world_size, 2);
}

// Hydra's variables are the same in every job of a size.
TEST(JobEnvironment, TwoJobsOfMpichAtATimeDiffer) {
    const testing::TemporaryDirectory directory;
    for (const char* mpirun : {"a", "b"}) {
        testing::Child launcher = testing::in_child({}, [&] {
            for (int rank = 0; rank < 2; ++rank) {
                const std::map<std::string, std::string> variables{{"PMI_RANK", std::to_string(rank)},
                                                                   {"PMI_SIZE", "2"},
                                                                   {"MPI_LOCALRANKID", std::to_string(rank)},
                                                                   {"MPI_LOCALNRANKS", "2"},
                                                                   {"HYDI_CONTROL_FD", "7"}};
                testing::Child one = testing::in_child(variables, [&] {
                    std::ofstream(directory.path() / fmt::format("{}{}", mpirun, rank))
                        << JobEnvironment::detect().job_id;
                });
                if (one.wait() != 0) throw Error(Code::internal, "a rank failed");
            }
        });
        ASSERT_EQ(launcher.wait(), 0);
    }
    const auto id = [&](const char* name) { return testing::read_file(directory.path() / name); };
    EXPECT_EQ(id("a0"), id("a1"));
    EXPECT_EQ(id("b0"), id("b1"));
    EXPECT_NE(id("a0"), id("b0"));
}

TEST(JobEnvironment, UnderSrunTheFirstHostServes) {
    const Environment environment({{"SLURM_PROCID", "5"},
                                   {"SLURM_STEP_NUM_TASKS", "6"},
                                   {"SLURM_STEP_ID", "1"},
                                   {"SLURM_LOCALID", "1"},
                                   {"SLURM_JOB_ID", "77"},
                                   {"SLURM_STEP_NUM_NODES", "3"},
                                   {"SLURM_STEP_NODELIST", "gpu[07-09]"}});
    const JobEnvironment job = JobEnvironment::detect();
    EXPECT_EQ(job.launcher, Launcher::slurm);
    EXPECT_EQ(job.rank, 5);
    EXPECT_EQ(job.candidates.front().host, "gpu07");
    EXPECT_THAT(job.job_id, HasSubstr("77.1"));
}

TEST(JobEnvironment, InAnIndexedJobTheIndexIsTheRank) {
    const Environment environment({{"JOB_COMPLETION_INDEX", "3"},
                                   {"WORLD_SIZE", "4"},
                                   {"MASTER_ADDR", "digits-0.digits"},
                                   {"MASTER_PORT", "29500"},
                                   {"TESSERA_EPOCH", "2"}});
    const JobEnvironment job = JobEnvironment::detect();
    EXPECT_EQ(job.launcher, Launcher::kubernetes);
    EXPECT_EQ(job.rank, 3);
    EXPECT_EQ(job.world_size, 4);
    EXPECT_EQ(job.local_world_size, 0) << "the cluster does not say which pods share a node";
    EXPECT_EQ(job.epoch, 2U);
    EXPECT_EQ(job.candidates.front(), (Address{"digits-0.digits", 29501}));
}

TEST(JobEnvironment, PodsOfWorldSizeOneAreJobsOfTheirOwn) {
    const Environment environment({{"JOB_COMPLETION_INDEX", "3"}, {"WORLD_SIZE", "1"}});
    EXPECT_EQ(JobEnvironment::detect(), JobEnvironment{});
}

// As the error advises.
TEST(JobEnvironment, WithAStoreNobodyNeedsToKnowTheHostOfRankZero) {
    const std::vector<std::map<std::string, std::string>> launchers{
        {{"RANK", "1"}, {"WORLD_SIZE", "2"}},
        {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}},
        {{"JOB_COMPLETION_INDEX", "1"}, {"WORLD_SIZE", "2"}}};
    for (auto variables : launchers) {
        {
            const Environment environment(variables);
            EXPECT_THROW((void)JobEnvironment::detect(), Error);
        }
        variables["TESSERA_STORE"] = "file:///shared/job";
        const Environment environment(variables);
        const JobEnvironment job = JobEnvironment::detect();
        EXPECT_EQ(job.rank, 1);
        EXPECT_EQ(job.store_uri, "file:///shared/job");
    }
}

// What each launcher really sets, for rank 1 of 4 on two hosts. Each entry wins over all that follow it.
TEST(JobEnvironment, TheInnermostLauncherWins) {
    struct Entry {
        Launcher launcher;
        std::map<std::string, std::string> variables;
        int local_world_size;
    };
    const std::vector<Entry> table{
        {Launcher::tessera,
         {{"TESSERA_RANK", "1"},
          {"TESSERA_WORLD_SIZE", "4"},
          {"TESSERA_LOCAL_RANK", "1"},
          {"TESSERA_LOCAL_WORLD_SIZE", "4"},
          {"TESSERA_STORE", "tcp://127.0.0.1:5"}},
         4},
        {Launcher::torchrun,
         {{"RANK", "1"},
          {"WORLD_SIZE", "4"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "node1"},
          {"MASTER_PORT", "29500"}},
         2},
        {Launcher::open_mpi,
         {{"OMPI_COMM_WORLD_RANK", "1"},
          {"OMPI_COMM_WORLD_SIZE", "4"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
          {"OMPI_COMM_WORLD_NODE_RANK", "1"},
          {"OMPI_UNIVERSE_SIZE", "4"},
          {"PMIX_NAMESPACE", "prterun-node1-77@1"},
          {"PMIX_RANK", "1"},
          {"MASTER_ADDR", "node1"}},
         2},
        {Launcher::pmi,
         {{"PMI_RANK", "1"},
          {"PMI_SIZE", "4"},
          {"PMI_FD", "9"},
          {"MPI_LOCALRANKID", "1"},
          {"MPI_LOCALNRANKS", "2"},
          {"HYDI_CONTROL_FD", "8"},
          {"MASTER_ADDR", "node1"}},
         2},
        {Launcher::slurm,
         {{"SLURM_PROCID", "1"},
          {"SLURM_STEP_NUM_TASKS", "4"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_JOB_ID", "77"},
          {"SLURM_STEP_NUM_NODES", "2"},
          {"SLURM_STEP_NODELIST", "node[1-2]"}},
         0},
        {Launcher::kubernetes,
         {{"JOB_COMPLETION_INDEX", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "digits-0.digits"}},
         0},
    };
    std::map<std::string, std::string> all;
    std::vector<Launcher> found;
    for (auto entry = table.rbegin(); entry != table.rend(); ++entry) {
        all.insert(entry->variables.begin(), entry->variables.end());
        found.insert(found.begin(), entry->launcher);
        // Alone, and with the variables of all outer launchers.
        for (const auto& variables : {entry->variables, all}) {
            const Environment environment(variables);
            const JobEnvironment job = JobEnvironment::detect();
            EXPECT_EQ(job.launcher, entry->launcher) << name_of(entry->launcher);
            EXPECT_EQ(job.rank, 1) << name_of(entry->launcher);
            EXPECT_EQ(job.world_size, 4) << name_of(entry->launcher);
            EXPECT_EQ(job.local_world_size, entry->local_world_size) << name_of(entry->launcher);
            EXPECT_TRUE(entry->launcher == Launcher::tessera || !job.candidates.empty());
        }
        const Environment environment(all);
        std::vector<Launcher> listed;
        for (const LauncherFound& one : launchers_found()) {
            listed.push_back(one.launcher);
            for (const auto& [name, value] : one.variables) EXPECT_EQ(all.at(name), value);
        }
        EXPECT_EQ(listed, found);
    }
}

TEST(JobEnvironment, BatchScriptOutsideAStepIsNoRank) {
    const Environment environment({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "77"}});
    EXPECT_EQ(JobEnvironment::detect().world_size, 1);
}

TEST(JobEnvironment, ContradictionsNameTheVariable) {
    const auto message_of = [](std::map<std::string, std::string> variables) -> std::string {
        const Environment environment(variables);
        try {
            (void)JobEnvironment::detect();
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::invalid_argument);
            return error.what();
        }
        return "no error";
    };
    EXPECT_THAT(message_of({{"RANK", "4"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "1"}}),
                HasSubstr("RANK='4' must be a number from 0 to 3; WORLD_SIZE is 4"));
    EXPECT_THAT(message_of({{"RANK", "x"}, {"WORLD_SIZE", "4"}}), HasSubstr("RANK='x'"));
    EXPECT_THAT(message_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE='0'"));
    EXPECT_THAT(message_of({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "5"}}), HasSubstr("MASTER_ADDR"));
    EXPECT_THAT(message_of({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h"}}), HasSubstr("MASTER_PORT"));
    EXPECT_THAT(message_of({{"RANK", "0"}, {"WORLD_SIZE", "4"}}),
                AllOf(HasSubstr("MASTER_ADDR"), HasSubstr("MASTER_PORT")));
    EXPECT_THAT(message_of({{"RANK", "0"}}), HasSubstr("RANK is set (0), but WORLD_SIZE is not"));
    EXPECT_THAT(message_of({{"WORLD_SIZE", "2"}}), HasSubstr("WORLD_SIZE is set (2), but RANK is not"));
    EXPECT_THAT(message_of({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}}),
                HasSubstr("LOCAL_RANK='2' must be a number from 0 to 1; LOCAL_WORLD_SIZE is 2"));
    EXPECT_EQ(message_of({{"WORLD_SIZE", "1"}}), "no error");
    EXPECT_THAT(message_of({{"JOB_COMPLETION_INDEX", "1"}}),
                HasSubstr("JOB_COMPLETION_INDEX is set (1), but WORLD_SIZE is not; set WORLD_SIZE"));
    EXPECT_THAT(message_of({{"JOB_COMPLETION_INDEX", "4"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h"}}),
                HasSubstr("JOB_COMPLETION_INDEX='4' must be a number from 0 to 3; WORLD_SIZE is 4"));
    EXPECT_THAT(message_of({{"JOB_COMPLETION_INDEX", "1"}, {"WORLD_SIZE", "4"}}),
                AllOf(HasSubstr("Kubernetes does not know where the ranks meet"), HasSubstr("MASTER_ADDR")));
    EXPECT_THAT(message_of({{"TESSERA_RANK", "0"}}), HasSubstr("TESSERA_WORLD_SIZE"));
    EXPECT_THAT(message_of({{"TESSERA_RANK", "0"}, {"TESSERA_WORLD_SIZE", "2"}}), HasSubstr("TESSERA_STORE"));
}

TEST(JobEnvironment, FirstHostOfANodeList) {
    EXPECT_EQ(first_host("node1"), "node1");
    EXPECT_EQ(first_host("node1,node2"), "node1");
    EXPECT_EQ(first_host("node[07-09,12],x"), "node07");
    EXPECT_EQ(first_host("node[3]"), "node3");
    EXPECT_EQ(first_host("a-b[1,5]"), "a-b1");
}

// Ranks as processes, as torchrun would start them: all call store_from_environment.
class Meeting : public ::testing::Test {
   protected:
    void meet(std::map<std::string, std::string> variables, int world_size) {
        std::vector<testing::Child> children;
        for (int rank = world_size - 1; rank >= 0; --rank) {  // rank 0 last: the others must wait for it
            variables["RANK"] = std::to_string(rank);
            variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(world_size);
            variables["XDG_RUNTIME_DIR"] = directory_.path().string();
            children.push_back(testing::in_child(variables, [] {
                const JobEnvironment job = JobEnvironment::detect();
                const auto store = store_from_environment(job, testing::patience(milliseconds{20000}));
                const Deadline deadline = store->default_deadline();
                store->set(fmt::format("rank/{}", job.rank), "here", deadline);
                for (int r = 0; r < job.world_size; ++r) (void)store->wait(fmt::format("rank/{}", r), deadline);
                store->add("met", 1, deadline);
                wait_until([&] { return store->get("met", deadline) == std::to_string(job.world_size); }, deadline,
                           "all");
            }));
        }
        for (testing::Child& child : children) EXPECT_EQ(child.wait(), 0);
    }
    // On the two ports after the one returned: another job of this user, and one of another user.
    static std::pair<uint16_t, std::vector<std::shared_ptr<StoreServer>>> serve_two_jobs() {
        for (;;) {  // until two ports in a row are free
            const uint16_t base = testing::free_port();
            StoreOptions other;
            other.job_id = "another job of this user";
            try {
                auto one = StoreServer::start("127.0.0.1", static_cast<uint16_t>(base + 1), other);
                other.token = std::string(64, 'e');
                return {base, {one, StoreServer::start("127.0.0.1", static_cast<uint16_t>(base + 2), other)}};
            } catch (const Error& error) {
                if (error.record()->native_code != EADDRINUSE) throw;
            }
        }
    }
    testing::TemporaryDirectory directory_;
};

TEST_F(Meeting, RanksOfTorchrunMeetWithoutAnAgent) {
    meet({{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", std::to_string(testing::free_port())}}, 3);
}

TEST_F(Meeting, PortsOfOtherJobsAndOtherProgramsAreSteppedOver) {
    ::chmod(directory_.path().c_str(), 0700);
    const std::filesystem::path told = directory_.path() / "base";
    // In a process of their own: the ranks are forked, and a process that forks should have one thread.
    const testing::Child others = testing::in_child({{"XDG_RUNTIME_DIR", directory_.path().string()}}, [&] {
        const auto [base, servers] = serve_two_jobs();
        std::ofstream(told.string() + ".draft") << base;
        std::filesystem::rename(told.string() + ".draft", told);
        wait_until([] { return false; }, Deadline::in(testing::patience(milliseconds{60000})), "the end of the test");
    });
    wait_until([&] { return std::filesystem::exists(told); }, testing::soon(), "the other jobs");
    std::string base;
    std::ifstream(told) >> base;
    meet({{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", base}}, 3);
}

TEST_F(Meeting, WithoutRankZeroIsATimeoutThatSaysWhere) {
    const uint16_t port = testing::free_port();
    testing::Child child = testing::in_child(
        {{"RANK", "1"},
         {"WORLD_SIZE", "2"},
         {"LOCAL_WORLD_SIZE", "2"},
         {"MASTER_PORT", std::to_string(port)},
         {"XDG_RUNTIME_DIR", directory_.path().string()}},
        [] {
            try {
                (void)store_from_environment(JobEnvironment::detect(), milliseconds{50});
            } catch (const Error& error) {
                if (error.code() == Code::timeout && std::string(error.what()).find("rank 0") != std::string::npos)
                    return;
                throw;
            }
            throw Error(Code::internal, "a store was found");
        });
    EXPECT_EQ(child.wait(), 0);
}

TEST_F(Meeting, RemoteRanksWithoutATokenAreRefused) {
    const Environment environment({{"RANK", "0"},
                                   {"WORLD_SIZE", "2"},
                                   {"LOCAL_WORLD_SIZE", "1"},
                                   {"MASTER_ADDR", "0.0.0.0"},
                                   {"MASTER_PORT", std::to_string(testing::free_port())}});
    try {
        (void)store_from_environment(JobEnvironment::detect(), milliseconds{50});
        FAIL() << "served without a token";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::permission);
        EXPECT_THAT(error.what(), HasSubstr("TESSERA_TOKEN_FILE"));
    }
}

}  // namespace
}  // namespace tsr
