// Whatever the number of ranks and however the samples are distributed, the bits are those of one rank.
#include <cmath>
#include <random>

#include "data/sampler.hpp"
#include "metrics.hpp"
#include "seed.hpp"

namespace tsr::metrics {
namespace {

using ::testing::HasSubstr;

Options options_of(Task task, int64_t classes, Average average = Average::macro) {
    Options options;
    options.task = task;
    options.classes = classes;
    options.average = average;
    return options;
}

// Random rows; scores have few distinct values if `ties`.
template <class P>
Data<P> random_rows(std::mt19937_64& random, size_t rows, size_t columns, int64_t classes, bool ties, bool weights) {
    Data<P> data;
    data.columns = columns;
    std::uniform_real_distribution<double> score(0, 1);
    for (size_t i = 0; i < rows; ++i) {
        data.targets.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(classes)));
        for (size_t c = 0; c < columns; ++c) {
            const double raw = score(random) + (static_cast<size_t>(data.targets.back()) == c ? 0.2 : 0);
            data.predictions.push_back(static_cast<P>(ties ? std::round(raw * 10) / 10 : raw));
        }
        if (weights) data.weights.push_back(i % 7 == 0 ? 0 : score(random));
    }
    return data;
}

template <class P, class T>
void expect_same_bits(Kind kind, const Options& options, const Data<P, T>& data,
                      const std::vector<std::string>& arrays = {}, bool has_targets = true) {
    const Outcome expected = alone(kind, options, data, arrays, has_targets);
    for (const int world_size : {2, 3, 5}) {
        // In turns; rank 1 nothing; one class on rank 0, and the rest in turns.
        const std::vector<std::function<int(size_t)>> owners{
            [&](size_t row) { return static_cast<int>(row) % world_size; },
            [&](size_t row) { return row % 3 == 0 ? 0 : world_size - 1; },
            [&](size_t row) {
                return !data.targets.empty() && data.targets[row * data.target_columns] == 0
                           ? 0
                           : static_cast<int>(row) % world_size;
            }};
        const auto& owner = owners[static_cast<size_t>(world_size) % owners.size()];
        for (const Outcome& outcome : together(world_size, kind, options, data, owner, arrays, has_targets)) {
            EXPECT_TRUE(outcome == expected) << described(kind, options) << " of " << world_size << " ranks";
        }
    }
}

TEST(MetricRanks, CurvesHaveTheBitsOfOneRank) {
    std::mt19937_64 random(testing::Seed{});
    for (const bool ties : {false, true}) {
        for (const bool weights : {false, true}) {
            const auto data = random_rows<float>(random, 700, 1, 2, ties, weights);
            expect_same_bits(Kind::roc_curve, {}, data, {"fpr", "tpr", "thresholds"});
            expect_same_bits(Kind::average_precision, {}, data);
            Options partial;
            partial.max_fpr = 0.3;
            expect_same_bits(Kind::auroc, partial, random_rows<double>(random, 500, 1, 2, ties, weights));
        }
    }
}

TEST(MetricRanks, CurvesOfClassesHaveTheBitsOfOneRank) {
    std::mt19937_64 random(testing::Seed{});
    const auto data = random_rows<double>(random, 300, 3, 3, true, true);
    expect_same_bits(Kind::auroc, options_of(Task::multiclass, 3, Average::weighted), data);
    expect_same_bits(Kind::precision_recall_curve, options_of(Task::multiclass, 3), data,
                     {"precision.0", "recall.1", "thresholds.2"});
    Options pairs = options_of(Task::multiclass, 3);
    pairs.one_vs_one = true;
    expect_same_bits(Kind::auroc, pairs, data);
    auto scores = data;
    for (double& score : scores.predictions) score = std::min(score, 1.0);
    expect_same_bits(Kind::binned_auroc, options_of(Task::multiclass, 3), scores);
}

