// --bind: the topology of made-up machines, which processors their ranks get, and this machine.
#include "launch/binding.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "base/error.hpp"
#include "launch/job.hpp"
#include "run_fixture.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::lines_of;
using testing::Result;
using testing::Run;

using Lists = std::vector<std::vector<int>>;

// 2 sockets, 4 NUMA nodes of 2 cores; the second hardware thread of core c is processor c + 8. One cache for the two
// cores of a node, except on node 0, where each core has its own. 4 devices, on nodes 3, 1, 1 and -1.
class Machine : public ::testing::Test {
   protected:
    Machine() {
        const std::string cpus = "sys/devices/system/cpu/cpu";
        for (int id = 0; id < 16; ++id) {
            const int core = id % 8;
            const std::string cpu = cpus + std::to_string(id);
            put(cpu + "/topology/thread_siblings_list", fmt::format("{},{}", core, core + 8));
            put(cpu + "/topology/physical_package_id", std::to_string(core / 4));
            put(cpu + "/cache/index0/level", "1");
            put(cpu + "/cache/index0/type", "Data");
            put(cpu + "/cache/index0/shared_cpu_list", fmt::format("{},{}", core, core + 8));
            put(cpu + "/cache/index3/level", "3");
            put(cpu + "/cache/index3/type", "Unified");
            const int first = core / 2 * 2;
            put(cpu + "/cache/index3/shared_cpu_list",
                core < 2 ? fmt::format("{},{}", core, core + 8)
                         : fmt::format("{}-{},{}-{}", first, first + 1, first + 8, first + 9));
        }
        for (int node = 0; node < 4; ++node) {
            put(fmt::format("sys/devices/system/node/node{}/cpulist", node),
                fmt::format("{}-{},{}-{}", 2 * node, 2 * node + 1, 2 * node + 8, 2 * node + 9));
        }
        const char* nodes[] = {"3", "1", "1", "-1"};
        for (int device = 0; device < 4; ++device) {
            const std::string address = fmt::format("0000:{}7:00.0", device);
            std::filesystem::create_directories(root() + "/proc/driver/nvidia/gpus/" + address);
            put("sys/bus/pci/devices/" + address + "/numa_node", nodes[device]);
        }
    }
    void put(const std::string& name, const std::string& text) const {
        const std::filesystem::path path = directory_.path() / name;
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text << "\n";
    }
    [[nodiscard]] std::string root() const { return directory_.path().string(); }
    [[nodiscard]] Lists bound(Bind bind, int ranks, const std::vector<int>& devices = {}) const {
        return processors_of_ranks(bind, read_topology(root(), all_), ranks, devices);
    }

    testing::TemporaryDirectory directory_;
    std::vector<int> all_{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};

std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        return error.what();
    }
    return "nothing was refused";
}

TEST(ProcessorList, IsAscending) {
    EXPECT_THAT(parse_processors("0,4-6,9"), ElementsAre(0, 4, 5, 6, 9));
    const std::pair<const char*, const char*> table[] = {
        {"", "'' is neither a core (0 to 65535) nor a range"},
        {"1,,2", "'' is neither"},
        {"a", "'a' is neither"},
        {"-1", "'-1' is neither"},
        {"3-1", "range '3-1' goes down"},
        {"2,1", "'1' is not above core 2"},
        {"0-3,3", "'3' is not above core 3"},
        {"0-999999999", "is neither"},
    };
    for (const auto& [text, message] : table) {
        EXPECT_THAT(refusal([&, text = text] { (void)parse_processors(text); }), HasSubstr(message)) << text;
    }
}

TEST(ProcessorList, IsSharedEqually) {
    EXPECT_THAT(equal_shares({0, 2, 4, 6, 8}, 2), ElementsAre(ElementsAre(0, 2), ElementsAre(4, 6)));
    EXPECT_THAT(refusal([] { (void)equal_shares({1, 2}, 3); }), HasSubstr("2 cores for 3 ranks"));
}

TEST_F(Machine, TopologyIsRead) {
    EXPECT_THAT(read_topology(root(), {0, 9, 15}),
                ElementsAre(Processor{0, 0, 0, 0, 0}, Processor{9, 1, 1, 0, 0}, Processor{15, 7, 6, 3, 1}));
    EXPECT_THAT(read_topology("/nowhere", {5}), ElementsAre(Processor{5, 5, 5, 0, 0}));
}

TEST_F(Machine, NodesOfDevicesAreInTheOrderThatTheRanksSee) {
    EXPECT_THAT(nodes_of_devices(root(), std::nullopt), ElementsAre(3, 1, 1, 0));
    EXPECT_THAT(nodes_of_devices(root(), "1,0"), ElementsAre(1, 3));
    for (const char* other : {"GPU-8a", "7", "", "0,"}) EXPECT_THAT(nodes_of_devices(root(), other), ElementsAre());
    EXPECT_THAT(nodes_of_devices("/nowhere", std::nullopt), ElementsAre());
}

