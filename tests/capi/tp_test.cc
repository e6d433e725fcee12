// tessera/tp.h through the C ABI: a perceptron cut by columns and rows, its optimizer and its checkpoint.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>

#include "api.hpp"

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t rows = 3;
constexpr int64_t hidden = 5;
constexpr int64_t features = 4;

api::Owned<tsr_mesh> mesh_of(tsr_comm* comm) {
    const char* name = "tp";
    int32_t size = 0;
    EXPECT_OK(tsr_comm_world_size(comm, &size));
    api::Owned<tsr_mesh> mesh;
    EXPECT_OK(tsr_mesh_create(comm, &name, &size, 1, mesh.out()));
    return mesh;
}

struct Model {
    api::Array<double> w1{{hidden, features}, 0};
    api::Array<double> w2{{features, hidden}, 0};
    api::Array<double> b2{{features}, 0.25};

    Model() {
        for (size_t i = 0; i < w1.values.size(); ++i) w1.values[i] = 0.1 * static_cast<double>(i % 7) - 0.2;
        for (size_t i = 0; i < w2.values.size(); ++i) w2.values[i] = 0.1 * static_cast<double>(i % 5) - 0.1;
    }
    [[nodiscard]] std::array<tsr_param, 3> params() {
        return {tsr_param{"fc1.weight", w1.tensor()}, tsr_param{"fc2.weight", w2.tensor()},
                tsr_param{"fc2.bias", b2.tensor()}};
    }
};

constexpr std::array<tsr_tp_rule, 2> rules{tsr_tp_rule{"fc1", TSR_TP_COLUMN, 0, nullptr},
                                           tsr_tp_rule{"fc2", TSR_TP_ROW, 0, nullptr}};

std::span<double> values_of(const tsr_tensor& tensor) {
    size_t count = 1;
    for (int32_t d = 0; d < tensor.ndim; ++d) count *= static_cast<size_t>(tensor.shape[d]);
    return {static_cast<double*>(tensor.data), count};
}

api::Owned<tsr_tp> cut(tsr_mesh* mesh, Model& model) {
    api::Owned<tsr_tp> tp;
    const auto params = model.params();
    EXPECT_OK(tsr_tp_create(mesh, params.data(), params.size(), rules.data(), rules.size(), nullptr, tp.out()));
    return tp;
}

// y = x W1^T W2^T + b2 for x of ones, and the step of a loss that is the sum of y.
void step(tsr_tp* tp, tsr_optimizer* optimizer, std::vector<double>& y) {
    tsr_param w1;
    tsr_param w2;
    tsr_param b2;
    ASSERT_OK(tsr_tp_slice(tp, 0, &w1));
    ASSERT_OK(tsr_tp_slice(tp, 1, &w2));
    ASSERT_OK(tsr_tp_slice(tp, 2, &b2));
    const auto width = static_cast<size_t>(w1.tensor.shape[0]);
    std::vector<double> h(width, 0);
    for (size_t i = 0; i < width; ++i) {
        for (size_t k = 0; k < features; ++k) h[i] += values_of(w1.tensor)[i * features + k];
    }
    api::Array<double> out{{rows, features}, 0};
    for (size_t r = 0; r < rows; ++r) {
        for (size_t j = 0; j < features; ++j) {
            for (size_t i = 0; i < width; ++i)
                out.values[r * features + j] += h[i] * values_of(w2.tensor)[j * width + i];
        }
    }
    const tsr_tensor tensor = out.tensor();
    ASSERT_OK(tsr_tp_leave(tp, &tensor, -1, &b2.tensor, &tensor, nullptr, nullptr));
    y = out.values;
    tsr_tensor g1;
    tsr_tensor g2;
    tsr_tensor gb;
    ASSERT_OK(tsr_tp_grad(tp, 0, &g1));
    ASSERT_OK(tsr_tp_grad(tp, 1, &g2));
    ASSERT_OK(tsr_tp_grad(tp, 2, &gb));
    for (size_t i = 0; i < width; ++i) {
        double column = 0;
        for (size_t j = 0; j < features; ++j) {
            column += values_of(w2.tensor)[j * width + i];
            values_of(g2)[j * width + i] = rows * h[i];
        }
        for (size_t k = 0; k < features; ++k) values_of(g1)[i * features + k] = rows * column;
    }
    for (double& g : values_of(gb)) g = rows;
    ASSERT_OK(tsr_tp_sum_grads(tp, nullptr));
    double norm = 0;
    ASSERT_OK(tsr_optimizer_clip_grad_norm(optimizer, 0.5, 2, &norm));
    EXPECT_GT(norm, 0.5);
    ASSERT_OK(tsr_optimizer_step(optimizer));
}

