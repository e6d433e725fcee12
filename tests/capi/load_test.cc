// Loads of chosen names and under other names through the C ABI, and their reports.
#include <cstddef>

#include "api.hpp"

namespace {

using ::testing::Each;
using ::testing::ElementsAre;

struct LoadByNames : ::testing::Test {
    api::TemporaryDirectory directory;
    api::Array<float> saved_weight{{4}, 1.0F};
    api::Array<float> saved_bias{{2}, 2.0F};
    api::Array<float> weight{{4}, -1.0F};
    api::Array<float> bias{{2}, -1.0F};
    api::Owned<tsr_state> state = api::state_of("w", weight);  // and "b"
    api::Owned<tsr_checkpoint> checkpoint;                     // "model.w", "model.b" and the value "epoch"
    tsr_load_options options{};
    std::vector<std::string> reports;

    void SetUp() override {
        const auto saved = api::state_of("model.w", saved_weight);
        const tsr_tensor second = saved_bias.tensor();
        ASSERT_OK(tsr_state_add_tensor(saved, "model.b", &second));
        ASSERT_OK(tsr_state_set_int64(saved, "epoch", 3));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(nullptr, directory.path().c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, saved));
        ASSERT_OK(tsr_checkpoint_open(directory.path().c_str(), checkpoint.out()));
        const tsr_tensor own = bias.tensor();
        ASSERT_OK(tsr_state_add_tensor(state, "b", &own));
        ASSERT_OK(tsr_load_options_init(&options, sizeof options));
        options.report = [](const char* json, void* self) {
            static_cast<LoadByNames*>(self)->reports.emplace_back(json);
        };
        options.report_data = this;
    }
    [[nodiscard]] tsr_status load() {
        weight.values.assign(4, -1.0F);
        bias.values.assign(2, -1.0F);
        return tsr_checkpoint_load(checkpoint, state, &options);
    }
    void expect_untouched() const {
        EXPECT_THAT(weight.values, Each(-1.0F));
        EXPECT_THAT(bias.values, Each(-1.0F));
        EXPECT_TRUE(reports.empty()) << reports.back();
    }
};

TEST_F(LoadByNames, TakesPatternsAndRulesAndReportsOnce) {
    const std::array<const char*, 2> only{"w", "b*"};
    const std::array<tsr_name_rule, 2> rules{{{"model.", ""}, {"epoch", "never"}}};
    options.only = only.data();
    options.only_count = only.size();
    options.rules = rules.data();
    options.rule_count = rules.size();
    ASSERT_OK(load());
    EXPECT_THAT(weight.values, Each(1.0F));
    EXPECT_THAT(bias.values, Each(2.0F));
    ASSERT_THAT(reports, ElementsAre(R"({"missing":[],"unexpected":[],"cast":[],"left_alone":[],"verified":true})"));

    options.only_count = 1;
    options.verify = 0;
    ASSERT_OK(load());
    EXPECT_THAT(weight.values, Each(1.0F));
    EXPECT_THAT(bias.values, Each(-1.0F));
    ASSERT_EQ(reports.size(), 2U);
    EXPECT_EQ(reports.back(), R"({"missing":[],"unexpected":[],"cast":[],"left_alone":["b"],"verified":false})");
}

TEST_F(LoadByNames, ReportsWhatWasAllowed) {
    api::Array<double> wide{{4}, -1.0};
    const tsr_tensor tensor = wide.tensor();
    api::Owned<tsr_state> other;
    ASSERT_OK(tsr_state_create(other.out()));
    ASSERT_OK(tsr_state_add_tensor(other, "model.w", &tensor));
    ASSERT_OK(tsr_state_set_int64(other, "step", 7));
    options.allow_missing = options.allow_unexpected = options.allow_cast = 1;
    ASSERT_OK(tsr_checkpoint_load(checkpoint, other, &options));
    EXPECT_THAT(wide.values, Each(1.0));
    EXPECT_THAT(reports, ElementsAre(R"({"missing":["step"],"unexpected":["model.b","epoch"],)"
                                     R"("cast":[{"name":"model.w","from":"f32","to":"f64"}],"left_alone":[],)"
                                     R"("verified":true})"));
}

TEST_F(LoadByNames, FailsWithoutAReport) {
    EXPECT_FAILS(load(), TSR_E_MISMATCH, "'w' is missing");
    expect_untouched();
    const char* nothing = "nope.*";
    options.only = &nothing;
    options.only_count = 1;
    EXPECT_FAILS(load(), TSR_E_MISMATCH, "no name of the state matches 'nope.*'");
    expect_untouched();
}

TEST_F(LoadByNames, RefusesWhatCannotBeNames) {
    const std::array<const char*, 2> none{"w", nullptr};
    options.only_count = 1;
    EXPECT_FAILS(load(), TSR_E_INVALID_ARGUMENT, "only is NULL");
    options.only = none.data();
    options.only_count = 0;
    EXPECT_FAILS(load(), TSR_E_INVALID_ARGUMENT, "only has no pattern");
    options.only_count = 2;
    EXPECT_FAILS(load(), TSR_E_INVALID_ARGUMENT, "only[1] is NULL");
    const char* bad = "\xff";
    options.only = &bad;
    options.only_count = 1;
    EXPECT_FAILS(load(), TSR_E_INVALID_ARGUMENT, "not UTF-8");
    options.only = nullptr;
    options.only_count = 0;

    options.rule_count = 1;
    EXPECT_FAILS(load(), TSR_E_INVALID_ARGUMENT, "rules is NULL");
    const auto refused = [&](const char* saved, const char* here, const char* told) {
        const tsr_name_rule rule{saved, here};
        options.rules = &rule;
        EXPECT_FAILS(load(), TSR_E_INVALID_ARGUMENT, told);
    };
    refused(nullptr, "w", "rules[0].saved is NULL");
    refused("model.w", nullptr, "rules[0].here is NULL");
    refused("\xc3(", "w", "rules[0].saved is not UTF-8");
    refused("model.", "w", "the rule 'model.' -> 'w'");
    refused("model.w", "model.b", "'model.b' and 'model.w' of the checkpoint would both be named 'model.b'");
    expect_untouched();
}

// As it was before a load had names: the struct ended behind `comm`.
TEST_F(LoadByNames, ACallerThatDoesNotKnowThemLoadsAll) {
    const char* wrong = "wrong";
    options.only = &wrong;
    options.only_count = 1;
    options.allow_missing = options.allow_unexpected = 1;
    options.struct_size = offsetof(tsr_load_options, only);
    EXPECT_OK(load());
    EXPECT_TRUE(reports.empty());

    std::array<unsigned char, sizeof options> earlier;
    earlier.fill(0xab);
    auto* written = reinterpret_cast<tsr_load_options*>(earlier.data());
    ASSERT_OK(tsr_load_options_init(written, offsetof(tsr_load_options, only)));
    EXPECT_EQ(earlier[offsetof(tsr_load_options, only)], 0xab);
}

}  // namespace
