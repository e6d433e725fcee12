// Every optimizer through the C ABI: the same bits over plain tensors, DDP, FSDP and tensor parallelism for every number of
// ranks, also after a checkpoint that another number of ranks continues, and what it refuses.
#include <cmath>
#include <functional>
#include <limits>

#include "api.hpp"
#include "temporary_directory.hpp"

namespace {

constexpr int32_t most_ranks = 4;

struct Kind {
    const char* name;
    std::function<tsr_status(const tsr_param* params, const tsr_tensor* grads, size_t n, tsr_optimizer** out)> create;
    std::function<tsr_status(tsr_ddp* ddp, tsr_optimizer** out)> ddp;
    std::function<tsr_status(tsr_fsdp* fsdp, tsr_optimizer** out)> fsdp;
    std::function<tsr_status(tsr_tp* tp, tsr_optimizer** out)> tp;
};

template <class Options>
Kind kind_of(const char* name, tsr_status (*init)(Options*, size_t), const std::function<void(Options&)>& change,
             tsr_status (*create)(const tsr_param*, const tsr_tensor*, size_t, const Options*, tsr_optimizer**),
             tsr_status (*ddp)(tsr_ddp*, const Options*, tsr_optimizer**),
             tsr_status (*fsdp)(tsr_fsdp*, const Options*, tsr_optimizer**),
             tsr_status (*tp)(tsr_tp*, const Options*, tsr_optimizer**)) {
    Options options;
    EXPECT_OK(init(&options, sizeof options));
    change(options);
    return {name,
            [=](const tsr_param* params, const tsr_tensor* grads, size_t n, tsr_optimizer** out) {
                return create(params, grads, n, &options, out);
            },
            [=](tsr_ddp* model, tsr_optimizer** out) { return ddp(model, &options, out); },
            [=](tsr_fsdp* model, tsr_optimizer** out) { return fsdp(model, &options, out); },
            [=](tsr_tp* model, tsr_optimizer** out) { return tp(model, &options, out); }};
}

#define KIND(kind, change)                                                                              \
    kind_of<tsr_##kind##_options>(                                                                      \
        #kind, tsr_##kind##_options_init, [](auto& o) { change; }, tsr_##kind##_create, tsr_ddp_##kind, \
        tsr_fsdp_##kind, tsr_tp_##kind)

const std::vector<Kind>& kinds() {
    static const std::vector<Kind> all{
        KIND(sgd, (o.lr = 0.1, o.momentum = 0.9, o.weight_decay = 0.01)),
        KIND(adam, (o.lr = 0.01, o.weight_decay = 0.1)),
        KIND(adamw, (o.lr = 0.01, o.weight_decay = 0.1)),
        KIND(adagrad, (o.lr = 0.1, o.lr_decay = 0.1, o.weight_decay = 0.1, o.initial_accumulator_value = 0.5)),
        KIND(lion, (o.lr = 0.01, o.weight_decay = 0.1)),
        KIND(lamb, (o.lr = 0.05, o.weight_decay = 0.1)),
    };
    return all;
}

class Optimizers : public ::testing::TestWithParam<size_t> {
   protected:
    [[nodiscard]] static const Kind& kind() { return kinds()[GetParam()]; }
};
INSTANTIATE_TEST_SUITE_P(Kinds, Optimizers, ::testing::Range(size_t{0}, kinds().size()),
                         [](const auto& one) { return kinds()[one.param].name; });

// Parameters with more rows than ranks, as many as some worlds have, and fewer.
struct Model {
    api::Array<float> weight{{7, 3}, 0};
    api::Array<float> bias{{4}, 0};
    api::Array<float> scale{{1, 2}, 0};
    std::array<api::Array<float>*, 3> all{&weight, &bias, &scale};

