// Models of which ranks have different parts: joined, their checkpoints are those of one rank, and so are their norms.
#include <deque>
#include <fstream>
#include <iterator>
#include <map>

#include "api.hpp"

namespace {

using ::testing::HasSubstr;

constexpr int32_t layers = 8;

struct Cut {
    int32_t dp = 1;
    int32_t tp = 1;
    int32_t pp = 1;
    bool fsdp = false;

    [[nodiscard]] int32_t ranks() const { return dp * tp * pp; }
    [[nodiscard]] std::string name() const {
        return (fsdp ? "fsdp" : "dp") + std::to_string(dp) + "_tp" + std::to_string(tp) + "_pp" + std::to_string(pp);
    }
};

std::span<float> floats(const tsr_tensor& tensor) {
    size_t count = 1;
    for (int32_t d = 0; d < tensor.ndim; ++d) count *= static_cast<size_t>(tensor.shape[d]);
    return {static_cast<float*>(tensor.data), count};
}

// The gradient of every element of a parameter.
float grad_of(const std::string& name) {
    return name == "embed" ? 0.5F : 0.01F * static_cast<float>(name[1] - '0' + 1);
}

constexpr std::array<tsr_tp_rule, 3> rules{tsr_tp_rule{"l*.up", TSR_TP_COLUMN, 0, nullptr},
                                           tsr_tp_rule{"l*.down", TSR_TP_ROW, 0, nullptr},
                                           tsr_tp_rule{"embed", TSR_TP_VOCABULARY, 0, nullptr}};

// The stage of this rank: some layers, and the embedding in the first stage and in the last.
struct Stage {
    std::deque<std::string> names;
    std::deque<api::Array<float>> arrays;
    std::vector<tsr_param> params;
    api::Owned<tsr_comm> group;  // the ranks with this stage
    api::Owned<tsr_comm> line;   // one rank of each stage
    api::Owned<tsr_mesh> mesh;
    api::Owned<tsr_mesh> tp_mesh;
    api::Owned<tsr_tp> tp;
    api::Owned<tsr_ddp> ddp;
    api::Owned<tsr_fsdp> fsdp;
    api::Owned<tsr_optimizer> adam;
    api::Owned<tsr_state> state;

    Stage(tsr_comm* comm, int32_t rank, const Cut& cut) {
        const int32_t of_stage = cut.dp * cut.tp;
        const int32_t stage = rank / of_stage;
        EXPECT_OK(tsr_comm_split(comm, stage, rank, nullptr, group.out()));
        EXPECT_OK(tsr_comm_split(comm, rank % of_stage, rank, nullptr, line.out()));
        for (int32_t i = stage * layers / cut.pp; i < (stage + 1) * layers / cut.pp; ++i) {
            const std::string layer = "l" + std::to_string(i);
            add(layer + ".up.weight", {6, 4});
            add(layer + ".down.weight", {4, 6});
            add(layer + ".down.bias", {4});
        }
        if (stage == 0 || stage == cut.pp - 1) add("embed", {5, 4});
        create(cut);
        EXPECT_OK(tsr_state_create(state.out()));
        if (tp != nullptr && ddp == nullptr && fsdp == nullptr) {
            EXPECT_OK(tsr_state_add_tp(state, "model", tp));
        }
        if (ddp != nullptr) {
            EXPECT_OK(tsr_state_add_ddp(state, "model", ddp));
        }
        if (fsdp != nullptr) {
            EXPECT_OK(tsr_state_add_fsdp(state, "model", fsdp));
        }
        EXPECT_OK(tsr_state_add_optimizer(state, "optim", adam));
    }

    void add(const std::string& name, std::vector<int64_t> shape) {
        const char* known = names.emplace_back(name).c_str();
        api::Array<float>& array = arrays.emplace_back(std::move(shape), -1.0F);
        params.push_back({known, array.tensor()});
    }