// Three steps; a checkpoint of two ranks after the second, from which one rank goes on.
TEST(TpApi, TrainsLikeOneRankAndResumesOnAnyNumberOfRanks) {
    const api::TemporaryDirectory directory;
    std::vector<double> expected;
    api::run_ranks(1, [&](tsr_comm* comm, int32_t) {
        const auto mesh = mesh_of(comm);
        Model model;
        const auto tp = cut(mesh, model);
        api::Owned<tsr_optimizer> adam;
        ASSERT_OK(tsr_tp_adamw(tp, nullptr, adam.out()));
        for (int i = 0; i < 3; ++i) step(tp, adam, expected);
    });
    const auto state_of = [](tsr_tp* tp, tsr_optimizer* adam) {
        api::Owned<tsr_state> state;
        EXPECT_OK(tsr_state_create(state.out()));
        EXPECT_OK(tsr_state_add_tp(state, "model", tp));
        EXPECT_OK(tsr_state_add_optimizer(state, "optim", adam));
        return state;
    };
    api::run_ranks(2, [&](tsr_comm* comm, int32_t) {
        const auto mesh = mesh_of(comm);
        Model model;
        const auto tp = cut(mesh, model);
        api::Owned<tsr_optimizer> adam;
        ASSERT_OK(tsr_tp_adamw(tp, nullptr, adam.out()));
        std::vector<double> y;
        for (int i = 0; i < 2; ++i) step(tp, adam, y);
        const auto state = state_of(tp, adam);
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 2, state));
        step(tp, adam, y);
        for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], expected[i], 1e-12);
    });
    for (const int32_t ranks : {1, 3}) {
        api::run_ranks(ranks, [&](tsr_comm* comm, int32_t) {
            const auto mesh = mesh_of(comm);
            Model model;
            auto params = model.params();
            for (tsr_param& param : params) param.tensor.data = nullptr;  // they come from the checkpoint
            api::Owned<tsr_tp> tp;
            ASSERT_OK(tsr_tp_create(mesh, params.data(), params.size(), rules.data(), rules.size(), nullptr, tp.out()));
            api::Owned<tsr_optimizer> adam;
            ASSERT_OK(tsr_tp_adamw(tp, nullptr, adam.out()));
            const auto state = state_of(tp, adam);
            api::Owned<tsr_checkpoint> checkpoint;
            ASSERT_OK(tsr_checkpoint_open(directory.path().c_str(), checkpoint.out()));
            ASSERT_OK(tsr_checkpoint_load(checkpoint, state, nullptr));
            std::vector<double> y;
            step(tp, adam, y);
            for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], expected[i], 1e-12);
        });
    }
}

TEST(TpApi, ParametersAreAsRegistered) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        const auto mesh = mesh_of(comm);
        Model model;
        const auto tp = cut(mesh, model);
        size_t count = 0;
        EXPECT_OK(tsr_tp_param_count(tp, &count));
        EXPECT_EQ(count, 3U);
        tsr_param param;
        tsr_tp_style style = 0;
        int32_t dim = -2;
        EXPECT_OK(tsr_tp_param(tp, 1, &param, &style, &dim));
        EXPECT_STREQ(param.name, "fc2.weight");
        EXPECT_EQ(param.tensor.shape[1], hidden);
        EXPECT_EQ(param.tensor.data, nullptr);
        EXPECT_EQ(style, TSR_TP_ROW);
        EXPECT_EQ(dim, 1);
        EXPECT_OK(tsr_tp_param(tp, 2, nullptr, nullptr, &dim));
        EXPECT_EQ(dim, -1);
        EXPECT_OK(tsr_tp_slice(tp, 0, &param));
        EXPECT_EQ(param.tensor.shape[0], rank == 0 ? 3 : 2);
        EXPECT_FAILS(tsr_tp_slice(tp, 3, &param), TSR_E_INVALID_ARGUMENT, "parameter 3 does not exist");
        api::Owned<tsr_layout> layout;
        EXPECT_OK(tsr_tp_layout(tp, 0, layout.out()));
        tsr_box box;
        EXPECT_OK(tsr_layout_box(layout, 1, 0, &box));
        EXPECT_EQ(box.offsets[0], 3);
        EXPECT_EQ(box.sizes[0], 2);
        tsr_tensor grad;
        EXPECT_OK(tsr_tp_grad(tp, 0, &grad));
        values_of(grad)[0] = 5;
        EXPECT_OK(tsr_tp_zero_grad(tp));
        EXPECT_EQ(values_of(grad)[0], 0);
    });
}

