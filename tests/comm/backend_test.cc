// What a backend string asks for, and how it is told that it cannot be had.
#include "comm/backend.hpp"

#include <gmock/gmock.h>
#include <unistd.h>

#include <string>

#include "comm/communicator.hpp"
#include "comm/transport.hpp"
#include "patience.hpp"
#include "ranks.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

Code refusal(const std::string& text) {
    try {
        const Backends backends = backends_of(text);
        ADD_FAILURE() << "'" << text << "' is taken for " << backends.cpu << (backends.nccl ? " and NCCL" : "");
        return Code::internal;
    } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("'" + text + "'"));
        EXPECT_THAT(error.what(), HasSubstr("auto, shm and gloo for tensors on the CPU and nccl"));
        return error.code();
    }
}

TEST(Backend, IsNamedBareOrForTheCpu) {
    EXPECT_EQ(backends_of(""), (Backends{"auto", false}));
    for (const std::string name : {"auto", "shm", "gloo"}) {
        EXPECT_EQ(backends_of(name), (Backends{name, false}));
        EXPECT_EQ(backends_of("cpu:" + name), (Backends{name, false}));
    }
}

TEST(Backend, ForGpusComesBesideTheCpus) {
    for (const char* text : {"nccl", "cuda:nccl", "cpu:auto,cuda:nccl", "auto,nccl"}) {
        EXPECT_EQ(backends_of(text), (Backends{"auto", true})) << text;
    }
    for (const char* text : {"cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "gloo,nccl"}) {
        EXPECT_EQ(backends_of(text), (Backends{"gloo", true})) << text;
    }
}

TEST(Backend, ThatNobodyKnowsIsAnInvalidArgument) {
    for (const char* text : {"carrier pigeon", "SHM", "cpu:", "tpu:gloo", "gloo,", ",", "gloo,shm", "cpu:gloo,gloo",
                             "cuda:gloo", "cpu:nccl", "nccl,cuda:nccl"}) {
        EXPECT_EQ(refusal(text), Code::invalid_argument) << text;
    }
}

TEST(Backend, ThatOneRankLacksIsAMismatchOnAll) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    const Outcomes outcomes = run_threads(2, [&](int rank) {
        (void)Communicator::create(store, rank, 2, test_options(rank == 0 ? "cpu:gloo,cuda:nccl" : "gloo"));
    });
    for (int rank = 0; rank < 2; ++rank) {
        const auto& outcome = outcomes[static_cast<size_t>(rank)];
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_EQ(outcome->record()->peer, 1 - rank);
        EXPECT_THAT(outcome->what(), HasSubstr("cuda:nccl"));
    }
}

TEST(Backend, ForGpusIsUnsupportedOnAllRanksWithoutADriver) {
    if (::access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "this machine has an NVIDIA driver";
    const auto store = make_memory_store(patience(milliseconds{20000}));
    const Outcomes outcomes = run_threads(
        2, [&](int rank) { (void)Communicator::create(store, rank, 2, test_options("cpu:gloo,cuda:nccl")); });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::unsupported) << outcome->what();
        EXPECT_THAT(outcome->what(), HasSubstr("there is no NVIDIA driver"));
    }
}

// More would overwrite each other's parts of a segment.
TEST(Backend, SharedMemoryIsForSoManyRanksAndNoMore) {
    constexpr int ranks = 2049;
    Endpoint endpoint;
    std::vector<Peer> peers(ranks, make_peer(0, ranks, test_options(), endpoint));
    for (int rank = 0; rank < ranks; ++rank) peers[static_cast<size_t>(rank)].rank = rank;
    try {
        (void)make_shm_transport(
            {0, peers, std::move(endpoint), nullptr, test_options(), Deadline::in(milliseconds{100})});
        ADD_FAILURE() << "made";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::unsupported) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("2049 ranks on one host; backend shm supports at most 2048"));
    }
}

TEST(Backend, TooLongForItsRecordIsRefusedBeforeTheRanksMeet) {
    CommOptions options = test_options();
    options.backend = std::string(64, 'x');
    try {
        (void)Communicator::create(make_memory_store(patience(milliseconds{20000})), 0, 2, options);
        ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument) << error.what();
    }
}

}  // namespace
}  // namespace tsr::testing
