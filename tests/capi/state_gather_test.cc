// Whole tensors of a state, gathered one after the other.
#include "api.hpp"

namespace {

using ::testing::Each;

constexpr int32_t world = 4;
constexpr size_t count = 15;

// A model of a parameter cut by rows, by blocks of them, or anywhere; in replicas or not. Element k is k, its moments
// zero.
struct Sharded {
    api::Array<float> weight{{5, 3}, 0};
    tsr_param param{"w", weight.tensor()};
    tsr_fsdp_unit unit{"u", &param, 1, nullptr, 1, 0, 0, 0, 0, 0};
    api::Owned<tsr_fsdp> fsdp;
    api::Owned<tsr_optimizer> optimizer;
    api::Owned<tsr_state> state;

    Sharded(tsr_comm* comm, int32_t row_block, int32_t flat, int32_t shard_ranks) {
        for (size_t k = 0; k < count; ++k) weight.values[k] = static_cast<float>(k);
        unit.row_block = row_block;
        unit.flat = flat;
        tsr_fsdp_options options;
        EXPECT_OK(tsr_fsdp_options_init(&options, sizeof options));
        options.shard_ranks = shard_ranks;
        EXPECT_OK(tsr_fsdp_create(comm, &unit, 1, &options, fsdp.out()));
        EXPECT_OK(tsr_fsdp_adamw(fsdp, nullptr, optimizer.out()));
        EXPECT_OK(tsr_state_create(state.out()));
        EXPECT_OK(tsr_state_add_fsdp(state, "model", fsdp));
        EXPECT_OK(tsr_state_add_optimizer(state, "optim", optimizer));
    }
};

TEST(StateGather, EveryTensorIsWholeOnTheRootOrOnAll) {
    api::run_ranks(world, [](tsr_comm* comm, int32_t rank) {
        for (const auto& [row_block, flat, shard_ranks] :
             {std::tuple{0, 0, 0}, std::tuple{2, 0, 0}, std::tuple{0, 1, 0}, std::tuple{0, 0, 2},
              std::tuple{0, 1, 2}}) {
            const Sharded model(comm, row_block, flat, shard_ranks);
            size_t tensors = 0;
            ASSERT_OK(tsr_state_tensor_count(model.state, &tensors));
            std::vector<std::string> names;
            for (size_t i = 0; i < tensors; ++i) {
                tsr_param tensor{};
                ASSERT_OK(tsr_state_tensor(model.state, i, &tensor));
                EXPECT_EQ(tensor.tensor.data, nullptr);
                names.emplace_back(tensor.name);
                const std::vector<int64_t> dims(tensor.tensor.shape, tensor.tensor.shape + tensor.tensor.ndim);
                for (const int32_t root : {-1, 2}) {
                    api::Array<float> whole(dims, -1);
                    const tsr_tensor memory = whole.tensor();
                    const bool wanted = root == -1 || root == rank;
                    ASSERT_OK(tsr_state_gather(model.state, comm, tensor.name, root, wanted ? &memory : nullptr));
                    for (size_t k = 0; wanted && k < whole.values.size(); ++k) {
                        EXPECT_EQ(whole.values[k], names.back() == "model.w" ? static_cast<float>(k) : 0);
                    }
                }
            }
            EXPECT_THAT(names, testing::ElementsAre("model.w", "optim.state.w.exp_avg", "optim.state.w.exp_avg_sq",
                                                    "optim.state.w.step"));
        }
    });
}

TEST(StateGather, ATensorThatIsCutAlongItsLastDimensionIsPutTogether) {
    api::run_ranks(world, [](tsr_comm* comm, int32_t rank) {
        const std::array<int32_t, 1> mesh{world};
        const tsr_placement columns{TSR_PLACE_SHARD, 1};
        const std::array<int64_t, 2> wide{3, 10};
        api::Owned<tsr_layout> layout;
        ASSERT_OK(tsr_layout_create(wide.data(), 2, mesh.data(), &columns, 1, layout.out()));
        int32_t boxes = 0;
        ASSERT_OK(tsr_layout_box_count(layout, rank, &boxes));
        const int64_t width = rank < 3 ? 3 : 1;
        api::Array<float> own({3, width}, 0);
        for (size_t k = 0; k < own.values.size(); ++k) {
            const auto w = static_cast<size_t>(width);
            const size_t element = k / w * 10 + static_cast<size_t>(rank) * 3 + k % w;
            own.values[k] = static_cast<float>(element);
        }
        const tsr_tensor piece = own.tensor();
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_EQ(boxes, 1);
        ASSERT_OK(tsr_state_add_sharded(state, "t", layout, TSR_DTYPE_F32, &piece, rank));
        api::Array<float> whole({3, 10}, -1);
        const tsr_tensor memory = whole.tensor();
        ASSERT_OK(tsr_state_gather(state, comm, "t", 0, &memory));
        for (size_t k = 0; k < whole.values.size(); ++k)
            EXPECT_EQ(whole.values[k], rank == 0 ? static_cast<float>(k) : -1);
    });
}

TEST(StateGather, MistakesAreToldOnEveryRank) {
    api::run_ranks(world, [](tsr_comm* comm, int32_t rank) {
        const Sharded model(comm, 0, 0, 0);
        api::Array<float> whole({5, 3}, -1);
        const tsr_tensor memory = whole.tensor();
        const bool wrong = rank == 1;
        const char* const name = wrong ? "model.v" : "model.w";
        EXPECT_FAILS(tsr_state_gather(model.state, comm, name, -1, &memory), wrong ? TSR_E_NOT_FOUND : TSR_E_MISMATCH,
                     "model.v");
        EXPECT_FAILS(tsr_state_gather(model.state, comm, "model.w", wrong ? 0 : 1, &memory), TSR_E_MISMATCH, "on rank");
        EXPECT_FAILS(tsr_state_gather(model.state, comm, "model.w", 1, wrong ? nullptr : &memory),
                     wrong ? TSR_E_INVALID_ARGUMENT : TSR_E_MISMATCH, "whole is NULL");
        api::Array<float> small({5, 2}, -1);
        const tsr_tensor too_small = small.tensor();
        EXPECT_FAILS(tsr_state_gather(model.state, comm, "model.w", -1, wrong ? &too_small : &memory),
                     wrong ? TSR_E_INVALID_ARGUMENT : TSR_E_MISMATCH, "the memory for it is f32 [5, 2]");
        EXPECT_FAILS(tsr_state_gather(model.state, comm, "model.w", world, &memory), TSR_E_INVALID_ARGUMENT,
                     "root is 4");
        EXPECT_FAILS(tsr_state_gather(model.state, comm, "model.w", -2, &memory), TSR_E_INVALID_ARGUMENT, "root is -2");
        EXPECT_THAT(whole.values, Each(-1.0F));
        EXPECT_OK(tsr_state_gather(model.state, comm, "model.w", -1, &memory)) << "it goes on";
        EXPECT_EQ(whole.values[14], 14.0F);
    });
    const auto comm = api::alone();
    const Sharded model(comm, 0, 0, 0);
    tsr_param tensor{};
    EXPECT_FAILS(tsr_state_tensor(model.state, 4, &tensor), TSR_E_INVALID_ARGUMENT,
                 "tensor index 4 is out of range: the state has 4 tensors");
    EXPECT_FAILS(tsr_state_tensor(model.state, 0, nullptr), TSR_E_INVALID_ARGUMENT, "tensor is NULL");
    EXPECT_FAILS(tsr_state_tensor_count(model.state, nullptr), TSR_E_INVALID_ARGUMENT, "count is NULL");
    EXPECT_FAILS(tsr_state_gather(model.state, comm, nullptr, 0, nullptr), TSR_E_INVALID_ARGUMENT, "name is NULL");
}

TEST(StateGather, ALayoutOfOtherRanksIsRefused) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        const auto self = api::alone();
        const Sharded model(self, 0, 0, 0);
        api::Array<float> whole({5, 3}, -1);
        const tsr_tensor memory = whole.tensor();
        EXPECT_FAILS(tsr_state_gather(model.state, comm, "model.w", -1, &memory), TSR_E_INVALID_ARGUMENT,
                     "has a layout of 1 ranks, with this as rank 0; the communicator has 2 ranks");
    });
}

}  // namespace
