// The words of the command line, and Slurm's variables, as options of a job of several hosts.
#include "launch/rendezvous_options.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "processes.hpp"

namespace tsr {
namespace {

using ::testing::HasSubstr;

HostOptions of_endpoint(const std::string& endpoint) { return hosts_of({.nodes = "2", .endpoint = endpoint}).value(); }

TEST(RendezvousOptions, AJobOfOneHostHasNone) {
    EXPECT_FALSE(hosts_of({}));
    EXPECT_FALSE(hosts_of({.nodes = "1:1", .endpoint = "localhost:29400", .standalone = true}));
}

TEST(RendezvousOptions, EndpointsAreReadInAllForms) {
    EXPECT_EQ(of_endpoint("host-a").endpoint_host, "host-a");
    EXPECT_EQ(of_endpoint("host-a").endpoint_port, 29400);
    EXPECT_EQ(of_endpoint("host-a:1234").endpoint_port, 1234);
    EXPECT_EQ(of_endpoint("[fe80::1]:77").endpoint_host, "fe80::1");
    EXPECT_EQ(of_endpoint("[::1]").endpoint_port, 29400);
    const HostOptions spares = hosts_of({.nodes = "3", .endpoint = "a", .store_hosts = "b,[::1]:7"}).value();
    EXPECT_EQ(spares.spares, (std::vector<std::pair<std::string, uint16_t>>{{"b", 29400}, {"::1", 7}}));
    const HostOptions master = hosts_of({.nodes = "2:3", .master_address = "m", .master_port = "5"}).value();
    EXPECT_EQ(std::tie(master.endpoint_host, master.endpoint_port), std::tuple("m", 5));
    EXPECT_EQ(std::tie(master.min_nodes, master.max_nodes), std::tuple(2, 3));
    const HostOptions conf = hosts_of({.nodes = "2",
                                       .endpoint = "h",
                                       .conf = "join_timeout=1.5,last_call_timeout=2,keep_alive_interval=2,"
                                               "keep_alive_max_attempt=2,is_host=1,read_timeout=9"})
                                 .value();
    EXPECT_EQ(conf.join_timeout.count(), 1500);
    EXPECT_EQ(conf.last_call.count(), 2000);
    EXPECT_EQ(conf.silence.count(), 4000);
    EXPECT_EQ(conf.is_host, true);
}

TEST(RendezvousOptions, MistakesAreNamed) {
    const auto told = [](HostWords words, const std::string& part) {
        if (words.nodes == "1") words.nodes = "2";
        try {
            (void)hosts_of(words);
            ADD_FAILURE() << part;
        } catch (const Error& error) {
            EXPECT_THAT(error.what(), HasSubstr(part));
        }
    };
    told({}, "--rdzv-endpoint HOST:PORT");
    told({.nodes = "0"}, "--nnodes '0': expected a number from 1 to 4096");
    told({.nodes = "3:2"}, "MIN <= MAX");
    told({.nodes = "1000000000"}, "--nnodes");
    told({.nodes = "2x"}, "--nnodes '2x'");
    told({.endpoint = ":5"}, "has no host");
    told({.endpoint = "a:b"}, "'b'");
    told({.endpoint = "a:70000"}, "'70000'");
    told({.endpoint = "::1"}, "brackets");
    told({.endpoint = "-oProxy"}, "cannot begin with '-'");
    told({.master_address = "-oProxy"}, "--master-addr '-oProxy': a host cannot begin with '-'");
    told({.master_address = "a", .master_port = "0"}, "--master-port '0': expected a number from 1 to 65535");
    told({.nodes = "1:1000000000"}, "--nnodes '1000000000': expected a number from 1 to 4096");
    told({.nodes = "2:"}, "--nnodes ''");
    told({.endpoint = "[::1"}, "has no ]");
    told({.endpoint = "a", .conf = "keep_alive_interval=0.1"}, "must be at least 2 s");
    told({.endpoint = "a", .conf = "is_host=maybe"}, "is_host 'maybe': expected true or false");
    told({.endpoint = "a", .node_rank = "1000000000"}, "--node-rank '1000000000'");
    told({.endpoint = "a", .backend = "etcd"}, "--rdzv-backend etcd");
    told({.endpoint = "a", .conf = "x=1"}, "unknown key 'x'");
    told({.endpoint = "a", .conf = "join_timeout"}, "KEY=VALUE");
    told({.endpoint = "a", .conf = "join_timeout=nan"}, "join_timeout 'nan'");
    told({.endpoint = "a", .node_rank = "2"}, "--node-rank 2 is not below the number of hosts, 2");
    told({.endpoint = "a", .node_rank = "-1"}, "--node-rank '-1'");
    told({.endpoint = "a", .standalone = true}, "--standalone");
    told({.nodes = "3", .endpoint = "a", .store_hosts = "b"}, "--store-hosts names one spare, b");
    told({.nodes = "3", .endpoint = "a", .store_hosts = "b,b"}, "--store-hosts names b with port 29400 twice");
    told({.nodes = "3", .endpoint = "a:1", .store_hosts = "b,a:1"}, "--store-hosts names a with port 1 twice");
    told({.nodes = "2", .endpoint = "a", .store_hosts = "b,c"}, "names 2 spares, but of 2 hosts");
    told({.nodes = "3", .endpoint = "a", .store_hosts = "b,,c"}, "--store-hosts '' has no host");
    told({.nodes = "3", .endpoint = "a", .store_hosts = "b,-c"}, "cannot begin with '-'");
}

TEST(RendezvousOptions, SlurmTellsWhereTheAgentsMeet) {
    const testing::Environment environment({{"SLURM_STEP_NODELIST", "node[07-09]"},
                                            {"SLURM_STEP_ID", "3"},
                                            {"SLURM_JOB_ID", "77"},
                                            {"SLURM_NODEID", "1"}});
    const HostOptions hosts = hosts_of({.nodes = "3"}).value();
    EXPECT_EQ(hosts.endpoint_host, "node07");
    EXPECT_GE(hosts.endpoint_port, 20000);
    EXPECT_EQ(hosts.node_rank, 1);
    EXPECT_EQ(hosts.run_id, "77.3");
    EXPECT_EQ(of_endpoint("a:1").node_rank, -1) << "only where it tells the place, too";
}

}  // namespace
}  // namespace tsr