    // A model over the dp ranks, of slices if tp cuts; of tp alone if there is one dp rank.
    void create(const Cut& cut) {
        const std::array<const char*, 2> dims{"dp", "tp"};
        const std::array<int32_t, 2> sizes{cut.dp, cut.tp};
        ASSERT_OK(tsr_mesh_create(group, dims.data(), sizes.data(), 2, mesh.out()));
        tsr_comm* data = nullptr;
        ASSERT_OK(tsr_mesh_comm(mesh, "dp", &data));
        std::vector<tsr_param> own = params;
        if (cut.tp > 1) {
            ASSERT_OK(tsr_mesh_slice(mesh, &dims[1], 1, tp_mesh.out()));
            ASSERT_OK(
                tsr_tp_create(tp_mesh, params.data(), params.size(), rules.data(), rules.size(), nullptr, tp.out()));
            for (size_t i = 0; i < own.size(); ++i) ASSERT_OK(tsr_tp_slice(tp, i, &own[i]));
        }
        if (cut.fsdp) {
            tsr_fsdp_unit unit;
            ASSERT_OK(tsr_fsdp_unit_init(&unit, sizeof unit));
            unit.name = "all";
            unit.params = own.data();
            unit.n = own.size();
            tsr_fsdp_options options;
            ASSERT_OK(tsr_fsdp_options_init(&options, sizeof options));
            options.tp = tp;
            ASSERT_OK(tsr_fsdp_create(data, &unit, 1, &options, fsdp.out()));
            ASSERT_OK(tsr_fsdp_adamw(fsdp, nullptr, adam.out()));
        } else if (cut.dp > 1 || tp == nullptr) {
            tsr_ddp_options options;
            ASSERT_OK(tsr_ddp_options_init(&options, sizeof options));
            options.tp = tp;
            ASSERT_OK(tsr_ddp_create(data, own.data(), own.size(), &options, ddp.out()));
            ASSERT_OK(tsr_ddp_adamw(ddp, nullptr, adam.out()));
        } else {
            ASSERT_OK(tsr_tp_adamw(tp, nullptr, adam.out()));
        }
    }

