// tessera/metrics.h through the C ABI.
#include "tessera/metrics.h"

#include <cmath>

#include "api.hpp"
#include "temporary_directory.hpp"

namespace {

using ::testing::ElementsAre;

api::Owned<tsr_metric> metric_of(tsr_metric_kind kind, const tsr_metric_options* options = nullptr) {
    api::Owned<tsr_metric> metric;
    EXPECT_OK(tsr_metric_create(kind, options, metric.out()));
    return metric;
}

tsr_status update(tsr_metric* metric, std::vector<float> scores, std::vector<int64_t> labels,
                  std::vector<uint8_t> valid = {}) {
    api::Array<float> predictions(std::move(scores));
    api::Array<int64_t> targets(std::move(labels));
    api::Array<uint8_t> mask(std::move(valid));
    const tsr_tensor p = predictions.tensor();
    const tsr_tensor t = targets.tensor();
    const tsr_tensor v = mask.tensor();
    return tsr_metric_update(metric, &p, &t, nullptr, mask.values.empty() ? nullptr : &v);
}

double value_of(tsr_metric* metric, tsr_comm* comm = nullptr) {
    double value = 0;
    EXPECT_OK(tsr_metric_compute(metric, comm, &value));
    return value;
}

TEST(MetricsApi, ACurveHasArrays) {
    const auto roc = metric_of(TSR_METRIC_ROC_CURVE);
    ASSERT_OK(update(roc, {0.1F, 0.4F, 0.35F, 0.8F, 9.0F}, {0, 0, 1, 1, 0}, {1, 1, 1, 1, 0}));
    EXPECT_TRUE(std::isnan(value_of(roc)));
    tsr_tensor tpr{};
    ASSERT_OK(tsr_metric_result(roc, "tpr", &tpr));
    ASSERT_EQ(tpr.ndim, 1);
    ASSERT_EQ(tpr.shape[0], 5);
    ASSERT_EQ(tpr.dtype, TSR_DTYPE_F64);
    EXPECT_THAT(std::span(static_cast<const double*>(tpr.data), 5), ElementsAre(0, 0.5, 0.5, 1, 1));
    EXPECT_FAILS(tsr_metric_result(roc, "matrix", &tpr), TSR_E_NOT_FOUND, "but fpr, tpr, thresholds");
    ASSERT_OK(tsr_metric_reset(roc));
    EXPECT_FAILS(tsr_metric_result(roc, "tpr", &tpr), TSR_E_NOT_FOUND, "no arrays");
}

TEST(MetricsApi, AMatrixHasTwoDimensions) {
    tsr_metric_options options;
    ASSERT_OK(tsr_metric_options_init(&options, sizeof options));
    options.classes = 3;
    const auto metric = metric_of(TSR_METRIC_CONFUSION_MATRIX, &options);
    api::Array<int32_t> predictions({0, 2, 2});
    api::Array<int64_t> targets({0, 2, 1});
    const tsr_tensor p = predictions.tensor();
    const tsr_tensor t = targets.tensor();
    ASSERT_OK(tsr_metric_update(metric, &p, &t, nullptr, nullptr));
    (void)value_of(metric);
    tsr_tensor matrix{};
    ASSERT_OK(tsr_metric_result(metric, "matrix", &matrix));
    ASSERT_EQ(matrix.ndim, 2);
    EXPECT_EQ(matrix.shape[1], 3);
    ASSERT_EQ(matrix.dtype, TSR_DTYPE_I64);
    EXPECT_THAT(std::span(static_cast<const int64_t*>(matrix.data), 9), ElementsAre(1, 0, 0, 0, 0, 1, 0, 0, 1));
}

TEST(MetricsApi, ASaveOfTwoRanksIsLoadedByThree) {
    const api::TemporaryDirectory directory;
    const std::vector<float> scores{0.1F, 0.4F, 0.35F, 0.8F, 0.5F};
    const std::vector<int64_t> labels{0, 0, 1, 1, 0};
    const auto expected = metric_of(TSR_METRIC_AUROC);
    ASSERT_OK(update(expected, scores, labels));
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        const auto metric = metric_of(TSR_METRIC_AUROC);
        ASSERT_OK(update(metric, {scores[static_cast<size_t>(rank)]}, {labels[static_cast<size_t>(rank)]}));
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_metric(state, "auroc", metric, comm));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_STATE, "rank 1 has samples of the metric 'auroc'");
        ASSERT_OK(tsr_metric_gather(metric, comm));
        if (rank == 0) {
            EXPECT_FAILS(update(metric, {NAN}, {0}), TSR_E_INVALID_ARGUMENT, "is nan");
        }
        EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_STATE,
                     "the metric auroc cannot be saved, nor loaded: an update of it has failed");
        EXPECT_FAILS(tsr_metric_gather(metric, comm), TSR_E_INVALID_ARGUMENT, "predictions[0] is nan");
        ASSERT_OK(tsr_metric_gather(metric, comm));
        EXPECT_OK(tsr_saver_save(saver, 1, state));

        tsr_saver_options options;
        ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
        options.check_replicas = 1;
        const std::string checked = directory.path() / "checked";
        api::Owned<tsr_saver> checking;
        ASSERT_OK(tsr_saver_create(comm, checked.c_str(), &options, checking.out()));
        EXPECT_FAILS(tsr_saver_save(checking, 1, state), TSR_E_MISMATCH,
                     "rank 0 alone has the samples of a metric: save it in a separate state");
    });
    api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
        const auto metric = metric_of(TSR_METRIC_AUROC);
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_metric(state, "auroc", metric, comm));
        api::Owned<tsr_checkpoint> checkpoint;
        ASSERT_OK(tsr_checkpoint_open(directory.path().c_str(), checkpoint.out()));
        ASSERT_OK(tsr_checkpoint_load(checkpoint, state, nullptr));
        const size_t row = static_cast<size_t>(rank) + 2;
        ASSERT_OK(update(metric, {scores[row]}, {labels[row]}));
        EXPECT_EQ(value_of(metric, comm), value_of(expected));

        const auto other = metric_of(TSR_METRIC_AVERAGE_PRECISION);
        api::Owned<tsr_state> wrong;
        ASSERT_OK(tsr_state_create(wrong.out()));
        ASSERT_OK(tsr_state_add_metric(wrong, "auroc", other, comm));
        EXPECT_FAILS(tsr_checkpoint_load(checkpoint, wrong, nullptr), TSR_E_MISMATCH,
                     "this is a metric average_precision");
    });
}