TEST_F(Machine, RanksWithoutDevicesAreSpreadInBlocks) {
    EXPECT_EQ(bound(Bind::node, 8)[1], (std::vector<int>{0, 1, 8, 9}));
    EXPECT_EQ(bound(Bind::node, 2), (Lists{{0, 1, 8, 9}, {4, 5, 12, 13}}));
    EXPECT_EQ(bound(Bind::socket, 2), (Lists{{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}}));
    EXPECT_EQ(bound(Bind::exclusive, 3), (Lists{{0, 1, 2, 8, 9, 10}, {3, 4, 5, 11, 12, 13}, {6, 7, 14, 15}}));
    EXPECT_EQ(bound(Bind::exclusive, 8)[7], (std::vector<int>{7, 15}));
    EXPECT_EQ(bound(Bind::core_complex, 8), (Lists{{0, 8},
                                                   {1, 9},
                                                   {2, 3, 10, 11},
                                                   {2, 3, 10, 11},
                                                   {4, 5, 12, 13},
                                                   {4, 5, 12, 13},
                                                   {6, 7, 14, 15},
                                                   {6, 7, 14, 15}}));
}

TEST_F(Machine, ARankIsOnTheNodeOfItsDevice) {
    const std::vector<int> devices{3, 1, 1, 0};
    EXPECT_EQ(bound(Bind::node, 4, devices), (Lists{{6, 7, 14, 15}, {2, 3, 10, 11}, {2, 3, 10, 11}, {0, 1, 8, 9}}));
    EXPECT_EQ(bound(Bind::exclusive, 4, devices), (Lists{{6, 7, 14, 15}, {2, 10}, {3, 11}, {0, 1, 8, 9}}));
    EXPECT_EQ(bound(Bind::socket, 1, devices), (Lists{{4, 5, 6, 7, 12, 13, 14, 15}}));
    EXPECT_EQ(bound(Bind::node, 5, devices), bound(Bind::node, 5)) << "fewer devices than ranks";
}

TEST_F(Machine, OnlyAllowedProcessorsCount) {
    all_ = {1, 3, 9, 4};
    EXPECT_EQ(bound(Bind::node, 3), (Lists{{1, 9}, {3}, {4}}));
    EXPECT_EQ(bound(Bind::exclusive, 3), (Lists{{1, 9}, {3}, {4}}));
    const auto refusal = [&](Bind bind, int ranks, const std::vector<int>& devices) -> std::string {
        try {
            (void)bound(bind, ranks, devices);
            return "none";
        } catch (const Error& error) {
            return error.what();
        }
    };
    EXPECT_THAT(refusal(Bind::exclusive, 4, {}), HasSubstr("4 ranks need a core each, but this process has 3 usable"));
    EXPECT_THAT(refusal(Bind::exclusive, 2, {1, 1}), HasSubstr("NUMA node 1 has 1 usable cores"));
    EXPECT_THAT(refusal(Bind::node, 2, {1, 3}), HasSubstr("the device of local rank 1 is on NUMA node 3"));
}

TEST_F(Run, RanksAreBoundToTheirProcessors) {
    const std::vector<int> allowed = allowed_processors();
    ASSERT_FALSE(allowed.empty());
    const std::vector<Processor> topology = read_topology("", allowed);
    const std::string script = "grep Cpus_allowed_list /proc/self/status > $D/r$RANK";
    const auto list_of = [](const std::vector<int>& ids) {
        std::string list;  // as the kernel writes it
        for (size_t first = 0; first < ids.size();) {
            size_t last = first;
            while (last + 1 < ids.size() && ids[last + 1] == ids[last] + 1) ++last;
            if (!list.empty()) list += ",";
            list += std::to_string(ids[first]);
            if (last > first) list += "-" + std::to_string(ids[last]);
            first = last + 1;
        }
        return fmt::format("Cpus_allowed_list:\t{}\n", list);
    };
    ASSERT_EQ(run_shell({"-n", "2", "--bind", "numa"}, script).code, 0);
    const Lists nodes = processors_of_ranks(Bind::node, topology, 2, nodes_of_devices("", std::nullopt));
    for (const int rank : {0, 1}) EXPECT_EQ(file(fmt::format("r{}", rank)), list_of(nodes[static_cast<size_t>(rank)]));
    std::set<int> cores;
    for (const Processor& processor : topology) cores.insert(processor.core);
    const Result result = run_shell({"-n", "2", "--bind", "cores"}, script);
    if (cores.size() < 2) {
        EXPECT_EQ(result.code, 2);
        EXPECT_THAT(result.err, HasSubstr("2 ranks need a core each"));
        return;
    }
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_NE(file("r0"), file("r1"));
    if (nodes_of_devices("", std::nullopt).empty()) {
        EXPECT_EQ(file("r1"), list_of(processors_of_ranks(Bind::exclusive, topology, 2, {})[1]));
    }
}

}  // namespace
}  // namespace tsr
