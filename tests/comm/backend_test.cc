// What a backend string asks for, and how it is told that it cannot be had.
#include "comm/backend.hpp"

#include <gmock/gmock.h>

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
        const std::string backend = cpu_backend(text);
        ADD_FAILURE() << "'" << text << "' is taken for " << backend;
        return Code::internal;
    } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("'" + text + "'"));
        EXPECT_THAT(error.what(), HasSubstr("auto, shm and gloo"));
        return error.code();
    }
}

TEST(Backend, IsNamedBareOrForTheCpu) {
    EXPECT_EQ(cpu_backend(""), "auto");
    for (const std::string name : {"auto", "shm", "gloo"}) {
        EXPECT_EQ(cpu_backend(name), name);
        EXPECT_EQ(cpu_backend("cpu:" + name), name);
    }
}

TEST(Backend, ForGpusIsUnsupported) {
    for (const char* text : {"nccl", "cuda:nccl", "cuda:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"}) {
        EXPECT_EQ(refusal(text), Code::unsupported) << text;
    }
}

TEST(Backend, ThatNobodyKnowsIsAnInvalidArgument) {
    for (const char* text : {"carrier pigeon", "SHM", "cpu:", "tpu:gloo", "gloo,", ",", "gloo,shm", "cpu:gloo,gloo"}) {
        EXPECT_EQ(refusal(text), Code::invalid_argument) << text;
    }
}

TEST(Backend, ThatOneRankCannotHaveIsToldToAll) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    const Outcomes outcomes = run_threads(2, [&](int rank) {
        (void)Communicator::create(store, rank, 2, test_options(rank == 0 ? "cpu:gloo,cuda:nccl" : "gloo"));
    });
    ASSERT_TRUE(outcomes[0] && outcomes[1]);
    EXPECT_EQ(outcomes[0]->code(), Code::unsupported) << outcomes[0]->what();
    EXPECT_EQ(outcomes[1]->code(), Code::mismatch) << outcomes[1]->what();
    EXPECT_EQ(outcomes[1]->record()->peer, 0);
    EXPECT_THAT(outcomes[1]->what(), HasSubstr("cuda:nccl"));
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
