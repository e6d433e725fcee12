// What a metric refuses. The metric is as before, and the message says what, where and what to do.
#include <cmath>
#include <limits>

#include "metrics.hpp"

namespace tsr::metrics {
namespace {

using ::testing::HasSubstr;

const Data<float> good{.predictions = {0.1F, 0.4F, 0.35F, 0.8F}, .targets = {0, 0, 1, 1}};

template <class Body>
void expect_refused(Body&& body, Code code, const std::string& what) {
    try {
        body();
        ADD_FAILURE() << "accepted, but " << what;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        EXPECT_THAT(error.what(), HasSubstr(what));
    }
}

template <class P, class T>
void expect_refused(Kind kind, const Options& options, const Data<P, T>& data, const std::string& what) {
    const auto metric = Metric::create(kind, options);
    expect_refused([&] { update(*metric, data); }, Code::invalid_argument, what);
    EXPECT_EQ(metric->samples(), 0);
}

void expect_no_such(Kind kind, const Options& options, const std::string& what) {
    expect_refused([&] { (void)Metric::create(kind, options); }, Code::invalid_argument, what);
}

TEST(MetricInput, NumbersMustBeFinite) {
    expect_refused(Kind::auroc, {}, Data<float>{.predictions = {0, NAN}, .targets = {0, 1}}, "predictions[1] is nan");
    expect_refused(Kind::auroc, {}, Data<double>{.predictions = {0, 1, INFINITY}, .targets = {0, 1, 1}},
                   "predictions[2] is inf");
    Options three;
    three.classes = 3;
    expect_refused(Kind::top_k_accuracy, three,
                   Data<float>{.predictions = {0, 1, 2, 3, NAN, 5}, .targets = {0, 1}, .columns = 3},
                   "predictions[1, 1] is nan");
    expect_refused(Kind::mean_squared_error, {}, Data<double, double>{.predictions = {0}, .targets = {1e200}},
                   "at most 2^256 in magnitude");
    expect_refused(Kind::auroc, {}, Data<float>{.predictions = {0, 1}, .targets = {0, 1}, .weights = {1, -1}},
                   "weights[1] is -1");
    expect_refused(Kind::auroc, {}, Data<float>{.predictions = {0, 1}, .targets = {0, 1}, .weights = {NAN, 1}},
                   "weights[0] is nan");
}

TEST(MetricInput, AnIndexIsThatOfTheInput) {
    Data<float> data;
    data.predictions.assign(5000, 1);
    data.targets.assign(5000, 1);
    data.valid.assign(5000, 0);
    data.valid[4000] = data.valid[4999] = 1;
    data.targets[4999] = 2;
    expect_refused(Kind::auroc, {}, data, "targets[4999] is 2; labels must be 0 to 1");
}

TEST(MetricInput, LabelsMustBeInRange) {
    expect_refused(Kind::accuracy, {}, Data<int64_t>{.predictions = {0, -1}, .targets = {0, 1}},
                   "predictions[1] is -1; labels must be 0 to 1");
    expect_refused(Kind::accuracy, {}, Data<float>{.predictions = {0, 1}, .targets = {0, 1}},
                   "predictions are f32; labels must be i64, i32, u8 or bool");
    expect_refused(Kind::auroc, {}, Data<float, float>{.predictions = {0, 1}, .targets = {0, 1}}, "targets are f32");
}

TEST(MetricInput, ShapesMustFit) {
    expect_refused(Kind::auroc, {}, Data<float>{.predictions = {0, 1, 2}, .targets = {0, 1}}, "3 and 2 samples");
    Options three;
    three.task = Task::multiclass;
    three.classes = 3;
    expect_refused(Kind::auroc, three, Data<float>{.predictions = {0, 1, 2, 3}, .targets = {0, 1}, .columns = 2},
                   "the last dimension must be 3, since classes is 3: set classes to 2");
    expect_refused(Kind::perplexity, {}, Data<float>{.predictions = {0, 1, 2, 3, 4}, .targets = {0}, .columns = 5},
                   "the last dimension must be 2, since classes is 2: set classes to 5");
    Options outputs;
    outputs.outputs = 3;
    expect_refused(Kind::r2_score, outputs, Data<double, double>{.predictions = {1, 2}, .targets = {1, 2}},
                   "the last dimension must be 3, since outputs is 3");
    expect_refused(Kind::log_loss, {}, Data<float>{.predictions = {0, 1, 1, 0, 0, 0}, .targets = {0, 1}, .columns = 3},
                   "6 and 2 samples; for 3 scores per sample set task to multiclass or multilabel, and classes to 3");
    Data<float> weighted = good;
    weighted.weights = {1, 2};
    expect_refused(Kind::auroc, {}, weighted, "4 and 2 samples");
    const auto mean = Metric::create(Kind::mean, {});
    expect_refused([&] { update(*mean, good); }, Code::invalid_argument, "the metric mean takes no targets");
    const auto auroc = Metric::create(Kind::auroc, {});
    expect_refused([&] { update(*auroc, good, false); }, Code::invalid_argument, "the metric auroc needs targets");
}

TEST(MetricInput, ProbabilitiesMustBeSome) {
    Data<double> log_loss{.predictions = {0.5, 2, 0.5, 1.5}, .targets = {0, 1, 1, 0}, .valid = {1, 0, 1, 1}};
    expect_refused(Kind::log_loss, {}, log_loss, "predictions[3] is 1.5; probabilities must be 0 to 1");
    expect_refused(Kind::binned_auroc, {}, log_loss, "predictions[3] is 1.5; binned metrics take scores from 0 to 1");
    Options two;
    two.task = Task::multiclass;
    expect_refused(Kind::log_loss, two, Data<double>{.predictions = {0.5, 0.4}, .targets = {0}, .columns = 2},
                   "predictions[0] sum to 0.9; probabilities must sum to 1");
    two.classes = 3;
    expect_refused(Kind::binned_auroc, two,
                   Data<double>{.predictions = {0, 1, 0, 0, 1, 1.1}, .targets = {0, 1}, .columns = 3},
                   "predictions[1, 2] is 1.1");
}

TEST(MetricInput, IntegersMustBeThoseThatDoubleHas) {
    expect_refused(Kind::mean_squared_error, {},
                   Data<int64_t>{.predictions = {1, -(int64_t{1} << 54)}, .targets = {0, 1}},
                   "predictions[1] is -18014398509481984; integers must be within 2^53");
    constexpr int64_t exact = int64_t{1} << 53;
    for (const int64_t beyond : {exact + 1, -exact - 1}) {
        const std::string what = "[2] is " + std::to_string(beyond);
        const std::vector<uint8_t> valid{0, 1, 1};
        expect_refused(Kind::mean_squared_error, {},
                       Data<int64_t>{.predictions = {beyond, 0, beyond}, .targets = {0, 0, 0}, .valid = valid},
                       "predictions" + what);
        expect_refused(Kind::mean_squared_error, {},
                       Data<int64_t>{.predictions = {0, 0, 0}, .targets = {beyond, 0, beyond}, .valid = valid},
                       "targets" + what);
    }
    const Data<int64_t> largest{.predictions = {exact, -exact}, .targets = {0, 1}};
    update(*Metric::create(Kind::auroc, {}), largest);
}

TEST(MetricInput, LogitsMustHaveALossThatCanBeSummed) {
    Options logits;
    logits.from_logits = true;
    const std::string what = "[1] are logits with a loss of ";
    const Data<double> large{.predictions = {-1e300, 9e307}, .targets = {0, 0}};
    expect_refused(Kind::log_loss, logits, large, "predictions" + what + "9e+307 for the target 0");
    expect_refused(Kind::log_loss, logits, Data<double>{.predictions = {1e300, -1e300}, .targets = {1, 1}}, what);
    const Data<double> words{.predictions = {1, 2, 1.7e308, -1.7e308}, .targets = {0, 1}, .columns = 2};
    expect_refused(Kind::perplexity, {}, words, what + "inf for the target 1");
    logits.task = Task::multiclass;
    expect_refused(Kind::log_loss, logits, words, what);
    const Data<double> masked{.predictions = {1, -1.7e308}, .targets = {0}, .columns = 2};
    EXPECT_EQ(alone(Kind::perplexity, {}, masked).value, 1);
}

TEST(MetricInput, OnADeviceIsUnsupported) {
    const auto metric = Metric::create(Kind::auroc, {});
    Tensor predictions = matrix_of(good.predictions, 1);
    predictions.device = {DeviceType::cuda, 1};
    const Tensor targets = matrix_of(good.targets, 1);
    expect_refused([&] { metric->update({&predictions, &targets, nullptr, nullptr}); }, Code::unsupported,
                   "predictions are on CUDA device 1; metrics take tensors on the CPU");
}

TEST(MetricInput, ARefusedUpdateHasAddedNothing) {
    const auto metric = Metric::create(Kind::roc_curve, {});
    update(*metric, good);
    Data<float> bad;
    bad.predictions.assign(10000, 0.5F);
    bad.targets.assign(10000, 1);
    bad.predictions.back() = NAN;
    EXPECT_THROW(update(*metric, bad), Error);
    bad.predictions.back() = 0;
    bad.targets.back() = 9;
    EXPECT_THROW(update(*metric, bad), Error);
    EXPECT_THROW((void)metric->compute(nullptr), Error);  // once
    (void)metric->compute(nullptr);
    EXPECT_EQ(metric->result("thresholds").numbers.size(), 5U);
}

TEST(MetricInput, OptionsMustFit) {
    Options options;
    options.classes = 1 << 14;
    expect_no_such(Kind::confusion_matrix, options, "more than the limit of 67108864");
    options.classes = int64_t{1} << 40;
    expect_no_such(Kind::confusion_matrix, options, "classes is 1099511627776");
    options = {};
    options.task = Task::multiclass;
    options.classes = int64_t{1} << 23;
    expect_no_such(Kind::roc_curve, options, "more than the limit");
    options.classes = 3000;
    options.one_vs_one = true;
    expect_no_such(Kind::auroc, options, "more than the limit");
    options = {};
    options.beta = 2;
    expect_no_such(Kind::auroc, options, "auroc has no option beta");
    options.beta = NAN;
    expect_no_such(Kind::f_beta, options, "beta is nan");
    options = {};
    options.classes = 3;
    expect_no_such(Kind::auroc, options, "set the task multiclass");
    options.task = Task::multiclass;
    options.max_fpr = 0.5;
    expect_no_such(Kind::auroc, options, "max_fpr is not defined");
    options.max_fpr = 0;
    expect_no_such(Kind::auroc, options, "max_fpr is 0");
    options.max_fpr = 1;
    options.average = Average::samples;
    expect_no_such(Kind::auroc, options, "average samples");
    options.average = static_cast<Average>(9);
    expect_no_such(Kind::auroc, options, "average is 9");
    expect_no_such(static_cast<Kind>(23), {}, "kind is 23");
    options = {};
    options.zero_division = 0.5;
    expect_no_such(Kind::precision, options, "zero_division is 0.5");
    options = {};
    options.top_k = 3;
    expect_no_such(Kind::top_k_accuracy, options, "top_k is 3, but there are only 2 classes");
    options = {};
    options.outputs = 0;
    expect_no_such(Kind::r2_score, options, "outputs is 0");
}

TEST(MetricInput, AKindOfClassesHasTheTaskMulticlass) {
    const Data<int64_t> data{.predictions = {0, 2, 1}, .targets = {0, 2, 2}};
    Options options;
    options.classes = 3;
    for (const Kind kind : {Kind::confusion_matrix, Kind::balanced_accuracy}) {
        options.task = Task::binary;
        const auto plain = Metric::create(kind, options);
        update(*plain, data);
        options.task = Task::multiclass;
        const auto named = Metric::create(kind, options);
        named->merge(*plain);
        update(*plain, data);
        update(*named, data);
        EXPECT_EQ(outcome_of(*named, named->compute(nullptr), {}), outcome_of(*plain, plain->compute(nullptr), {}));
    }
    for (const Kind kind : {Kind::top_k_accuracy, Kind::perplexity}) EXPECT_TRUE(Metric::create(kind, options));
    options.task = Task::multilabel;
    expect_no_such(Kind::confusion_matrix, options, "the task is multilabel; set it to multiclass, or leave it out");
    options = {};
    options.task = Task::multiclass;
    expect_no_such(Kind::mean, options, "mean has no option task");
}

TEST(Metric, ResultsAreFoundByTheirNames) {
    const auto metric = Metric::create(Kind::roc_curve, {});
    expect_refused([&] { (void)metric->result("fpr"); }, Code::not_found, "has computed no arrays");
    update(*metric, good);
    (void)metric->compute(nullptr);
    expect_refused([&] { (void)metric->result("recall"); }, Code::not_found, "but fpr, tpr, thresholds");
    metric->reset();
    expect_refused([&] { (void)metric->result("fpr"); }, Code::not_found, "has computed no arrays");
}

TEST(Metric, MergesWithItsLike) {
    const auto one = Metric::create(Kind::auroc, {});
    const auto other = Metric::create(Kind::auroc, {});
    update(*one, good.part([](size_t row) { return row < 2; }));
    update(*other, good.part([](size_t row) { return row >= 2; }));
    one->merge(*other);
    EXPECT_EQ(one->compute(nullptr), 0.75);
    EXPECT_EQ(other->samples(), 2);
    expect_refused([&] { one->merge(*one); }, Code::invalid_argument, "with itself");
    expect_refused([&] { one->merge(*Metric::create(Kind::mean, {})); }, Code::invalid_argument, "a metric mean");
    Options micro;
    micro.task = Task::multilabel;
    micro.average = Average::micro;
    expect_refused([&] { one->merge(*Metric::create(Kind::auroc, micro)); }, Code::invalid_argument,
                   "a metric auroc task=multilabel classes=2 average=micro");
}

TEST(Metric, AFailedUpdateIsNotForgottenByAMergeASaveOrAGather) {
    const auto metric = Metric::create(Kind::auroc, {});
    update(*metric, good);
    const auto fail = [&] { EXPECT_THROW(update(*metric, Data<float>{.predictions = {NAN}, .targets = {1}}), Error); };
    fail();
    const auto other = Metric::create(Kind::auroc, {});
    const std::string why = ": an update of it has failed (predictions[0] is nan; it must be finite)";
    expect_refused([&] { other->merge(*metric); }, Code::invalid_state, "auroc cannot be merged" + why);
    EXPECT_EQ(other->samples(), 0);
    expect_refused([&] { (void)metric->save(); }, Code::invalid_state, "auroc cannot be saved, nor loaded" + why);
    expect_refused([&] { metric->gather(nullptr); }, Code::invalid_argument, "predictions[0] is nan");  // once
    other->merge(*metric);
    EXPECT_EQ(other->samples(), 4);
    EXPECT_FALSE(metric->save().empty());
    fail();
    metric->merge(*other);  // the failure stays
    expect_refused([&] { (void)metric->compute(nullptr); }, Code::invalid_argument, "predictions[0] is nan");
}

TEST(Metric, MergesScoresOfDifferentTypesAndWeights) {
    const Data<double> doubles{.predictions = {0.3, 0.6, 0.35}, .targets = {1, 0, 1}, .weights = {2, 0.5, 1}};
    Data<double> all = doubles;
    for (size_t i = 0; i < good.rows(); ++i) {
        all.predictions.push_back(good.predictions[i]);
        all.targets.push_back(good.targets[i]);
        all.weights.push_back(1);
    }
    const double expected = alone(Kind::average_precision, {}, all).value;
    for (const bool doubles_first : {false, true}) {
        const auto one = Metric::create(Kind::average_precision, {});
        const auto other = Metric::create(Kind::average_precision, {});
        update(doubles_first ? *one : *other, doubles);
        update(doubles_first ? *other : *one, good);
        one->merge(*other);
        EXPECT_EQ(one->compute(nullptr), expected);
    }
}

}  // namespace
}  // namespace tsr::metrics