    Model() {
        for (size_t p = 0; p < all.size(); ++p) {
            for (size_t k = 0; k < all[p]->values.size(); ++k) {
                all[p]->values[k] = 0.3F * std::cos(static_cast<float>(5 * p + k));
            }
        }
    }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    [[nodiscard]] std::array<tsr_param, 3> params() {
        return {tsr_param{"fc1.weight", weight.tensor()}, tsr_param{"fc1.bias", bias.tensor()},
                tsr_param{"scale", scale.tensor()}};
    }
    [[nodiscard]] std::vector<std::vector<float>> values() const { return {weight.values, bias.values, scale.values}; }
};

float gradient(int step, size_t param, size_t k) {
    return std::sin(static_cast<float>(step) * 1.3F + static_cast<float>(7 * param + k));
}

std::span<float> floats(const tsr_tensor& tensor) {
    size_t count = 1;
    for (int32_t d = 0; d < tensor.ndim; ++d) count *= static_cast<size_t>(tensor.shape[d]);
    return {static_cast<float*>(tensor.data), count};
}

// The gradient of a step comes from one rank; the others add zeros, so that the sum is exact for every number of ranks.
void fill(std::span<float> grad, int step, size_t param, bool is_mine) {
    for (size_t k = 0; k < grad.size(); ++k) grad[k] = is_mine ? gradient(step, param, k) : 0;
}

// One process over plain tensors.
std::vector<std::vector<float>> expected_after(const Kind& kind, int steps) {
    Model model;
    Model grads;
    const auto params = model.params();
    const std::array<tsr_tensor, 3> grad_tensors{grads.weight.tensor(), grads.bias.tensor(), grads.scale.tensor()};
    api::Owned<tsr_optimizer> optimizer;
    EXPECT_OK(kind.create(params.data(), grad_tensors.data(), params.size(), optimizer.out()));
    for (int step = 0; step < steps; ++step) {
        for (size_t p = 0; p < params.size(); ++p) fill(grads.all[p]->values, step, p, true);
        EXPECT_OK(tsr_optimizer_step(optimizer));
    }
    return model.values();
}

struct Ranks {
    int32_t rank = 0;
    int32_t count = 0;

    explicit Ranks(tsr_comm* comm) {
        EXPECT_OK(tsr_comm_rank(comm, &rank));
        EXPECT_OK(tsr_comm_world_size(comm, &count));
    }
    [[nodiscard]] bool makes(int step) const { return step % count == rank; }
};

class OverDdp {
   public:
    OverDdp(tsr_comm* comm, const Kind& kind) : ranks_(comm) {
        tsr_ddp_options options;
        EXPECT_OK(tsr_ddp_options_init(&options, sizeof options));
        options.op = TSR_REDUCE_SUM;
        options.bucket_bytes = options.first_bucket_bytes = 16;
        const auto params = model_.params();
        EXPECT_OK(tsr_ddp_create(comm, params.data(), params.size(), &options, ddp_.out()));
        EXPECT_OK(kind.ddp(ddp_, optimizer_.out()));
        EXPECT_OK(tsr_state_create(state_.out()));
        EXPECT_OK(tsr_state_add_ddp(state_, "model", ddp_));
        EXPECT_OK(tsr_state_add_optimizer(state_, "optim", optimizer_));
    }
    void step_in_backward() {
        EXPECT_OK(tsr_ddp_step_in_backward(ddp_, optimizer_));
        steps_in_backward_ = true;
    }
    void train(int step) {
        for (size_t p = 0; p < model_.all.size(); ++p) {
            tsr_tensor grad{};
            EXPECT_OK(tsr_ddp_grad(ddp_, p, &grad));
            fill(floats(grad), step, p, ranks_.makes(step));
        }
        EXPECT_OK(tsr_ddp_ready_all(ddp_));
        EXPECT_OK(tsr_ddp_wait(ddp_));
        if (steps_in_backward_) return;
        EXPECT_OK(tsr_optimizer_step(optimizer_));
    }
    void expect(const std::vector<std::vector<float>>& expected, const std::string& what) const {
        EXPECT_EQ(model_.values(), expected) << what;
    }
    [[nodiscard]] tsr_state* state() const { return state_; }