TEST(TpApi, BadRulesAreRefused) {
    const api::Owned<tsr_comm> comm = api::alone();
    const auto mesh = mesh_of(comm);
    Model model;
    const auto params = model.params();
    api::Owned<tsr_tp> tp;
    const auto with = [&](const tsr_tp_rule& rule) {
        return tsr_tp_create(mesh, params.data(), params.size(), &rule, 1, nullptr, tp.out());
    };
    EXPECT_FAILS(with({"fc1", 9, 0, nullptr}), TSR_E_INVALID_ARGUMENT, "unknown style 9");
    EXPECT_FAILS(with({"fc1", TSR_TP_ROW, 1, nullptr}), TSR_E_INVALID_ARGUMENT, "dim is 1");
    EXPECT_FAILS(with({"fc1", TSR_TP_LAYOUT, 0, nullptr}), TSR_E_INVALID_ARGUMENT, "layout of a rule is NULL");
    EXPECT_FAILS(with({nullptr, TSR_TP_ROW, 0, nullptr}), TSR_E_INVALID_ARGUMENT, "pattern of rule 0 is NULL");
    EXPECT_FAILS(with({"fc9", TSR_TP_ROW, 0, nullptr}), TSR_E_INVALID_ARGUMENT, "\"fc9\"");
    EXPECT_FAILS(tsr_tp_create(mesh, params.data(), 3, nullptr, 1, nullptr, tp.out()), TSR_E_INVALID_ARGUMENT,
                 "rules is NULL");
    EXPECT_FAILS(tsr_tp_create(mesh, nullptr, 3, nullptr, 0, nullptr, tp.out()), TSR_E_INVALID_ARGUMENT,
                 "params is NULL");
    EXPECT_FAILS(tsr_tp_create(mesh, params.data(), 0, nullptr, 0, nullptr, tp.out()), TSR_E_INVALID_ARGUMENT,
                 "no parameters");
    tsr_tp_options options;
    EXPECT_OK(tsr_tp_options_init(&options, sizeof options));
    options.sequence_parallel = 2;
    EXPECT_FAILS(tsr_tp_create(mesh, params.data(), 3, nullptr, 0, &options, tp.out()), TSR_E_INVALID_ARGUMENT,
                 "sequence_parallel is 2");
    EXPECT_FAILS(with({"fc1", TSR_TP_ROW, 0, nullptr, -1, 0}), TSR_E_INVALID_ARGUMENT, "heads is -1");
    EXPECT_FAILS(with({"fc1", TSR_TP_SEQUENCE, 0, nullptr, 2, 0}), TSR_E_INVALID_ARGUMENT, "heads is 2");
    EXPECT_FAILS(with({"fc1", TSR_TP_COLUMN, 0, nullptr, 3, 0}), TSR_E_INVALID_ARGUMENT, "do not divide into 3 heads");
    EXPECT_FAILS(with({"fc1", TSR_TP_COLUMN, 0, nullptr, 5, 1}), TSR_E_INVALID_ARGUMENT, "reserved is 1");
    EXPECT_OK(with({"fc1", TSR_TP_COLUMN, 0, nullptr, 5, 0}));
    EXPECT_FAILS(
        with({"fc2.bias", TSR_TP_VOCABULARY, 0, nullptr}), TSR_E_INVALID_ARGUMENT,
        "parameter \"fc2.bias\" [4] cannot be cut as \"fc2.bias\" (vocabulary): it has 1 dimensions; the style "
        "needs 2");
    EXPECT_FAILS(with({"fc2", TSR_TP_SHARD, 1, nullptr}), TSR_E_INVALID_ARGUMENT, "it has no dimension 1");
    const int64_t shape = 4;
    const int32_t one = 1;
    const tsr_placement whole{TSR_PLACE_REPLICATE, 0};
    api::Owned<tsr_layout> layout;
    EXPECT_OK(tsr_layout_create(&shape, 1, &one, &whole, 1, layout.out()));
    EXPECT_FAILS(with({"fc1", TSR_TP_ROW, 0, layout}), TSR_E_INVALID_ARGUMENT, "only TSR_TP_LAYOUT has a layout");
    EXPECT_OK(with({"fc2.bias", TSR_TP_LAYOUT, 0, layout}));
}