    void backward() {
        tsr_tensor grad{};
        if (fsdp != nullptr) {
            ASSERT_OK(tsr_fsdp_backward(fsdp, 0));
        }
        for (size_t i = 0; i < params.size(); ++i) {
            if (fsdp != nullptr) {
                ASSERT_OK(tsr_fsdp_grad(fsdp, i, &grad));
            } else if (ddp != nullptr) {
                ASSERT_OK(tsr_ddp_grad(ddp, i, &grad));
            } else {
                ASSERT_OK(tsr_tp_grad(tp, i, &grad));
            }
            for (float& g : floats(grad)) g = grad_of(names[i]);
        }
        if (fsdp != nullptr) {
            ASSERT_OK(tsr_fsdp_grads_ready(fsdp, 0));
            ASSERT_OK(tsr_fsdp_wait(fsdp));
        } else if (ddp != nullptr) {
            ASSERT_OK(tsr_ddp_ready_all(ddp));
            ASSERT_OK(tsr_ddp_wait(ddp));
        } else {
            ASSERT_OK(tsr_tp_sum_grads(tp, nullptr));
        }
    }
};

using Contents = std::map<std::string, std::vector<float>>;

// All tensors of the last checkpoint under `root`, and the file that it is exported to.
Contents contents_of(const std::string& root, std::string& file) {
    api::Owned<tsr_checkpoint> checkpoint;
    EXPECT_OK(tsr_checkpoint_open(root.c_str(), checkpoint.out()));
    size_t count = 0;
    EXPECT_OK(tsr_checkpoint_tensor_count(checkpoint, &count));
    Contents contents;
    for (size_t i = 0; i < count; ++i) {
        const char* name = nullptr;
        tsr_dtype dtype = 0;
        const int64_t* shape = nullptr;
        int32_t ndim = 0;
        EXPECT_OK(tsr_checkpoint_tensor(checkpoint, i, &name, &dtype, &shape, &ndim));
        api::Array<float> array({shape, shape + ndim}, -2);
        const tsr_tensor memory = array.tensor();
        EXPECT_OK(tsr_checkpoint_read(checkpoint, name, &memory));
        contents[name] = array.values;
    }
    const std::string exported = root + "/exported";
    EXPECT_OK(tsr_checkpoint_export(checkpoint, nullptr, exported.c_str(), nullptr));
    std::ifstream in(exported + "/model.safetensors", std::ios::binary);
    file.assign(std::istreambuf_iterator<char>(in), {});
    return contents;
}

// One rank trains a step; then each cut loads what the one before it saved, and saves it again.
TEST(StateJoin, ACheckpointDoesNotShowHowTheModelWasCut) {
    const api::TemporaryDirectory directory;
    const auto root_of = [&](const std::string& name) { return (directory.path() / name).string(); };
    double expected_norm = 0;
    Contents expected;
    std::string expected_file;
    const Cut one;
    api::run_ranks(1, [&](tsr_comm* comm, int32_t rank) {
        Stage whole(comm, rank, one);
        for (size_t i = 0; i < whole.arrays.size(); ++i) {
            for (size_t k = 0; k < whole.arrays[i].values.size(); ++k) {
                whole.arrays[i].values[k] = static_cast<float>(i) + 0.01F * static_cast<float>(k);
            }
        }
        whole.backward();
        ASSERT_OK(tsr_optimizer_clip_grad_norm(whole.adam, 1e9, 2, &expected_norm));
        ASSERT_OK(tsr_optimizer_step(whole.adam));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, root_of("first").c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, whole.state));
    });
    expected = contents_of(root_of("first"), expected_file);
    ASSERT_EQ(expected.size(), (layers * 3 + 1) * 4U);
    ASSERT_THAT(expected_file, HasSubstr("l7.down.bias"));

    std::string before = "first";
    for (const Cut& cut : {Cut{1, 1, 8}, Cut{2, 2, 2}, Cut{2, 2, 2, true}, Cut{2, 1, 4}, Cut{4, 1, 2, true},
                           Cut{1, 3, 2}, Cut{1, 1, 3}, Cut{4, 2, 1, true}, Cut{1, 4, 2}, Cut{}}) {
        SCOPED_TRACE(cut.name());
        api::run_ranks(cut.ranks(), [&](tsr_comm* comm, int32_t rank) {
            Stage stage(comm, rank, cut);
            ASSERT_OK(tsr_state_join(stage.state, comm));
            size_t tensors = 0;
            ASSERT_OK(tsr_state_tensor_count(stage.state, &tensors));
            EXPECT_EQ(tensors, expected.size()) << "every rank names all";
            api::Owned<tsr_checkpoint> checkpoint;
            ASSERT_OK(tsr_checkpoint_open(root_of(before).c_str(), checkpoint.out()));
            ASSERT_OK(tsr_checkpoint_load(checkpoint, stage.state, nullptr));
            api::Owned<tsr_saver> saver;
            ASSERT_OK(tsr_saver_create(comm, root_of(cut.name()).c_str(), nullptr, saver.out()));
            ASSERT_OK(tsr_saver_save(saver, 1, stage.state));

            ASSERT_OK(tsr_optimizer_join(stage.adam, stage.line));
            stage.backward();
            double norm = 0;
            ASSERT_OK(tsr_optimizer_clip_grad_norm(stage.adam, 1e9, 2, &norm));
            EXPECT_NEAR(norm, expected_norm, 1e-9);
            ASSERT_OK(tsr_optimizer_clip_grad_norm(stage.adam, 1e9, INFINITY, &norm));
            EXPECT_EQ(norm, 0.5);
            api::Array<float> embed({5, 4}, 0);
            const tsr_tensor memory = embed.tensor();
            ASSERT_OK(tsr_state_gather(stage.state, comm, "model.embed", cut.ranks() - 1, &memory));
            if (rank == cut.ranks() - 1) {
                EXPECT_EQ(embed.values, expected["model.embed"]);
            }
        });
        std::string file;
        EXPECT_EQ(contents_of(root_of(cut.name()), file), expected);
        EXPECT_TRUE(file == expected_file) << "exported, it is the file of one rank";
        before = cut.name();
        if (HasFailure()) break;
    }
}

// Two ranks, each with a tensor of its own and one that both have.
struct Own {
    api::Array<float> common;
    api::Array<float> own;
    api::Owned<tsr_state> state;

    Own(int32_t rank, std::vector<int64_t> shape)
        : common(std::move(shape), static_cast<float>(rank)), own({2}, static_cast<float>(rank)) {
        EXPECT_OK(tsr_state_create(state.out()));
        const tsr_tensor first = common.tensor();
        EXPECT_OK(tsr_state_add_tensor(state, "common", &first));
        const tsr_tensor second = own.tensor();
        EXPECT_OK(tsr_state_add_tensor(state, rank == 0 ? "left" : "right", &second));
    }
};

TEST(StateJoin, WithoutItASaveNamesTheDifference) {
    const api::TemporaryDirectory directory;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        const Own own(rank, {3});
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        EXPECT_FAILS(tsr_saver_save(saver, 1, own.state), TSR_E_MISMATCH, "'right'");
        EXPECT_OK(tsr_state_join(own.state, comm));
        EXPECT_OK(tsr_state_join(own.state, comm)) << "again";
        EXPECT_OK(tsr_saver_save(saver, 1, own.state));
    });
}