   private:
    Ranks ranks_;
    Model model_;
    api::Owned<tsr_ddp> ddp_;
    api::Owned<tsr_optimizer> optimizer_;
    api::Owned<tsr_state> state_;
    bool steps_in_backward_ = false;
};

constexpr std::array<size_t, 3> columns{3, 1, 2};
constexpr std::array<int32_t, 3> dims{2, 1, 2};

// Compares the boxes of this rank with those parts of full parameter `p`.
void expect_part(const tsr_tensor& part, const tsr_layout* layout, int32_t rank, const std::vector<float>& full,
                 size_t p, const std::string& what) {
    int32_t count = 0;
    EXPECT_OK(tsr_layout_box_count(layout, rank, &count));
    size_t at = 0;
    for (int32_t b = 0; b < count; ++b) {
        tsr_box box{};
        EXPECT_OK(tsr_layout_box(layout, rank, b, &box));
        const auto size = [&](int32_t d) { return d < dims.at(p) ? static_cast<size_t>(box.sizes[d]) : 1; };
        for (size_t i = 0; i < size(0); ++i) {
            for (size_t j = 0; j < size(1); ++j) {
                const size_t place =
                    (static_cast<size_t>(box.offsets[0]) + i) * columns.at(p) + static_cast<size_t>(box.offsets[1]) + j;
                EXPECT_EQ(floats(part)[at++], full[place]) << what << ", element " << place;
            }
        }
    }
    EXPECT_EQ(at, floats(part).size());
}

class OverFsdp {
   public:
    OverFsdp(tsr_comm* comm, const Kind& kind, bool flat = false) : ranks_(comm) {
        tsr_fsdp_options options;
        EXPECT_OK(tsr_fsdp_options_init(&options, sizeof options));
        options.op = TSR_REDUCE_SUM;
        auto params = model_.params();
        const std::array<tsr_fsdp_unit, 1> units{{{"all", params.data(), params.size(), nullptr, 1, 0, 0, 0, flat, 0}}};
        EXPECT_OK(tsr_fsdp_create(comm, units.data(), units.size(), &options, fsdp_.out()));
        EXPECT_OK(kind.fsdp(fsdp_, optimizer_.out()));
        EXPECT_OK(tsr_state_create(state_.out()));
        EXPECT_OK(tsr_state_add_fsdp(state_, "model", fsdp_));
        EXPECT_OK(tsr_state_add_optimizer(state_, "optim", optimizer_));
    }
    void train(int step) {
        EXPECT_OK(tsr_fsdp_backward(fsdp_, 0));
        for (size_t p = 0; p < model_.all.size(); ++p) {
            tsr_tensor grad{};
            EXPECT_OK(tsr_fsdp_grad(fsdp_, p, &grad));
            fill(floats(grad), step, p, ranks_.makes(step));
        }
        EXPECT_OK(tsr_fsdp_grads_ready(fsdp_, 0));
        EXPECT_OK(tsr_fsdp_wait(fsdp_));
        EXPECT_OK(tsr_optimizer_step(optimizer_));
    }
    void expect(const std::vector<std::vector<float>>& expected, const std::string& what) const {
        for (size_t p = 0; p < expected.size(); ++p) {
            tsr_param shard{};
            api::Owned<tsr_layout> layout;
            EXPECT_OK(tsr_fsdp_shard(fsdp_, p, &shard));
            EXPECT_OK(tsr_fsdp_layout(fsdp_, p, layout.out()));
            expect_part(shard.tensor, layout, ranks_.rank, expected[p], p, what);
        }
    }
    [[nodiscard]] tsr_state* state() const { return state_; }

   private:
    Ranks ranks_;
    Model model_;
    api::Owned<tsr_fsdp> fsdp_;
    api::Owned<tsr_optimizer> optimizer_;
    api::Owned<tsr_state> state_;
};

std::string text_of(const Kind& kind, const char* over, int32_t ranks) {
    return std::string(kind.name) + " over " + over + " of " + std::to_string(ranks) + " ranks";
}

TEST_P(Optimizers, RanksHaveTheBitsOfOneProcess) {
    constexpr int steps = 7;
    const auto expected = expected_after(kind(), steps);
    ASSERT_NE(expected, Model().values());
    for (int32_t ranks = 1; ranks <= most_ranks; ++ranks) {
        api::run_ranks(ranks, [&](tsr_comm* comm, int32_t) {
            OverDdp ddp(comm, kind());
            OverDdp overlapped(comm, kind());
            overlapped.step_in_backward();
            OverFsdp fsdp(comm, kind());
            OverFsdp flat(comm, kind(), true);
            for (int step = 0; step < steps; ++step) {
                ddp.train(step);
                overlapped.train(step);
                fsdp.train(step);
                flat.train(step);
            }
            ddp.expect(expected, text_of(kind(), "DDP", ranks));
            overlapped.expect(expected, text_of(kind(), "DDP that steps in backward", ranks));
            fsdp.expect(expected, text_of(kind(), "FSDP", ranks));
            flat.expect(expected, text_of(kind(), "flat FSDP", ranks));
        });
    }
}

template <class Trainer>
void save_after(const Kind& kind, const std::string& root, int32_t ranks, int steps) {
    api::run_ranks(ranks, [&](tsr_comm* comm, int32_t) {
        Trainer trainer(comm, kind);
        for (int step = 0; step < steps; ++step) trainer.train(step);
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, root.c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, steps, trainer.state()));
    });
}