// Shards of equal shapes would pass for whole parameters.
TEST(TpApi, ShardsOfFsdpAreNotCut) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        const auto mesh = mesh_of(comm);
        api::Array<double> weight{{4, 2}, 1};
        const tsr_param whole{"fc1.weight", weight.tensor()};
        tsr_fsdp_unit unit;
        ASSERT_OK(tsr_fsdp_unit_init(&unit, sizeof unit));
        unit.name = "fc1";
        unit.params = &whole;
        unit.n = 1;
        api::Owned<tsr_fsdp> fsdp;
        ASSERT_OK(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()));
        tsr_param shard;
        ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
        api::Owned<tsr_tp> tp;
        EXPECT_FAILS(tsr_tp_create(mesh, &shard, 1, rules.data(), 1, nullptr, tp.out()), TSR_E_INVALID_ARGUMENT,
                     "parameter \"fc1.weight\" is a shard of an FSDP model: create the tensor-parallel model first");
        EXPECT_OK(tsr_tp_create(mesh, &whole, 1, rules.data(), 1, nullptr, tp.out())) << "its memory is the program's";
        // Whole parameters are unsharded in memory of their own.
        ASSERT_OK(tsr_fsdp_forward(fsdp, 0));
        tsr_param unsharded{"fc1.weight", {}};
        ASSERT_OK(tsr_fsdp_whole(fsdp, 0, &unsharded.tensor));
        EXPECT_OK(tsr_tp_create(mesh, &unsharded, 1, rules.data(), 1, nullptr, tp.out()));
        ASSERT_OK(tsr_fsdp_forward_done(fsdp, 0));
    });
}

TEST(TpApi, ActivationsMoveInTheBackground) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        const auto mesh = mesh_of(comm);
        Model model;
        const auto tp = cut(mesh, model);
        api::Array<double> part{{2, 1}, rank + 1.0};
        api::Array<double> whole{{2, 2}, 0};
        const tsr_tensor in = part.tensor();
        const tsr_tensor out = whole.tensor();
        api::Owned<tsr_work> work;
        ASSERT_OK(tsr_tp_enter(tp, &in, 1, &out, nullptr, work.out()));
        ASSERT_OK(tsr_work_wait(work, tsr::testing::patience_ms(20000)));
        EXPECT_THAT(whole.values, ::testing::ElementsAre(1, 2, 1, 2));
        ASSERT_OK(tsr_tp_enter_backward(tp, &out, 1, &in, nullptr, work.out()));
        ASSERT_OK(tsr_work_wait(work, tsr::testing::patience_ms(20000)));
        EXPECT_THAT(part.values, ::testing::ElementsAre(2 * (rank + 1), 2 * (rank + 1)));
        ASSERT_OK(tsr_tp_leave_backward(tp, &in, 1, &out, nullptr, nullptr));
        EXPECT_THAT(whole.values, ::testing::ElementsAre(2, 4, 2, 4));
        ASSERT_OK(tsr_tp_gather(tp, &in, 1, &out, nullptr, nullptr));
        ASSERT_OK(tsr_tp_split(tp, &out, 1, &in, nullptr));
        EXPECT_EQ(part.values[0], 2.0 * (rank + 1));
        EXPECT_FAILS(tsr_tp_enter(tp, &in, -2, &out, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "dim is -2");
        EXPECT_FAILS(tsr_tp_gather(tp, &out, 1, &out, nullptr, work.out()), TSR_E_INVALID_ARGUMENT, "must be [2, 1]");
        EXPECT_EQ(static_cast<tsr_work*>(work), nullptr);
    });
}