TEST(StateJoin, MistakesAreToldOnEveryRankAndChangeNothing) {
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        const Own own(rank, {3 + rank});
        EXPECT_FAILS(tsr_state_join(own.state, comm), TSR_E_MISMATCH,
                     "tensor 'common' is f32 [3] on rank 0, but f32 [4] on rank 1");
        size_t tensors = 0;
        EXPECT_OK(tsr_state_tensor_count(own.state, &tensors));
        EXPECT_EQ(tensors, 2U);
    });
    // Rows 0 to 1 here, and 1 to 2 there.
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        tsr_box box{};
        box.offsets[0] = rank;
        box.sizes[0] = 2;
        const int64_t all = 3;
        const int32_t count = 1;
        api::Owned<tsr_layout> layout;
        ASSERT_OK(tsr_layout_from_boxes(&all, 1, &box, &count, 1, layout.out()));
        api::Array<float> own({2}, 0);
        const tsr_tensor piece = own.tensor();
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_sharded(state, "t", layout, TSR_DTYPE_F32, &piece, 0));
        EXPECT_FAILS(tsr_state_join(state, comm), TSR_E_INVALID_ARGUMENT,
                     "tensor 't': the ranks hold parts that do not fit together");
    });
}

TEST(StateJoin, TensorsWithoutElementsAndOfNoDimensionsAreJoined) {
    const api::TemporaryDirectory directory;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        api::Array<float> scalar(std::vector<int64_t>{}, 7);
        api::Array<float> none({0, 3}, 7);
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        const tsr_tensor first = scalar.tensor();
        const tsr_tensor second = none.tensor();
        if (rank == 1) {
            ASSERT_OK(tsr_state_add_tensor(state, "scalar", &first));
        }
        if (rank == 1) {
            ASSERT_OK(tsr_state_add_tensor(state, "none", &second));
        }
        ASSERT_OK(tsr_state_join(state, comm));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, state));
        scalar.values = {0};
        int64_t step = 0;
        ASSERT_OK(tsr_saver_resume(saver, state, &step));
        EXPECT_EQ(scalar.values.front(), rank == 1 ? 7.0F : 0.0F);
    });
}

// Ranks with different parameters, each of whose gradients is 3 or 4.
TEST(OptimizerJoin, NormsAndOverflowsAreThoseOfAllRanks) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        api::Array<float> value({1}, 0);
        api::Array<float> grad({1}, rank == 0 ? 3.0F : 4.0F);
        const tsr_param param{rank == 0 ? "a" : "b", value.tensor()};
        const tsr_tensor of_param = grad.tensor();
        api::Owned<tsr_optimizer> sgd;
        ASSERT_OK(tsr_sgd_create(&param, &of_param, 1, nullptr, sgd.out()));
        double norm = 0;
        ASSERT_OK(tsr_optimizer_clip_grad_norm(sgd, 1e9, 2, &norm));
        EXPECT_EQ(norm, rank == 0 ? 3 : 4);
        ASSERT_OK(tsr_optimizer_join(sgd, comm));
        ASSERT_OK(tsr_optimizer_clip_grad_norm(sgd, 1e9, 2, &norm));
        EXPECT_EQ(norm, 5);
        EXPECT_FAILS(tsr_optimizer_join(sgd, comm), TSR_E_INVALID_STATE, "the optimizer was joined already");

        if (rank == 1) grad.values[0] = INFINITY;
        api::Owned<tsr_grad_scaler> scaler;
        ASSERT_OK(tsr_grad_scaler_create(nullptr, scaler.out()));
        tsr_flag stepped = -1;
        ASSERT_OK(tsr_grad_scaler_step(scaler, sgd, &stepped));
        EXPECT_EQ(stepped, 0) << "the other rank's gradient overflows";
    });
}

TEST(OptimizerJoin, RanksThatHoldDifferentPartsOfAParameterAreRefused) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        api::Array<float> weight({4, 2}, 0);
        const tsr_param param{"w", weight.tensor()};
        tsr_fsdp_unit unit;
        ASSERT_OK(tsr_fsdp_unit_init(&unit, sizeof unit));
        unit.name = "u";
        unit.params = &param;
        unit.n = 1;
        api::Owned<tsr_fsdp> fsdp;
        ASSERT_OK(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()));
        api::Owned<tsr_optimizer> sgd;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, nullptr, sgd.out()));
        EXPECT_FAILS(tsr_optimizer_join(sgd, comm), TSR_E_INVALID_ARGUMENT,
                     "ranks 0 and 1 hold different parts of \"w\"");
    });
}

}  // namespace