template <class Trainer>
void resume_and_expect(const Kind& kind, const std::string& root, int32_t ranks, int steps,
                       const std::vector<std::vector<float>>& expected, const char* over) {
    api::run_ranks(ranks, [&](tsr_comm* comm, int32_t) {
        Trainer trainer(comm, kind);
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, root.c_str(), nullptr, saver.out()));
        int64_t from = 0;
        ASSERT_OK(tsr_saver_resume(saver, trainer.state(), &from));
        ASSERT_GT(from, 0);
        for (int step = static_cast<int>(from); step < steps; ++step) trainer.train(step);
        trainer.expect(expected, text_of(kind, over, ranks) + " after a load");
    });
}

TEST_P(Optimizers, ACheckpointGoesOnAtAnotherNumberOfRanksWithTheSameBits) {
    constexpr int steps = 8;
    const auto expected = expected_after(kind(), steps);
    const api::TemporaryDirectory sharded;
    save_after<OverFsdp>(kind(), sharded.path().string(), 3, 4);
    resume_and_expect<OverFsdp>(kind(), sharded.path().string(), 2, steps, expected, "FSDP");
    resume_and_expect<OverDdp>(kind(), sharded.path().string(), 4, steps, expected, "DDP");
    const api::TemporaryDirectory replicated;
    save_after<OverDdp>(kind(), replicated.path().string(), 2, 4);
    resume_and_expect<OverFsdp>(kind(), replicated.path().string(), 3, steps, expected, "FSDP");
}

TEST_P(Optimizers, SlicesHaveTheBitsOfOneProcess) {
    constexpr int steps = 5;
    constexpr std::array rules{tsr_tp_rule{"fc1", TSR_TP_COLUMN, 0, nullptr}};
    const auto expected = expected_after(kind(), steps);
    for (const int32_t ranks : {1, 2, 3}) {
        api::run_ranks(ranks, [&](tsr_comm* comm, int32_t rank) {
            const char* const dim = "tp";
            api::Owned<tsr_mesh> mesh;
            ASSERT_OK(tsr_mesh_create(comm, &dim, &ranks, 1, mesh.out()));
            Model model;
            const auto params = model.params();
            api::Owned<tsr_tp> tp;
            ASSERT_OK(tsr_tp_create(mesh, params.data(), params.size(), rules.data(), rules.size(), nullptr, tp.out()));
            api::Owned<tsr_optimizer> optimizer;
            ASSERT_OK(kind().tp(tp, optimizer.out()));
            for (int step = 0; step < steps; ++step) {
                for (size_t p = 0; p < params.size(); ++p) {
                    tsr_tensor grad{};
                    api::Owned<tsr_layout> layout;
                    ASSERT_OK(tsr_tp_grad(tp, p, &grad));
                    ASSERT_OK(tsr_tp_layout(tp, p, layout.out()));
                    tsr_box box{};
                    if (floats(grad).empty()) continue;
                    ASSERT_OK(tsr_layout_box(layout, rank, 0, &box));  // of rows
                    const size_t first = static_cast<size_t>(box.offsets[0]) * columns.at(p);
                    for (size_t k = 0; k < floats(grad).size(); ++k) floats(grad)[k] = gradient(step, p, first + k);
                }
                ASSERT_OK(tsr_tp_sum_grads(tp, nullptr));
                ASSERT_OK(tsr_optimizer_step(optimizer));
            }
            for (size_t p = 0; p < params.size(); ++p) {
                tsr_param slice{};
                api::Owned<tsr_layout> layout;
                ASSERT_OK(tsr_tp_slice(tp, p, &slice));
                ASSERT_OK(tsr_tp_layout(tp, p, layout.out()));
                expect_part(slice.tensor, layout, rank, expected[p], p, text_of(kind(), "slices", ranks));
            }
        });
    }
}