TEST(TpApi, EmbedsAndComputesTheLossOfACutVocabulary) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        const auto mesh = mesh_of(comm);
        api::Array<double> words{{3, 2}, 0};
        for (size_t i = 0; i < 6; ++i) words.values[i] = static_cast<double>(i);
        const tsr_param param{"tok.weight", words.tensor()};
        const tsr_tp_rule rule{"tok", TSR_TP_VOCABULARY, 0, nullptr};
        api::Owned<tsr_tp> tp;
        ASSERT_OK(tsr_tp_create(mesh, &param, 1, &rule, 1, nullptr, tp.out()));
        api::Array<int64_t> ids(std::vector<int64_t>{2, 0});
        api::Array<double> out{{2, 2}, -1};
        const tsr_tensor of_ids = ids.tensor();
        const tsr_tensor of_out = out.tensor();
        ASSERT_OK(tsr_tp_embed(tp, 0, &of_ids, -1, &of_out, nullptr, nullptr));
        EXPECT_THAT(out.values, ::testing::ElementsAre(4, 5, 0, 1));
        tsr_tensor grad;
        ASSERT_OK(tsr_tp_grad(tp, 0, &grad));
        ASSERT_OK(tsr_tp_embed_backward(tp, 0, &of_ids, &of_out, -1, &grad, nullptr, nullptr));
        EXPECT_EQ(values_of(grad)[1], rank == 0 ? 1 : 5);
        ids.values[1] = 3;
        EXPECT_FAILS(tsr_tp_embed(tp, 0, &of_ids, -1, &of_out, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                     "id 3 at position 1");

        ids.values = {2, -100};
        api::Array<double> logits{{2, rank == 0 ? 2 : 1}, 0};
        api::Array<double> d_logits{{2, rank == 0 ? 2 : 1}, -1};
        double loss = 0;
        const tsr_tensor of_logits = logits.tensor();
        const tsr_tensor of_grad = d_logits.tensor();
        const tsr_tensor of_loss{&loss, nullptr, nullptr, 0, TSR_DTYPE_F64, TSR_DEVICE_CPU, 0, 0, {}};
        ASSERT_OK(tsr_tp_cross_entropy(tp, &of_logits, 3, &of_ids, nullptr, &of_loss, &of_grad, nullptr, nullptr));
        EXPECT_NEAR(loss, std::log(3.0), 1e-12);
        EXPECT_NEAR(d_logits.values[0], rank == 0 ? 1.0 / 3 : -2.0 / 3, 1e-12);
        EXPECT_EQ(d_logits.values.back(), 0);  // of the row that is ignored
        tsr_cross_entropy_options options;
        ASSERT_OK(tsr_cross_entropy_options_init(&options, sizeof options));
        options.reduction = TSR_LOSS_SUM;
        options.grad_scale = 3;
        ASSERT_OK(tsr_tp_cross_entropy(tp, &of_logits, 3, &of_ids, &options, &of_loss, &of_grad, nullptr, nullptr));
        EXPECT_NEAR(d_logits.values[0], rank == 0 ? 1 : -2, 1e-12);
        EXPECT_FAILS(tsr_tp_cross_entropy(tp, &of_logits, 5, &of_ids, nullptr, &of_loss, nullptr, nullptr, nullptr),
                     TSR_E_INVALID_ARGUMENT, "logits are");
    });
}

// A step with gradients of which each rank has only a part would train wrongly.
TEST(TpApi, AStepWithoutTheSumOfItsGradientsIsRefused) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        const auto mesh = mesh_of(comm);
        api::Array<double> weight{{2}, 1};
        const tsr_param param{"norm.weight", weight.tensor()};
        const tsr_tp_rule rule{"norm", TSR_TP_SEQUENCE, 0, nullptr};
        api::Owned<tsr_tp> tp;
        ASSERT_OK(tsr_tp_create(mesh, &param, 1, &rule, 1, nullptr, tp.out()));
        api::Owned<tsr_optimizer> sgd;
        tsr_sgd_options options;
        ASSERT_OK(tsr_sgd_options_init(&options, sizeof options));
        options.lr = 1;
        ASSERT_OK(tsr_tp_sgd(tp, &options, sgd.out()));
        tsr_tensor grad;
        ASSERT_OK(tsr_tp_grad(tp, 0, &grad));
        values_of(grad)[0] = 0.25;
        EXPECT_FAILS(tsr_optimizer_step(sgd), TSR_E_INVALID_STATE, "\"norm.weight\"");
        EXPECT_FAILS(tsr_optimizer_clip_grad_norm(sgd, 1, 2, nullptr), TSR_E_INVALID_STATE,
                     "sum_grads before you clip");
        EXPECT_FAILS(tsr_optimizer_clip_grad_value(sgd, 1), TSR_E_INVALID_STATE, "sum_grads before you clip");
        ASSERT_OK(tsr_tp_sum_grads(tp, nullptr));
        ASSERT_OK(tsr_optimizer_clip_grad_norm(sgd, 1, 2, nullptr));
        ASSERT_OK(tsr_optimizer_step(sgd));
        tsr_param slice;
        ASSERT_OK(tsr_tp_slice(tp, 0, &slice));
        EXPECT_EQ(values_of(slice.tensor)[0], 0.5);
        EXPECT_FAILS(tsr_optimizer_step(sgd), TSR_E_INVALID_STATE, "sum_grads");
    });
}

