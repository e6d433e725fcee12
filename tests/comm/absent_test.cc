// What the CPU's transport knows of peers that will not take part in a collective on a device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "comm/rendezvous.hpp"
#include "comm/transport.hpp"
#include "ranks.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

using Make = std::unique_ptr<Transport> (*)(Bootstrap);

class Absent : public ::testing::TestWithParam<Make> {};

TEST_P(Absent, IsWhoeverLeftBeforeACollective) {
    const CommOptions options = test_options();
    const auto store = make_memory_store(patience(milliseconds{30000}));
    std::vector<Endpoint> endpoints(2);
    std::vector<Peer> peers;
    for (int rank = 0; rank < 2; ++rank) {
        peers.push_back(make_peer(rank, 2, options, endpoints[static_cast<size_t>(rank)]));
    }
    std::atomic<bool> asked{false};
    expect_all_well(run_threads(2, [&](int rank) {
        const auto transport =
            GetParam()({rank, peers, std::move(endpoints[static_cast<size_t>(rank)]), store, options, soon()});
        Request request;
        request.collective = Collective::all_reduce;
        const Operation operation = operation_of(request);
        if (rank == 1) {
            transport->leave(5);
            return wait_until([&] { return asked.load(); }, soon(), "the other rank");
        }
        wait_until([&] { return !transport->departed().empty(); }, soon(), "rank 1 to leave");
        EXPECT_FALSE(transport->absent_from(operation, 5)) << "rank 1 took part, this rank is late";
        const auto error = transport->absent_from(operation, 6);
        asked = true;
        ASSERT_TRUE(error);
        EXPECT_EQ(error->code(), Code::peer_lost);
        EXPECT_EQ(error->record()->peer, 1);
        EXPECT_THAT(error->what(), HasSubstr("all_reduce #6 failed: rank 1"));
    }));
}

INSTANTIATE_TEST_SUITE_P(Transports, Absent, ::testing::Values(&make_shm_transport, &make_gloo_transport));

}  // namespace
}  // namespace tsr::testing
