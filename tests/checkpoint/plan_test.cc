// Every kind of layout, one a row of a table: saved in one and loaded in each other, every element compared. On disk each
// element stands once, and what ranks tell each other does not grow with the state.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <atomic>
#include <numeric>
#include <optional>
#include <set>

#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/model/plan.hpp"
#include "fixture.hpp"

namespace tsr::testing {
namespace {

// What each rank holds, as boxes.
Layout layout_of_boxes(const Dims& shape, const std::vector<std::vector<Box>>& of_ranks) {
    std::vector<Box> boxes;
    std::vector<int> counts;
    for (const auto& list : of_ranks) {
        for (const Box& box : list) {
            if (!box.empty()) boxes.push_back(box);
        }
        counts.push_back(
            static_cast<int>(std::count_if(list.begin(), list.end(), [](const Box& box) { return !box.empty(); })));
    }
    return Layout::from_boxes(shape, boxes, counts);
}

Box rows(const Dims& shape, int64_t begin, int64_t end) {
    Box box = Box::whole(shape);
    box.offsets[0] = begin;
    box.sizes[0] = end - begin;
    return box;
}

// Elements [begin, end) of the flattened tensor as boxes: one element of the first dimensions at a time where the range
// begins or ends within it.
std::vector<Box> flat_range(const Dims& shape, int64_t begin, int64_t end) {
    std::vector<Box> boxes;
    while (begin < end) {
        int64_t inner = 1;  // elements of the largest aligned block that begins here and fits
        int d = shape.ndim() - 1;
        while (d > 0 && begin % (inner * shape[d]) == 0 && begin + inner * shape[d] <= end) inner *= shape[d--];
        const int64_t at = begin / inner % shape[d];
        const int64_t count = std::min(shape[d] - at, (end - begin) / inner);
        Box box = Box::whole(shape);
        int64_t rest = begin / inner / shape[d];
        for (int outer = d - 1; outer >= 0; --outer) {
            box.offsets[outer] = rest % shape[outer];
            box.sizes[outer] = 1;
            rest /= shape[outer];
        }
        box.offsets[d] = at;
        box.sizes[d] = count;
        boxes.push_back(box);
        begin += count * inner;
    }
    return boxes;
}

struct Row {
    const char* name;
    int world_size;
    // Of a tensor with dimensions; none: every rank holds it whole.
    std::optional<Layout> (*layout)(const Dims& shape);
};

std::optional<Layout> placed(const Dims& shape, const std::vector<int>& mesh,
                             const std::vector<Placement>& placements) {
    return Layout::placed(shape, mesh, placements);
}

const Placement R = Placement::replicate();
Placement S(int dim) { return Placement::shard(dim); }

constexpr int strided_fsdp = 3;
constexpr int strided_tp = 2;

const Row table[] = {
    {"OneRank", 1, [](const Dims&) { return std::optional<Layout>(); }},
    {"Replicated", 3, [](const Dims&) { return std::optional<Layout>(); }},
    {"UnevenRows", 4, [](const Dims& shape) { return placed(shape, {4}, {S(0)}); }},
    {"MoreRanksThanRows", 16, [](const Dims& shape) { return placed(shape, {16}, {S(0)}); }},
    {"LastDimension", 3, [](const Dims& shape) { return placed(shape, {3}, {S(shape.ndim() - 1)}); }},
    {"MeshOfThree", 8, [](const Dims& shape) { return placed(shape, {2, 2, 2}, {S(shape.ndim() - 1), R, S(0)}); }},
    {"Hybrid", 6, [](const Dims& shape) { return placed(shape, {2, 3}, {R, S(0)}); }},
    {"OneDimensionTwice", 6, [](const Dims& shape) { return placed(shape, {2, 3}, {S(0), S(0)}); }},
    // Tensor parallel cut the rows first, FSDP each part of them; ranks count FSDP's dimension first.
    {"StridedRows", strided_fsdp * strided_tp,
     [](const Dims& shape) {
         std::vector<std::vector<Box>> of_ranks;
         for (int fsdp = 0; fsdp < strided_fsdp; ++fsdp) {
             for (int tp = 0; tp < strided_tp; ++tp) {
                 const Range part = chunk(shape[0], strided_tp, tp);
                 const Range own = chunk(part.end - part.begin, strided_fsdp, fsdp);
                 of_ranks.push_back({rows(shape, part.begin + own.begin, part.begin + own.end)});
             }
         }
         return std::optional(layout_of_boxes(shape, of_ranks));
     }},
    {"FlatRanges", 4,
     [](const Dims& shape) {
         std::vector<std::vector<Box>> of_ranks;
         for (int rank = 0; rank < 4; ++rank) {
             const Range range = chunk(shape.product(), 4, rank);
             of_ranks.push_back(flat_range(shape, range.begin, range.end));
         }
         return std::optional(layout_of_boxes(shape, of_ranks));
     }},
    {"RaggedRows", 4,
     [](const Dims& shape) {
         const int64_t first = shape[0] / 2 + 1;
         return std::optional(layout_of_boxes(
             shape, {{rows(shape, 0, first)}, {}, {rows(shape, first, first)}, {rows(shape, first, shape[0])}}));
     }},
    {"BoxesOfTwoHolders", 3,
     [](const Dims& shape) {
         const Box upper = rows(shape, 0, shape[0] / 2);
         const Box lower = rows(shape, shape[0] / 2, shape[0]);
         return std::optional(layout_of_boxes(shape, {{upper, lower}, {lower}, {upper}}));
     }},
};

const Spec specs[] = {{"model.cube", DType::f32, {10, 6, 3}}, {"model.few", DType::bf16, {2, 5}},
                      {"model.prime", DType::i64, {13, 2}},   {"model.scalar", DType::f64, {}},
                      {"model.nothing", DType::f32, {0, 4}},  {"optim.large", DType::f32, {48, 50}}};
const Spec tied{"model.tied", DType::f32, {7, 3}};
const char* const tied_too = "model.tied.too";

int64_t bytes_of(const Spec& spec) { return spec.shape.product() * static_cast<int64_t>(size_of(spec.dtype)); }

int64_t unique_bytes() {
    return std::accumulate(std::begin(specs), std::end(specs), bytes_of(tied),
                           [](int64_t sum, const Spec& spec) { return sum + bytes_of(spec); });
}

// The state of one rank in the layouts of a row.
class RowState {
   public:
    RowState(const Row& row, int rank) {
        for (const Spec& spec : specs) {
            const auto layout =
                spec.shape.product() == 0 || spec.shape.ndim() == 0 ? std::nullopt : row.layout(spec.shape);
            if (layout) {
                owned.add_sharded(spec, *layout, rank);
            } else {
                owned.add_whole(spec);
            }
        }
        owned.add_whole(tied);
        owned.state.add_tensor(tied_too, owned.state.tensors().at(tied.name).piece(0));
        owned.state.set_value(own_value(rank), Json(int64_t{rank}));
    }
    static std::string own_value(int rank) { return fmt::format("rank/{}/seed", rank); }