// --- part by part

struct Seen {
    std::vector<int64_t> begins;
    std::vector<std::vector<double>> values;
    double factor = 1;
    int64_t fail_at = -1;
};

int32_t see(int64_t begin, const tsr_tensor* part, char* message, void* user_data) {
    auto& seen = *static_cast<Seen*>(user_data);
    const std::span<double> values = values_of(*part);
    seen.begins.push_back(begin);
    seen.values.emplace_back(values.begin(), values.end());
    if (begin != seen.fail_at) return TSR_OK;
    std::snprintf(message, TSR_MESSAGE_BYTES, "no more");
    return 77;
}

// Writes where the part begins and 1, times the factor.
int32_t write(int64_t begin, const tsr_tensor* part, char*, void* user_data) {
    auto& seen = *static_cast<Seen*>(user_data);
    seen.begins.push_back(begin);
    std::ranges::fill(values_of(*part), static_cast<double>(begin + 1) * seen.factor);
    return begin == seen.fail_at ? TSR_E_IO : TSR_OK;
}

// An activation [2, 5, 3] over 2 to 4 ranks: some parts are empty.
struct Meeting {
    int32_t rank;
    std::atomic<bool>* there;
};

void await(const std::atomic<bool>& flag) {
    EXPECT_TRUE(api::becomes_true([&] { return flag.load(); })) << "nothing moves while a rank computes";
}

// While a rank computes with the first part, the others come to their peers; while it computes the second summand, the
// first is summed, so that the peer whose part that is begins with its third.
TEST(TpApi, PartsMoveWhileARankComputes) {
    std::atomic<bool> entered{false};
    std::atomic<bool> summed{false};
    api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
        const auto mesh = mesh_of(comm);
        Model model;
        const auto tp = cut(mesh, model);
        api::Array<double> own({1}, rank);
        api::Array<double> whole({3}, -1);
        const tsr_tensor in = own.tensor();
        const tsr_tensor out = whole.tensor();
        const auto first = [](int64_t begin, const tsr_tensor*, char*, void* user_data) -> int32_t {
            const auto* meeting = static_cast<const Meeting*>(user_data);
            if (meeting->rank == 1 && begin == 0) await(*meeting->there);
            return 0;
        };
        Meeting enter{rank, &entered};
        ASSERT_OK(tsr_tp_enter_parts(tp, &in, 0, &out, nullptr, first, &enter));
        if (rank == 0) entered = true;
        EXPECT_THAT(whole.values, ::testing::ElementsAre(0, 1, 2));
        const auto second = [](int64_t begin, const tsr_tensor* part, char*, void* user_data) -> int32_t {
            const auto* meeting = static_cast<const Meeting*>(user_data);
            if (meeting->rank == 0 && begin == 2) *meeting->there = true;
            if (meeting->rank == 1 && begin == 1) await(*meeting->there);
            *static_cast<double*>(part->data) = static_cast<double>(begin);
            return 0;
        };
        Meeting leave{rank, &summed};
        ASSERT_OK(tsr_tp_leave_parts(tp, 3, 0, nullptr, &in, nullptr, second, &leave));
        EXPECT_THAT(own.values, ::testing::ElementsAre(3.0 * rank));
    });
}