TEST(MetricRanks, ShardedCurvesAreThePartsOfTheCurve) {
    std::mt19937_64 random(testing::Seed{});
    const auto data = random_rows<float>(random, 300, 1, 2, true, true);
    Options all;
    all.all_points = true;
    Options sharded;
    sharded.sharded = true;
    const std::vector<std::string> roc{"fpr", "tpr", "thresholds"};
    const std::vector<std::string> pr{"precision", "recall", "thresholds"};
    const auto owner = [](size_t row) { return row % 5 == 0 ? 2 : 0; };
    const Outcome whole_roc = alone(Kind::roc_curve, all, data, roc);
    const Outcome whole_pr = alone(Kind::precision_recall_curve, {}, data, pr);
    const auto roc_parts = together(4, Kind::roc_curve, sharded, data, owner, roc);
    auto pr_parts = together(4, Kind::precision_recall_curve, sharded, data, owner, pr);
    std::ranges::reverse(pr_parts);
    for (size_t i = 0; i < 3; ++i) {
        std::vector<double> joined_roc, joined_pr;
        for (const Outcome& part : roc_parts) {
            joined_roc.insert(joined_roc.end(), part.arrays[i].begin(), part.arrays[i].end());
        }
        for (const Outcome& part : pr_parts) {
            joined_pr.insert(joined_pr.end(), part.arrays[i].begin(), part.arrays[i].end());
        }
        EXPECT_EQ(joined_roc, whole_roc.arrays[i]);
        EXPECT_EQ(joined_pr, whole_pr.arrays[i]);
    }
}

TEST(MetricRanks, SumsHaveTheBitsOfOneRank) {
    std::mt19937_64 random(testing::Seed{});
    for (const bool weights : {false, true}) {
        const auto rows = random_rows<double>(random, 400, 1, 2, false, weights);
        Data<double, double> numbers{.predictions = rows.predictions, .weights = rows.weights};
        for (const double value : rows.predictions) numbers.targets.push_back(std::sin(1e3 * value) * 1e6);
        for (const Kind kind : {Kind::mean_absolute_error, Kind::root_mean_squared_error, Kind::r2_score}) {
            expect_same_bits(kind, {}, numbers);
        }
        expect_same_bits(Kind::mean, {}, numbers, {}, false);
        Options logits = options_of(Task::multiclass, 4);
        logits.from_logits = true;
        expect_same_bits(Kind::log_loss, logits, random_rows<float>(random, 200, 4, 4, false, weights));
    }
}

TEST(MetricRanks, LabelsHaveTheBitsOfOneRank) {
    std::mt19937_64 random(testing::Seed{});
    const auto rows = random_rows<float>(random, 400, 1, 4, false, true);
    Data<int32_t> data{.targets = rows.targets, .weights = rows.weights};
    for (const int64_t target : rows.targets) data.predictions.push_back(static_cast<int32_t>((target * 3) % 4));
    Options four;
    four.classes = 4;
    expect_same_bits(Kind::confusion_matrix, four, data, {"matrix"});
    expect_same_bits(Kind::f_beta, options_of(Task::multiclass, 4, Average::weighted), data);
    expect_same_bits(Kind::accuracy, options_of(Task::multiclass, 4), data);
}

TEST(MetricRanks, ThePaddingOfASamplerCountsOnce) {
    const Data<float> data{.predictions = {0.1F, 0.4F, 0.35F, 0.8F, 0.6F, 0.2F, 0.9F},
                           .targets = {0, 0, 1, 1, 0, 1, 1}};
    const Outcome expected = alone(Kind::auroc, {}, data);
    const auto store = make_memory_store(testing::patience(milliseconds{30000}));
    testing::expect_all_well(testing::run_threads(3, [&](int rank) {
        const auto comm = testing::join_job(store, rank, 3, testing::test_options());
        Sampler sampler(rank, 3, 7, {});
        const auto metric = Metric::create(Kind::auroc, {});
        while (sampler.epoch() == 0) {
            std::vector<int64_t> indices(2);
            indices.resize(sampler.next(indices));
            Data<float> batch;
            for (const int64_t index : indices) {
                batch.predictions.push_back(data.predictions[static_cast<size_t>(index)]);
                batch.targets.push_back(data.targets[static_cast<size_t>(index)]);
            }
            batch.valid.resize(indices.size());
            sampler.last_valid(batch.valid);
            update(*metric, batch);
        }
        EXPECT_EQ(metric->compute(comm), expected.value);
        comm->finalize();
    }));
}

