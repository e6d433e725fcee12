// Values that were worked out by hand, most of them those of docs/METRICS.md.
#include <cmath>
#include <limits>

#include "metrics.hpp"

namespace tsr::metrics {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;

constexpr double infinity = std::numeric_limits<double>::infinity();

const Data<float> four{.predictions = {0.1F, 0.4F, 0.35F, 0.8F}, .targets = {0, 0, 1, 1}};
const Data<float> tied{.predictions = {0.5F, 0.5F, 0.5F, 0.2F}, .targets = {1, 0, 1, 0}};

Options task(Task of, int64_t classes, Average average = Average::macro) {
    Options options;
    options.task = of;
    options.classes = classes;
    options.average = average;
    return options;
}

TEST(Curves, RocBeginsAtInfinity) {
    const Outcome roc = alone(Kind::roc_curve, {}, four, {"fpr", "tpr", "thresholds"});
    EXPECT_THAT(roc.arrays[0], ElementsAre(0, 0, 0.5, 0.5, 1));
    EXPECT_THAT(roc.arrays[1], ElementsAre(0, 0.5, 0.5, 1, 1));
    EXPECT_THAT(roc.arrays[2], ElementsAre(infinity, 0.8F, 0.4F, 0.35F, 0.1F));
    EXPECT_TRUE(std::isnan(roc.value));
}

TEST(Curves, PrecisionRecallEndsAtOneAndZero) {
    const Outcome curve = alone(Kind::precision_recall_curve, {}, four, {"precision", "recall", "thresholds"});
    EXPECT_THAT(curve.arrays[0], ElementsAre(0.5, 2 / 3.0, 0.5, 1, 1));
    EXPECT_THAT(curve.arrays[1], ElementsAre(1, 1, 0.5, 0.5, 0));
    EXPECT_THAT(curve.arrays[2], ElementsAre(0.1F, 0.35F, 0.4F, 0.8F));
}

TEST(Curves, AreasOfDistinctAndTiedScores) {
    EXPECT_EQ(alone(Kind::auroc, {}, four).value, 0.75);
    EXPECT_THAT(alone(Kind::average_precision, {}, four).value, DoubleEq(5 / 6.0));
    EXPECT_EQ(alone(Kind::auroc, {}, tied).value, 0.75);
    EXPECT_THAT(alone(Kind::average_precision, {}, tied).value, DoubleEq(2 / 3.0));
    const Data<float> equal{.predictions = {1, 1, 1, 1, 1}, .targets = {1, 0, 0, 0, 0}};
    EXPECT_EQ(alone(Kind::auroc, {}, equal).value, 0.5);
    EXPECT_EQ(alone(Kind::average_precision, {}, equal).value, 0.2);
}

TEST(Curves, StraightPointsAreDroppedUnlessAllAreWanted) {
    const Data<float> data{.predictions = {4, 3, 2, 1}, .targets = {1, 1, 1, 0}};
    EXPECT_THAT(alone(Kind::roc_curve, {}, data, {"thresholds"}).arrays[0], ElementsAre(infinity, 4, 2, 1));
    Options all;
    all.all_points = true;
    EXPECT_THAT(alone(Kind::roc_curve, all, data, {"thresholds"}).arrays[0], ElementsAre(infinity, 4, 3, 2, 1));
}

TEST(Curves, OneClassAlone) {
    const Data<float> positive{.predictions = {1, 2}, .targets = {1, 1}};
    const Data<float> negative{.predictions = {1, 2}, .targets = {0, 0}};
    EXPECT_TRUE(std::isnan(alone(Kind::auroc, {}, positive).value));
    EXPECT_TRUE(std::isnan(alone(Kind::auroc, {}, negative).value));
    EXPECT_EQ(alone(Kind::average_precision, {}, negative).value, 0);
    EXPECT_EQ(alone(Kind::average_precision, {}, positive).value, 1);
    EXPECT_THAT(alone(Kind::precision_recall_curve, {}, negative, {"recall"}).arrays[0], ElementsAre(1, 1, 0));
    EXPECT_TRUE(std::isnan(alone(Kind::roc_curve, {}, negative, {"tpr"}).arrays[0].back()));
    EXPECT_TRUE(std::isnan(alone(Kind::auroc, {}, Data<float>{}).value));
}

TEST(Curves, ScoresKeepTheirOrderAndZerosAreOne) {
    const Data<float> logits{.predictions = {98, 99, 100, 97}, .targets = {0, 1, 1, 0}};
    EXPECT_EQ(alone(Kind::auroc, {}, logits).value, 1);
    const Data<double> zeros{.predictions = {-0.0, 0.0, -1e-300, 1e-300}, .targets = {1, 0, 0, 1}};
    EXPECT_EQ(alone(Kind::auroc, {}, zeros).value, 0.875);
    const Data<float> single{.predictions = {-0.0F, 0.0F}, .targets = {1, 0}};
    EXPECT_EQ(alone(Kind::auroc, {}, single).value, 0.5);
    const auto mixed = Metric::create(Kind::auroc, {});
    update(*mixed, four);
    update(*mixed, Data<double>{.predictions = {0.1F, 0.1}, .targets = {1, 0}});  // 0.1F is above 0.1
    EXPECT_DOUBLE_EQ(mixed->compute(nullptr), 13 / 18.0);
}

TEST(Curves, PartialAreas) {
    Options half;
    half.max_fpr = 0.5;
    // Area 0.25 of at most 0.5, of which chance has 0.125.
    EXPECT_DOUBLE_EQ(alone(Kind::auroc, half, four).value, 0.5 * (1 + (0.25 - 0.125) / (0.5 - 0.125)));
    half.max_fpr = 0.25;
    EXPECT_DOUBLE_EQ(alone(Kind::auroc, half, four).value, 0.5 * (1 + (0.125 - 0.03125) / (0.25 - 0.03125)));
}

TEST(Curves, WeightsCountAsSamples) {
    Data<float> weighted = four;
    weighted.weights = {1, 2, 3, 0};
    const Data<float> repeated{.predictions = {0.1F, 0.4F, 0.4F, 0.35F, 0.35F, 0.35F}, .targets = {0, 0, 0, 1, 1, 1}};
    for (const Kind kind : {Kind::auroc, Kind::average_precision}) {
        EXPECT_EQ(alone(kind, {}, weighted).value, alone(kind, {}, repeated).value);
    }
    EXPECT_EQ(alone(Kind::roc_curve, {}, weighted, {"fpr", "tpr", "thresholds"}),
              alone(Kind::roc_curve, {}, repeated, {"fpr", "tpr", "thresholds"}));
}

// A weight of all samples changes nothing, however small.
TEST(Curves, OfWeightsOfEachSize) {
    const Data<double> even{.predictions = {.1, .9, .5, .6, .95}, .targets = {0, 1, 0, 1, 0}};
    const Data<double> classes{
        .predictions = {.6, .3, .1, .2, .5, .3, .1, .2, .7, .3, .4, .3}, .targets = {0, 1, 2, 1}, .columns = 3};
    Options part;
    part.max_fpr = 0.5;
    Options pairs = task(Task::multiclass, 3, Average::weighted);
    pairs.one_vs_one = true;
    for (const double weight : {0x1p256, 1.0, 0x1p-399, 0x1p-400, 0x1p-401, 0x1p-600, 0x1p-1000, 0x1p-1074}) {
        const auto expect_same = [&](Kind kind, const Options& options, auto data) {
            const double plain = alone(kind, options, data).value;
            data.weights.assign(data.rows(), weight);
            EXPECT_EQ(alone(kind, options, data).value, plain) << name_of(kind) << " " << weight;
        };
        for (const Kind kind :
             {Kind::auroc, Kind::binned_auroc, Kind::average_precision, Kind::binned_average_precision}) {
            expect_same(kind, {}, even);
            expect_same(kind, task(Task::multiclass, 3, Average::weighted), classes);
        }
        expect_same(Kind::auroc, part, even);
        expect_same(Kind::auroc, pairs, classes);
    }
}

TEST(Curves, OfClasses) {
    const Data<double> data{
        .predictions = {.6, .3, .1, .2, .5, .3, .1, .2, .7, .3, .4, .3}, .targets = {0, 1, 2, 0}, .columns = 3};
    EXPECT_THAT(alone(Kind::auroc, task(Task::multiclass, 3, Average::none), data, {"values"}).arrays[0],
                ElementsAre(1, 1, 1));
    EXPECT_THAT(alone(Kind::roc_curve, task(Task::multiclass, 3), data, {"fpr.1", "tpr.1"}).arrays[1],
                ElementsAre(0, 1, 1));
    Options pairs = task(Task::multiclass, 3);
    pairs.one_vs_one = true;
    EXPECT_EQ(alone(Kind::auroc, pairs, data).value, 1);
    const Data<double> labels{
        .predictions = {.9, .1, .2, .8}, .targets = {1, 0, 0, 1}, .columns = 2, .target_columns = 2};
    EXPECT_EQ(alone(Kind::auroc, task(Task::multilabel, 2, Average::micro), labels).value, 1);
}

TEST(Curves, BinnedOnesAreThoseAtTheirThresholds) {
    Options options;
    options.thresholds = 5;
    const Data<double> data{.predictions = {0.0, 0.25, 0.3, 0.75, 1.0}, .targets = {0, 1, 0, 1, 1}};
    const Outcome roc = alone(Kind::binned_roc_curve, options, data, {"fpr", "tpr", "thresholds"});
    EXPECT_THAT(roc.arrays[2], ElementsAre(infinity, 1, 0.75, 0.5, 0.25, 0));
    EXPECT_THAT(roc.arrays[0], ElementsAre(0, 0, 0, 0, 0.5, 1));
    EXPECT_THAT(roc.arrays[1], ElementsAre(0, 1 / 3.0, 2 / 3.0, 2 / 3.0, 1, 1));
    EXPECT_DOUBLE_EQ(alone(Kind::binned_auroc, options, data).value, (5 / 6.0 + 1) / 2);
}

TEST(Curves, AScoreJustBelowAThresholdIsBelowIt) {
    Data<double> data{.predictions = {0}, .targets = {0}};
    for (int k = 1; k < 100; ++k) {
        data.predictions.push_back(std::nextafter(k / 99.0, 0));
        data.targets.push_back(1);
    }
    const Outcome roc = alone(Kind::binned_roc_curve, {}, data, {"tpr"});
    for (int k = 0; k < 100; ++k) EXPECT_EQ(roc.arrays[0].at(static_cast<size_t>(100 - k)), (99 - k) / 99.0) << k;
}

TEST(Labels, AccuracyAndConfusion) {
    const Data<int64_t, uint8_t> data{.predictions = {0, 2, 1, 2, 0}, .targets = {0, 2, 2, 2, 1}};
    EXPECT_EQ(alone(Kind::accuracy, task(Task::multiclass, 3), data).value, 0.6);
    Options three;
    three.classes = 3;
    EXPECT_THAT(alone(Kind::confusion_matrix, three, data, {"matrix"}).arrays[0],
                ElementsAre(1, 0, 0, 1, 0, 0, 0, 1, 2));
    EXPECT_DOUBLE_EQ(alone(Kind::balanced_accuracy, three, data).value, (1 + 0 + 2 / 3.0) / 3);
    three.normalize = Normalize::truth;
    EXPECT_THAT(alone(Kind::confusion_matrix, three, data, {"matrix"}).arrays[0],
                ElementsAre(1, 0, 0, 1, 0, 0, 0, 1 / 3.0, 2 / 3.0));
}

TEST(Labels, PrecisionRecallAndF) {
    const Data<int32_t, int32_t> data{.predictions = {0, 1, 1, 1, 0}, .targets = {0, 1, 0, 1, 1}};
    EXPECT_EQ(alone(Kind::precision, {}, data).value, 2 / 3.0);
    EXPECT_EQ(alone(Kind::recall, {}, data).value, 2 / 3.0);
    Options two;
    two.beta = 2;
    EXPECT_DOUBLE_EQ(alone(Kind::f_beta, two, data).value, 2 / 3.0);
    const Options micro = task(Task::multiclass, 2, Average::micro);
    EXPECT_EQ(alone(Kind::f_beta, micro, data).value, alone(Kind::accuracy, {}, data).value);
    Options nothing = task(Task::multiclass, 3, Average::none);
    nothing.zero_division = 1;
    EXPECT_EQ(alone(Kind::precision, nothing, data, {"values"}).arrays[0].at(2), 1);
    nothing.average = Average::macro;
    nothing.zero_division = std::numeric_limits<double>::quiet_NaN();
    EXPECT_DOUBLE_EQ(alone(Kind::precision, nothing, data).value, (0.5 + 2 / 3.0) / 2);
}

TEST(Labels, FBetaOfEachBeta) {
    const Data<int32_t, int32_t> data{.predictions = {1, 0, 1}, .targets = {1, 1, 0}};
    const Data<int32_t, int32_t> none_true{.predictions = {1, 0}, .targets = {0, 0}};
    const Data<int32_t, int32_t> none_predicted{.predictions = {0, 0}, .targets = {1, 0}};
    Options options;
    options.zero_division = 1;
    for (const double beta : {1e-320, 1e-200, 1e-160, 1e-3, 1.0, 1e90, 1e91, 1e150, 1e154, 1e155, 1e200, 1e308}) {
        options.beta = beta;
        EXPECT_EQ(alone(Kind::f_beta, options, data).value, 0.5) << beta;
        EXPECT_EQ(alone(Kind::f_beta, options, none_true).value, 0) << beta;
        EXPECT_EQ(alone(Kind::f_beta, options, none_predicted).value, 0) << beta;
    }
    options.beta = infinity;
    EXPECT_EQ(alone(Kind::f_beta, options, data).value, 0.5);
}

TEST(Labels, OfEqualScoresTheHigherClassIsLarger) {
    const Data<float> data{
        .predictions = {.5F, .5F, .1F, .5F, .5F, .1F, .5F, .5F, .1F}, .targets = {0, 1, 0}, .columns = 3};
    Options top;
    top.classes = 3;
    top.top_k = 1;
    EXPECT_EQ(alone(Kind::top_k_accuracy, top, data).value, 1 / 3.0);
    top.top_k = 2;
    EXPECT_EQ(alone(Kind::top_k_accuracy, top, data).value, 1);
}

TEST(Regression, ErrorsOfOutputs) {
    const Data<double, double> data{
        .predictions = {1, 10, 2, 20}, .targets = {2, 10, 4, 26}, .columns = 2, .target_columns = 2};
    Options two;
    two.outputs = 2;
    EXPECT_EQ(alone(Kind::mean_absolute_error, two, data).value, 2.25);
    EXPECT_EQ(alone(Kind::mean_squared_error, two, data).value, 10.25);
    EXPECT_DOUBLE_EQ(alone(Kind::root_mean_squared_error, two, data).value, (std::sqrt(2.5) + std::sqrt(18)) / 2);
    two.average = Average::none;
    EXPECT_THAT(alone(Kind::r2_score, two, data, {"values"}).arrays[0],
                ElementsAre(DoubleEq(1 - 5 / 2.0), DoubleEq(1 - 36 / 128.0)));
}

TEST(Regression, R2OfTargetsFarFromZero) {
    Data<double, double> data;
    for (int i = 0; i < 100; ++i) {
        data.targets.push_back(1e9 + i % 10);
        data.predictions.push_back(1e9 + i % 10 + (i % 2 == 0 ? 1 : -1));
    }
    EXPECT_DOUBLE_EQ(alone(Kind::r2_score, {}, data).value, 1 - 1 / 8.25);
    data.weights.assign(100, 0.1);
    EXPECT_DOUBLE_EQ(alone(Kind::r2_score, {}, data).value, 1 - 1 / 8.25);
    const Data<double, double> constant{.predictions = {0.1, 0.2}, .targets = {0.1, 0.1}};
    EXPECT_EQ(alone(Kind::r2_score, {}, constant).value, 0);
    const Data<double, double> exact{.predictions = {0.1, 0.1}, .targets = {0.1, 0.1}};
    EXPECT_EQ(alone(Kind::r2_score, {}, exact).value, 1);
}

TEST(Regression, R2OfNumbersOfEachSize) {
    const auto score = [](std::vector<double> predictions, std::vector<double> targets, double size, double weight) {
        for (double& p : predictions) p *= size;
        for (double& t : targets) t *= size;
        return alone(Kind::r2_score, {},
                     Data<double, double>{predictions, targets, std::vector<double>(targets.size(), weight), {}})
            .value;
    };
    for (const double size : {0x1p252, 1.0, 0x1p-200, 0x1p-480}) {
        for (const double weight : {0x1p256, 1.0, 0x1p-10}) {
            EXPECT_DOUBLE_EQ(score({1, 2, 3}, {1, 2, 4}, size, weight), 1 - 3 / 14.0) << size << " " << weight;
            EXPECT_DOUBLE_EQ(score({9, -9, 3}, {1, 2, 4}, size, weight), 1 - 3 * 186 / 14.0) << size << " " << weight;
            EXPECT_EQ(score({1, 2, 4}, {1, 2, 4}, size, weight), 1) << size << " " << weight;
            EXPECT_EQ(score({2, 3}, {3, 3}, size, weight), 0) << size << " " << weight;
        }
    }
    for (const double weight : {0x1p-300, 0x1p-600, 0x1p-950}) {
        EXPECT_DOUBLE_EQ(score({9, -9, 3}, {1, 2, 4}, 1, weight), 1 - 3 * 186 / 14.0) << weight;
    }
    for (const double size : {1e-163, 1e-200, 1e-300}) {  // squares underflow
        EXPECT_TRUE(std::isnan(score({9, -9, 3}, {1, 2, 4}, size, 1))) << size;
        EXPECT_TRUE(std::isnan(score({1, 1}, {1, -1}, size, 1))) << size;
        EXPECT_TRUE(std::isnan(score({1, 1}, {1, -1}, size, 1e9))) << size;
        EXPECT_EQ(score({1, 1}, {0, 0}, size, 1), 0) << size;
    }
    EXPECT_TRUE(std::isnan(score({9, -9, 3}, {1, 2, 4}, 1, 0x1p-1074)));
    EXPECT_EQ(score({0, 0}, {0, 0}, 1, 1), 1);
}

TEST(Regression, MeanAndSum) {
    Data<double, double> data{.predictions = {1, 2, 4}};
    EXPECT_DOUBLE_EQ(alone(Kind::mean, {}, data, {}, false).value, 7 / 3.0);
    EXPECT_EQ(alone(Kind::sum, {}, data, {}, false).value, 7);
    data.weights = {1, 0, 0.5};
    EXPECT_EQ(alone(Kind::mean, {}, data, {}, false).value, 2);
    EXPECT_TRUE(std::isnan(alone(Kind::mean, {}, Data<double, double>{}, {}, false).value));
}

TEST(Likelihood, LogLossAndPerplexity) {
    const Data<double> binary{.predictions = {0.25, 0.5, 1.0}, .targets = {0, 1, 1}};
    EXPECT_DOUBLE_EQ(alone(Kind::log_loss, {}, binary).value, -(std::log(0.75) + std::log(0.5)) / 3);
    Options logits;
    logits.from_logits = true;
    const Data<double> zero{.predictions = {0, 0}, .targets = {0, 1}};
    EXPECT_DOUBLE_EQ(alone(Kind::log_loss, logits, zero).value, std::log(2));
    const Data<float> tokens{.predictions = {1, 1, 1, 1, 7, 9, 0, 2}, .targets = {2, -100}, .columns = 4};
    Options four_words;
    four_words.classes = 4;
    EXPECT_DOUBLE_EQ(alone(Kind::perplexity, four_words, tokens).value, 4);
}

TEST(Metric, WhatIsNotValidIsNotLookedAt) {
    Data<float> data = four;
    data.predictions.push_back(std::nanf(""));
    data.targets.push_back(-7);
    data.valid = {1, 1, 1, 1, 0};
    EXPECT_EQ(alone(Kind::auroc, {}, data).value, 0.75);
}

TEST(Metric, CountsBeyondTheIntegersOfF32) {
    constexpr size_t count = (size_t{1} << 24) + 1;
    const Data<uint8_t, uint8_t> data{.predictions = std::vector<uint8_t>(count, 1),
                                      .targets = std::vector<uint8_t>(count, 1)};
    const auto matrix = Metric::create(Kind::confusion_matrix, {});
    update(*matrix, data);
    (void)matrix->compute(nullptr);
    EXPECT_EQ(matrix->result("matrix").counts[3], static_cast<int64_t>(count));
}

}  // namespace
}  // namespace tsr::metrics