TEST(TpApi, PartsAreEnteredAndLeftOneAfterTheOther) {
    for (const int32_t ranks : {1, 2, 4}) {
        api::run_ranks(ranks, [&](tsr_comm* comm, int32_t rank) {
            const auto mesh = mesh_of(comm);
            Model model;
            const auto tp = cut(mesh, model);
            for (const int32_t dim : {0, 1, 2}) {
                const std::vector<int64_t> shape{2, 5, 3};
                api::Array<double> whole(shape, 0);
                for (size_t i = 0; i < whole.values.size(); ++i) whole.values[i] = static_cast<double>(i);
                const auto d = static_cast<size_t>(dim);
                const int64_t most = (shape[d] + ranks - 1) / ranks;
                const auto size_of = [&](int32_t of) { return std::clamp<int64_t>(shape[d] - of * most, 0, most); };
                const auto part_shape = [&](int32_t of) {
                    std::vector<int64_t> part = shape;
                    part[d] = size_of(of);
                    return part;
                };
                api::Array<double> own(part_shape(rank), 0);
                const tsr_tensor from = whole.tensor();
                const tsr_tensor in = own.tensor();
                ASSERT_OK(tsr_tp_split(tp, &from, dim, &in, nullptr));

                api::Array<double> gathered(shape, -1);
                const tsr_tensor out = gathered.tensor();
                Seen seen;
                ASSERT_OK(tsr_tp_enter_parts(tp, &in, dim, &out, nullptr, see, &seen));
                EXPECT_EQ(gathered.values, whole.values) << "along " << dim;
                std::vector<int64_t> begins;
                for (int32_t other = 0; other < ranks; ++other) {
                    if (size_of(other) > 0) begins.push_back(other * most);
                }
                EXPECT_EQ(seen.begins, begins);
                for (size_t i = 0; i < seen.begins.size(); ++i) {
                    if (seen.begins[i] == rank * most) {
                        EXPECT_EQ(seen.values[i], own.values);
                    }
                }

                api::Array<double> bias({part_shape(rank)[2]}, 0.5);
                const tsr_tensor added = bias.tensor();
                Seen written{.begins = {}, .values = {}, .factor = rank + 1.0, .fail_at = -1};
                ASSERT_OK(tsr_tp_leave_parts(tp, shape[d], dim, &added, &in, nullptr, write, &written));
                EXPECT_EQ(written.begins, begins);
                const double sum = ranks * (ranks + 1) / 2.0;
                EXPECT_THAT(own.values, ::testing::Each(static_cast<double>(rank * most + 1) * sum + 0.5))
                    << "along " << dim;
            }
        });
    }
}

TEST(TpApi, APartThatIsNotComputedIsAnError) {
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        const auto mesh = mesh_of(comm);
        Model model;
        const auto tp = cut(mesh, model);
        api::Array<double> own({1, 3}, rank);
        api::Array<double> whole({2, 3}, -1);
        const tsr_tensor in = own.tensor();
        const tsr_tensor out = whole.tensor();
        EXPECT_FAILS(tsr_tp_enter_parts(tp, &in, 2, &out, nullptr, see, nullptr), TSR_E_INVALID_ARGUMENT,
                     "no dimension 2");
        EXPECT_FAILS(tsr_tp_enter_parts(tp, &in, 0, &out, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                     "compute is NULL");
        EXPECT_FAILS(tsr_tp_leave_parts(tp, 6, 0, nullptr, &in, nullptr, write, nullptr), TSR_E_INVALID_ARGUMENT,
                     "must be [");
        Seen seen;
        seen.fail_at = rank == 1 ? 0 : -1;
        if (rank == 0) {
            EXPECT_OK(tsr_tp_enter_parts(tp, &in, 0, &out, nullptr, see, &seen));
        } else {
            EXPECT_FAILS(tsr_tp_enter_parts(tp, &in, 0, &out, nullptr, see, &seen), TSR_E_USER,
                         "compute failed for the part of rank 0: no more");
        }
        EXPECT_THAT(whole.values, ::testing::ElementsAre(0, 0, 0, 1, 1, 1)) << "it is complete all the same";
        Seen writing;
        writing.fail_at = rank == 1 ? 1 : -1;
        const tsr_status status = tsr_tp_leave_parts(tp, 2, 0, nullptr, &in, nullptr, write, &writing);
        EXPECT_EQ(status, rank == 1 ? TSR_E_IO : TSR_E_ABORTED) << api::message();
        EXPECT_THAT(api::message(), HasSubstr("compute failed for the part of rank 1"));
    });
}

}  // namespace
