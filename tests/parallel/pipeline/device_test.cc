// Pipelines whose activations are on CUDA devices: every schedule trains to the bits of one process, as on the CPU, in
// the order of streams, and the host does not wait for the device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "comm/inner_options.hpp"
#include "parallel/pipeline/device_lanes.hpp"
#include "parallel/pipeline/simulate.hpp"
#include "toy_on_device.hpp"

namespace tsr::testing {
namespace {

using pipeline::Direction;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

// --- lanes

TEST(DeviceLanes, NoRankHasTwoDirectionsOnOne) {
    const auto both = [](std::initializer_list<std::pair<int, int>> neighbours) {
        std::vector<Direction> all;
        for (const auto& [a, b] : neighbours) all.insert(all.end(), {{a, b}, {b, a}});
        return all;
    };
    struct Case {
        std::vector<Direction> directions;
        size_t most;
    };
    for (const Case& one : {Case{both({{0, 0}}), 0}, Case{both({{0, 1}}), 2}, Case{both({{0, 1}, {1, 2}, {2, 3}}), 4},
                            Case{both({{0, 1}, {1, 2}, {2, 3}, {3, 0}}), 4}, Case{both({{0, 1}, {1, 2}, {2, 0}}), 6},
                            Case{both({{0, 1}, {1, 2}, {0, 2}, {2, 3}, {1, 3}, {0, 3}}), 12}}) {
        const auto lanes = pipeline::lanes_of(one.directions);
        std::set<std::pair<int, size_t>> taken;  // ranks and lanes
        for (const auto& [direction, lane] : lanes) {
            EXPECT_TRUE(taken.insert({direction.from, lane}).second);
            EXPECT_TRUE(taken.insert({direction.to, lane}).second);
            EXPECT_LT(lane, one.most);
        }
        for (const Direction& direction : one.directions) {
            EXPECT_EQ(lanes.contains(direction), direction.from != direction.to);
        }
    }
}

// --- the bits of one process

struct Row {
    const char* schedule;
    int ranks;
    int stages_per_rank;
};

class EveryScheduleOnDevices : public PipelineOnDevices, public ::testing::WithParamInterface<Row> {};

void expect_same(const Results& got, const Results& wanted) {
    for (const auto& [stage, layer] : got.layers) {
        EXPECT_THAT(layer.dw, ElementsAreArray(wanted.layers.at(stage).dw)) << "stage " << stage;
        EXPECT_THAT(layer.db, ElementsAreArray(wanted.layers.at(stage).db)) << "stage " << stage;
    }
    for (const auto& [place, grad] : got.input_grads) {
        EXPECT_THAT(grad, ElementsAreArray(wanted.input_grads.at(place)))
            << "stage " << place.first << ", micro-batch " << place.second;
    }
}

TEST_P(EveryScheduleOnDevices, TrainsToTheBitsOfOneProcess) {
    const Row& row = GetParam();
    simulated_cuda_delay(60, 7);
    expect_all_well(run_on_devices(row.ranks, [&](Communicator& comm) {
        for (const int m : row.schedule == std::string_view("dualpipev") ? std::vector{8} : std::vector{4, 8}) {
            const Schedule schedule = pipeline::make_schedule(row.schedule, row.ranks, row.stages_per_rank, m);
            const std::vector<int> stages = stages_of(schedule, comm.rank());
            DeviceTrainer trainer(comm, stages, options_of(row.schedule, m));
            Results alone;
            for (const int more : {1, 0, 4}) {
                Data data(static_cast<size_t>(2 * m + more), schedule.stages(), m + more);
                train_alone(schedule, alone, data.inputs, data.targets, data.rows);
                trainer.step(data);
                EXPECT_LE(
                    trainer.pipe->stats().peak_activations,
                    static_cast<size_t>(pipeline::simulate(schedule).ranks[static_cast<size_t>(comm.rank())].peak));
            }
            trainer.settle();  // once, after three steps
            expect_same(trainer.results, alone);
            if (trainer.pipe->has_stage(schedule.stages() - 1)) {
                EXPECT_THAT(trainer.results.losses, ElementsAreArray(alone.losses)) << m << " micro-batches";
            }
            EXPECT_EQ(trainer.results.input_grads.size(),
                      (stages.size() - (stages.front() == 0 ? 1 : 0)) * static_cast<size_t>(m));
        }
    }));
}

std::vector<Row> rows() {
    std::vector<Row> all;
    for (const int ranks : {1, 2, 4}) {
        for (const char* one : {"gpipe", "1f1b", "zb_h2"}) all.push_back({one, ranks, 1});
        for (const char* one : {"looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"}) {
            all.push_back({one, ranks, 2});
        }
        for (const char* one : {"zbv", "dualpipev"}) all.push_back({one, ranks, 2});
    }
    return all;
}

INSTANTIATE_TEST_SUITE_P(Of, EveryScheduleOnDevices, ::testing::ValuesIn(rows()), [](const auto& row) {
    return std::string(row.param.schedule) + "_" + std::to_string(row.param.ranks) + "x" +
           std::to_string(row.param.stages_per_rank);
});

}  // namespace
}  // namespace tsr::testing