TEST(MetricRanks, GatherMovesAllSamplesToRank0AndASaveHasThem) {
    std::mt19937_64 random(testing::Seed{});
    for (const Kind kind : {Kind::auroc, Kind::log_loss, Kind::binned_auroc}) {
        const auto rows = random_rows<double>(random, 100, 1, 2, true, true);
        Data<double> data = rows;
        for (double& score : data.predictions) score = std::min(score, 1.0);
        const Outcome expected = alone(kind, {}, data);
        std::string saved;
        const auto store = make_memory_store(testing::patience(milliseconds{30000}));
        testing::expect_all_well(testing::run_threads(3, [&](int rank) {
            const auto comm = testing::join_job(store, rank, 3, testing::test_options());
            const auto metric = Metric::create(kind, {});
            // Rank 1 has f32 without weights, and nothing of it: the others agree with it.
            update(*metric, data.part([&](size_t row) { return rank != 1 && row % 2 == (rank == 0 ? 0U : 1U); }));
            metric->gather(comm);
            EXPECT_EQ(metric->samples(), rank == 0 ? 100 : 0);
            EXPECT_EQ(metric->compute(comm), expected.value);
            if (rank == 0) saved = metric->save();
            comm->finalize();
        }));
        const auto loaded = Metric::create(kind, {});
        loaded->load(saved);
        EXPECT_EQ(loaded->samples(), 100);
        EXPECT_EQ(loaded->compute(nullptr), expected.value);
        for (size_t size = 0; size < saved.size(); size += 1 + saved.size() / 50) {
            EXPECT_THROW(loaded->load(saved.substr(0, size)), Error) << size;
        }
        EXPECT_EQ(loaded->compute(nullptr), expected.value);
    }
}

TEST(MetricRanks, AnUpdateThatFailedIsReportedOnAllRanksOnce) {
    const auto store = make_memory_store(testing::patience(milliseconds{30000}));
    testing::expect_all_well(testing::run_threads(3, [&](int rank) {
        const auto comm = testing::join_job(store, rank, 3, testing::test_options());
        const auto metric = Metric::create(Kind::auroc, {});
        update(*metric, Data<float>{.predictions = {0.1F, 0.9F}, .targets = {0, 1}});
        if (rank == 1) {
            EXPECT_THROW(update(*metric, Data<float>{.predictions = {0.5F, std::nanf("")}, .targets = {0, 1}}), Error);
        }
        try {
            (void)metric->compute(comm);
            ADD_FAILURE() << "the ranks computed without the samples";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::invalid_argument);
            EXPECT_THAT(error.what(), HasSubstr("rank 1: predictions[1] is nan"));
        }
        EXPECT_EQ(metric->compute(comm), 1);
        comm->finalize();
    }));
}

TEST(MetricRanks, OfDifferentMetricsAreRefused) {
    const auto store = make_memory_store(testing::patience(milliseconds{30000}));
    testing::expect_all_well(testing::run_threads(2, [&](int rank) {
        const auto comm = testing::join_job(store, rank, 2, testing::test_options());
        Options options;
        options.max_fpr = rank == 0 ? 0.5 : 0.25;
        const auto metric = Metric::create(Kind::auroc, options);
        try {
            (void)metric->compute(comm);
            ADD_FAILURE() << "the ranks computed different metrics";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::mismatch);
            EXPECT_THAT(error.what(), HasSubstr("max_fpr=0.25"));
        }
        comm->finalize();
    }));
}

}  // namespace
}  // namespace tsr::metrics