TEST_P(Optimizers, AnInvalidRateIsRefusedOverEveryModel) {
    const api::Owned<tsr_comm> comm = api::alone();
    Model model;
    Model grads;
    const auto params = model.params();
    const std::array<tsr_tensor, 3> tensors{grads.weight.tensor(), grads.bias.tensor(), grads.scale.tensor()};
    api::Owned<tsr_optimizer> optimizer;
    ASSERT_OK(kind().create(params.data(), tensors.data(), params.size(), optimizer.out()));
    for (const double bad : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        EXPECT_FAILS(tsr_optimizer_set_lr(optimizer, bad), TSR_E_INVALID_ARGUMENT, "lr is");
    }
    EXPECT_FAILS(kind().create(params.data(), tensors.data(), 0, optimizer.out()), TSR_E_INVALID_ARGUMENT,
                 "no parameters");
    EXPECT_FAILS(kind().create(nullptr, tensors.data(), 3, optimizer.out()), TSR_E_INVALID_ARGUMENT, "params is NULL");
    EXPECT_FAILS(kind().create(params.data(), nullptr, 3, optimizer.out()), TSR_E_INVALID_ARGUMENT, "grads is NULL");
    EXPECT_FAILS(kind().ddp(nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT, "ddp is NULL");
    EXPECT_FAILS(kind().fsdp(nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT, "fsdp is NULL");
    EXPECT_FAILS(kind().tp(nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT, "tp is NULL");
}

// Each field of the options out of its range.
template <class Options>
class BadOptions {
   public:
    BadOptions(tsr_status (*init)(Options*, size_t),
               tsr_status (*create)(const tsr_param*, const tsr_tensor*, size_t, const Options*, tsr_optimizer**))
        : init_(init), create_(create) {}

    void expect_refused(const char* what, const std::function<void(Options&)>& change) {
        Options options;
        ASSERT_OK(init_(&options, sizeof options));
        change(options);
        const tsr_param param{"w", value_.tensor()};
        const tsr_tensor grad = grad_.tensor();
        api::Owned<tsr_optimizer> out;
        EXPECT_FAILS(create_(&param, &grad, 1, &options, out.out()), TSR_E_INVALID_ARGUMENT, what);
    }
    void expect_range(const char* name, double Options::* field, const std::vector<double>& values) {
        for (const double value : values) {
            expect_refused((std::string(name) + " is").c_str(), [&](Options& o) { o.*field = value; });
        }
    }

   private:
    tsr_status (*init_)(Options*, size_t);
    tsr_status (*create_)(const tsr_param*, const tsr_tensor*, size_t, const Options*, tsr_optimizer**);
    api::Array<float> value_{{4}, 1.0F};
    api::Array<float> grad_{{4}, 1.0F};
};

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
const std::vector<double> below_zero{-0.5, nan, std::numeric_limits<double>::infinity()};

TEST(Adagrad, BadOptionsAreRefusedByName) {
    using O = tsr_adagrad_options;
    BadOptions<O> bad(tsr_adagrad_options_init, tsr_adagrad_create);
    bad.expect_range("lr", &O::lr, below_zero);
    bad.expect_range("lr_decay", &O::lr_decay, below_zero);
    bad.expect_range("weight_decay", &O::weight_decay, below_zero);
    bad.expect_range("initial_accumulator_value", &O::initial_accumulator_value, below_zero);
    bad.expect_range("eps", &O::eps, below_zero);
}

TEST(Lamb, BadOptionsAreRefusedByName) {
    using O = tsr_lamb_options;
    BadOptions<O> bad(tsr_lamb_options_init, tsr_lamb_create);
    bad.expect_range("lr", &O::lr, below_zero);
    bad.expect_range("beta1", &O::beta1, {-0.1, 1, nan});
    bad.expect_range("beta2", &O::beta2, {-0.1, 1, nan});
    bad.expect_range("eps", &O::eps, below_zero);
    bad.expect_range("weight_decay", &O::weight_decay, below_zero);
    bad.expect_range("max_coeff", &O::max_coeff, below_zero);
    bad.expect_range("min_coeff", &O::min_coeff, below_zero);
    bad.expect_refused("min_coeff is 11; it must be at most max_coeff, 10", [](O& o) { o.min_coeff = 11; });
    bad.expect_refused("bias_correction", [](O& o) { o.bias_correction = 2; });
}

TEST(Lamb, OneCopyPerHostIsUnsupported) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        Model model;
        const auto params = model.params();
        tsr_ddp_options options;
        ASSERT_OK(tsr_ddp_options_init(&options, sizeof options));
        options.share_params = 1;
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), &options, ddp.out()));
        api::Owned<tsr_optimizer> lamb;
        EXPECT_FAILS(tsr_ddp_lamb(ddp, nullptr, lamb.out()), TSR_E_UNSUPPORTED, "without share_params");
        EXPECT_OK(tsr_ddp_adamw(ddp, nullptr, lamb.out())) << "the model is as good as before";
    });
}

TEST(Lion, BadOptionsAreRefusedByName) {
    using O = tsr_lion_options;
    BadOptions<O> bad(tsr_lion_options_init, tsr_lion_create);
    bad.expect_range("lr", &O::lr, below_zero);
    bad.expect_range("beta1", &O::beta1, {-0.1, 1, nan});
    bad.expect_range("beta2", &O::beta2, {-0.1, 1, nan});
    bad.expect_range("weight_decay", &O::weight_decay, below_zero);
}

}  // namespace