    OwnedState owned;
};

// Small enough that some tensors are split over their replicas, and others packed together.
SaverOptions table_options() {
    SaverOptions options = saver_options();
    options.plan = {.split_bytes = 4000, .pack_bytes = 200};
    return options;
}

// Of all rank files, without their headers.
int64_t data_bytes_of(const Checkpoint& checkpoint) {
    int64_t sum = 0;
    for (const SavedFile& file : checkpoint.manifest().files) {
        sum += RankFile::read(posix_file_system(), checkpoint.path() + "/" + file.name, file.size, file.header_crc,
                              checkpoint.manifest().save_id)
                   .data_bytes();
    }
    return sum;
}

class LayoutTable : public ::testing::TestWithParam<Row> {};

TEST_P(LayoutTable, WhatIsSavedInOneIsLoadedInEach) {
    const TempDir dir;
    const Row& saved = GetParam();
    expect_all_well(run_meeting(saved.world_size, [&](const std::shared_ptr<Communicator>& comm) {
        RowState state(saved, comm->rank());
        state.owned.fill();
        Saver(comm, dir.path(), table_options()).save(1, state.owned.state);
    }));
    const auto checkpoint = Checkpoint::open(dir.path());
    checkpoint->check(Checkpoint::Depth::everything);
    EXPECT_EQ(data_bytes_of(*checkpoint), unique_bytes()) << "every element once";
    EXPECT_EQ(checkpoint->manifest().aliases.at(tied_too), tied.name);

    for (const Row& loaded : table) {
        SCOPED_TRACE(loaded.name);
        expect_all_well(run_meeting(loaded.world_size, [&](const std::shared_ptr<Communicator>& comm) {
            RowState state(loaded, comm->rank());
            state.owned.poison();
            const std::string own = RowState::own_value(comm->rank());
            state.owned.state.set_value(own, Json(int64_t{-1}));
            (void)checkpoint->load(state.owned.state);
            EXPECT_EQ(state.owned.differences(), 0);
            // A rank that there was not keeps what it had.
            const int64_t value = comm->rank() < saved.world_size ? comm->rank() : -1;
            EXPECT_EQ(state.owned.state.value(own), Json(value));
        }));
    }
}

TEST_P(LayoutTable, RanksAgreeWhoWritesWhatWithoutAWord) {
    const Row& row = GetParam();
    for (const PlanOptions& options : {PlanOptions{}, table_options().plan, PlanOptions{1, 1}}) {
        std::vector<std::unique_ptr<RowState>> states;
        std::vector<SavePlan> plans;
        for (int rank = 0; rank < row.world_size; ++rank) {
            states.push_back(std::make_unique<RowState>(row, rank));
            const State& state = states.back()->owned.state;
            EXPECT_EQ(structure_of(state, row.world_size), structure_of(states.front()->owned.state, row.world_size));
            plans.push_back(make_plan(state, find_aliases(state), rank, row.world_size, options));
        }
        // Every piece that rank 0 tells of, in the plan of the rank that it names; and no other.
        size_t told = 0;
        for (const auto& [name, tensor] : plans.front().tensors()) {
            int64_t covered = 0;
            const auto look = [&, &name = name](const Box& box, int rank) {
                ++told;
                covered += box.numel();
                const auto& files = plans[static_cast<size_t>(rank)].files;
                const bool is_there = std::any_of(files.begin(), files.end(), [&](const std::vector<Piece>& pieces) {
                    return std::any_of(pieces.begin(), pieces.end(),
                                       [&](const Piece& piece) { return piece.name == name && *piece.box == box; });
                });
                EXPECT_TRUE(is_there) << name << " " << box.str() << " of rank " << rank;
            };
            if (tensor->shape.product() > 0) tensor->for_each_piece(Box::whole(tensor->shape), look);
            EXPECT_EQ(covered, tensor->shape.product()) << name;
        }
        size_t written = 0;
        for (const SavePlan& plan : plans) {
            for (const auto& pieces : plan.files) {
                written += static_cast<size_t>(std::count_if(pieces.begin(), pieces.end(),
                                                             [](const Piece& piece) { return !piece.box->empty(); }));
            }
        }
        EXPECT_EQ(written, told);
    }
}

INSTANTIATE_TEST_SUITE_P(Plan, LayoutTable, ::testing::ValuesIn(table),
                         [](const auto& row) { return std::string(row.param.name); });

// Counts what travels.
class CountingMeeting final : public Meeting {
   public:
    using Meeting::Meeting;
    std::vector<std::string> meet(int rank, std::string mine) override {
        if (rank == 0) ++messages;
        bytes += mine.size();
        size_t most = largest;
        while (mine.size() > most && !largest.compare_exchange_weak(most, mine.size())) {
        }
        return Meeting::meet(rank, std::move(mine));
    }
    std::atomic<int> messages = 0;
    std::atomic<size_t> bytes = 0;
    std::atomic<size_t> largest = 0;
};

TEST(Plan, NothingTravelsButVotesAndWhatWasWritten) {
    static_assert(sizeof(Digest) == 16);
    const auto travelled = [](int tensors) {
        const TempDir dir;
        const auto meeting = std::make_shared<CountingMeeting>(4);
        expect_all_well(run_threads(4, [&](int rank) {
            OwnedState owned;
            for (int i = 0; i < tensors; ++i) {
                const Spec spec{fmt::format("tensor.{}", i), DType::f32, {12, 5}};
                owned.add_sharded(spec, *table[static_cast<size_t>(i) % 2 == 0 ? 2 : 9].layout(spec.shape), rank);
            }
            owned.fill();
            Saver saver(std::make_shared<MeetingComm>(meeting, rank, 4), dir.path(), saver_options());
            saver.save(1, owned.state);
        }));
        return std::tuple(meeting->messages.load(), meeting->bytes.load(), meeting->largest.load());
    };
    const auto [few_messages, few_bytes, few_largest] = travelled(2);
    const auto [many_messages, many_bytes, many_largest] = travelled(400);
    EXPECT_EQ(many_messages, few_messages);
    EXPECT_LE(many_bytes, few_bytes + 256) << "the digits of the files' sizes";
    EXPECT_LT(many_largest, 256u);
}

TEST(Plan, LargeReplicatedTensorsAreSplitAndSmallOnesPacked) {
    constexpr int world_size = 4;
    OwnedState owned;
    owned.add_whole({"large", DType::u8, {1000, 10}});
    owned.add_whole({"one.row", DType::u8, {1, 10000}});  // cut along what it has
    owned.add_whole({"few.rows", DType::u8, {3, 4000}});
    for (int i = 0; i < 64; ++i) owned.add_whole({fmt::format("small.{:02}", i), DType::u8, {100}});
    const SavePlan plan = make_plan(owned.state, {}, 0, world_size, {.split_bytes = 8000, .pack_bytes = 400});
    const SavedTensors tensors = plan.tensors();
    EXPECT_EQ(tensors.at("large")->split, 4);
    EXPECT_EQ(tensors.at("one.row")->split, 4);
    EXPECT_EQ(tensors.at("few.rows")->split, 3);
    std::vector<int> writer(64);
    for (int i = 0; i < 64; ++i) {
        const SavedTensor& small = *tensors.at(fmt::format("small.{:02}", i));
        EXPECT_EQ(small.split, 1);
        writer[static_cast<size_t>(i)] = small.files.at(0).first;
    }
    int changes = 0;
    for (size_t i = 1; i < writer.size(); ++i) changes += writer[i] != writer[i - 1] ? 1 : 0;
    EXPECT_LE(changes, 15) << "packs of four";
    EXPECT_EQ(std::set<int>(writer.begin(), writer.end()).size(), 4u) << "all write some";
}

TEST(PlanCache, TheSameTensorsArePlannedOnce) {
    const Spec specs_of_it[] = {{"a", DType::f32, {4, 4}}, {"b", DType::f32, {5}}};
    OwnedState owned;
    for (const Spec& spec : specs_of_it) owned.add_whole(spec);
    PlanCache plans;
    const auto first = plans.of(owned.state, 0, 2, {});
    owned.state.set_value("epoch", Json(int64_t{1}));
    EXPECT_EQ(plans.of(owned.state, 0, 2, {}), first) << "values are no part of it";
    owned.add_whole({"c", DType::f32, {1}});
    const auto second = plans.of(owned.state, 0, 2, {});
    EXPECT_NE(second, first);
    EXPECT_NE(second->structure, first->structure);
    EXPECT_TRUE(second->plan->tensors().contains("c"));

    OwnedState other;
    for (const Spec& spec : specs_of_it) other.add_whole(spec);
    const auto third = plans.of(other.state, 0, 2, {});
    EXPECT_EQ(third->structure, first->structure);
    EXPECT_NE(third->plan->files.at(0).at(0).data, first->plan->files.at(0).at(0).data) << "memory of its own";
}

TEST(PlanCache, AStateThatTookInAnotherIsPlannedAnew) {
    OwnedState owned;
    owned.add_whole({"a", DType::f32, {4}});
    OwnedState part;
    part.add_whole({"b", DType::f32, {4}});
    PlanCache plans;
    const auto before = plans.of(owned.state, 0, 1, {});
    owned.state.add_all(std::move(part.state));
    EXPECT_EQ(plans.of(owned.state, 0, 1, {})->plan->tensors().size(), before->plan->tensors().size() + 1);
}

TEST(Structure, DiffersWithEachThingThatRanksMustAgreeOn) {
    const auto of = [](const Spec& spec, const std::optional<Layout>& layout) {
        OwnedState owned;
        if (layout) {
            owned.add_sharded(spec, *layout, 0);
        } else {
            owned.add_whole(spec);
        }
        return structure_of(owned.state, 2);
    };
    const Dims shape{4, 4};
    const Spec spec{"a", DType::f32, shape};
    const Digest base = of(spec, std::nullopt);
    EXPECT_EQ(base, of(spec, placed(shape, {2}, {R}))) << "whole tensors are replicated";
    std::set<Digest> all{base};
    const auto add = [&](const Digest& digest) { EXPECT_TRUE(all.insert(digest).second) << all.size(); };
    add(of({"b", DType::f32, shape}, std::nullopt));
    add(of({"a", DType::i32, shape}, std::nullopt));
    add(of({"a", DType::f32, {4, 4, 1}}, std::nullopt));
    add(of({"a", DType::f32, {2, 8}}, std::nullopt));
    add(of(spec, placed(shape, {2}, {S(0)})));
    add(of(spec, placed(shape, {2}, {S(1)})));
    add(of(spec, placed(shape, {2, 1}, {S(0), R})));
    add(of(spec, layout_of_boxes(shape, {{rows(shape, 0, 2)}, {rows(shape, 2, 4)}})));
    add(of(spec, layout_of_boxes(shape, {{rows(shape, 0, 3)}, {rows(shape, 3, 4)}})));
}

}  // namespace
}  // namespace tsr::testing