TEST(MetricsApi, BadInputIsRefused) {
    tsr_metric* none = nullptr;
    EXPECT_FAILS(tsr_metric_create(99, nullptr, &none), TSR_E_INVALID_ARGUMENT, "kind is 99");
    tsr_metric_options options;
    ASSERT_OK(tsr_metric_options_init(&options, sizeof options));
    options.adjusted = 2;
    EXPECT_FAILS(tsr_metric_create(TSR_METRIC_BALANCED_ACCURACY, &options, &none), TSR_E_INVALID_ARGUMENT,
                 "adjusted is 2");
    options.adjusted = 0;
    options.classes = 10000;
    EXPECT_FAILS(tsr_metric_create(TSR_METRIC_CONFUSION_MATRIX, &options, &none), TSR_E_INVALID_ARGUMENT,
                 "100000000 numbers");
    const auto metric = metric_of(TSR_METRIC_AUROC);
    EXPECT_FAILS(update(metric, {1, NAN}, {0, 1}), TSR_E_INVALID_ARGUMENT, "predictions[1] is nan");
    EXPECT_FAILS(update(metric, {1, 2}, {0, 2}), TSR_E_INVALID_ARGUMENT, "targets[1] is 2");
    EXPECT_FAILS(update(metric, {1, 2}, {0}), TSR_E_INVALID_ARGUMENT, "2 and 1 samples");
    EXPECT_FAILS(tsr_metric_update(metric, nullptr, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                 "predictions is NULL");
    EXPECT_FAILS(tsr_metric_compute(metric, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "value is NULL");
    EXPECT_FAILS(tsr_metric_merge(metric, metric), TSR_E_INVALID_ARGUMENT, "itself");
    EXPECT_FAILS(tsr_metric_gather(metric, nullptr), TSR_E_INVALID_ARGUMENT, "comm is NULL");
}

TEST(MetricsApi, TheMaskOfASampler) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        api::Owned<tsr_sampler> sampler;
        ASSERT_OK(tsr_sampler_create(comm, 5, nullptr, sampler.out()));
        EXPECT_OK(tsr_sampler_valid(sampler, nullptr, 0));
        std::array<int64_t, 3> indices{};
        size_t count = 0;
        ASSERT_OK(tsr_sampler_next(sampler, indices.data(), 3, &count));
        std::array<uint8_t, 3> valid{9, 9, 9};
        ASSERT_OK(tsr_sampler_valid(sampler, valid.data(), count));
        EXPECT_THAT(valid, ElementsAre(1, 1, rank == 0 ? 1 : 0));
        EXPECT_FAILS(tsr_sampler_valid(sampler, valid.data(), 2), TSR_E_INVALID_ARGUMENT, "the mask has 2 places");
        EXPECT_FAILS(tsr_sampler_valid(sampler, nullptr, 3), TSR_E_INVALID_ARGUMENT, "valid is NULL");
    });
}

}  // namespace
