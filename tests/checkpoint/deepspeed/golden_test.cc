// Everything in the files of real DeepSpeed is what its own accessors said, to the last bit: parameters, moments,
// buffers, aliases, counters, settings and client state, in full and in parts.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "written.hpp"

namespace tsr::testing {
namespace {

class Written : public ::testing::TestWithParam<const char*> {
   protected:
    std::shared_ptr<const Checkpoint> opened_ = Checkpoint::open(tag_of(GetParam()));
    std::shared_ptr<const Checkpoint> expected_ = expected_of(GetParam());
    Json facts_ = Json::parse(slurp(written() + "/" + GetParam() + "/expected/facts.json"), "facts.json");
};

TEST_P(Written, EveryTensorIsTheOneThatDeepSpeedHas) {
    std::vector<std::string> names;
    std::vector<std::string> wanted;
    opened_->manifest().for_each(
        [&](const std::string& name, const SavedTensor&, const std::string*) { names.push_back(name); });
    expected_->manifest().for_each(
        [&](const std::string& name, const SavedTensor&, const std::string*) { wanted.push_back(name); });
    EXPECT_EQ(names, wanted);
    for (const std::string& name : wanted) {
        const SavedTensor* const saved = opened_->manifest().find(name);
        ASSERT_NE(saved, nullptr) << name;
        EXPECT_EQ(saved->shape, expected_->manifest().find(name)->shape) << name;
        EXPECT_EQ(saved->dtype, expected_->manifest().find(name)->dtype) << name;
        EXPECT_EQ(bytes_of(*opened_, name), bytes_of(*expected_, name)) << name;
    }
    EXPECT_TRUE(opened_->manifest().unreadable.empty()) << opened_->manifest().unreadable.begin()->first;
    EXPECT_TRUE(opened_->verify(Depth::everything).empty());
    EXPECT_TRUE(opened_->verify(Depth::headers).empty());
}

TEST_P(Written, ATiedWeightIsAnAlias) {
    const bool is_tied = expected_->manifest().find("model.head.weight") != nullptr;
    const auto& aliases = opened_->manifest().aliases;
    EXPECT_EQ(aliases.size(), is_tied ? 1u : 0u);
    if (is_tied) {
        EXPECT_EQ(aliases.at("model.head.weight"), "model.embed.weight");
    }
}

TEST_P(Written, CountersSettingsAndClientStateAreValues) {
    const Manifest& manifest = opened_->manifest();
    EXPECT_EQ(manifest.format, "deepspeed");
    EXPECT_EQ(manifest.writer.library, "DeepSpeed");
    EXPECT_EQ(manifest.step, facts_.find("step")->as_int());
    EXPECT_EQ(manifest.world_size, facts_.find("world_size")->as_int());
    for (const auto& [name, value] : facts_.find("values")->as_object()) {
        const auto found = manifest.values.find(name);
        ASSERT_NE(found, manifest.values.end()) << name;
        EXPECT_EQ(found->second.dump(), value.dump()) << name;
    }
    EXPECT_TRUE(manifest.values.contains("engine.ds_config.train_micro_batch_size_per_gpu"));
    for (const auto& [name, value] : manifest.values) {
        const bool is_named = name.starts_with("engine.") || name.starts_with("client_state.") ||
                              name.starts_with("lr_scheduler.") || name.starts_with("optim.param_groups.");
        EXPECT_TRUE(is_named) << name;
    }
}

// As the ranks of any world size read them.
TEST_P(Written, PartsOfTensorsAreRead) {
    for (const auto& [name, tensor] : opened_->manifest().tensors) {
        const Dims& shape = tensor->shape;
        for (int dim = 0; dim < shape.ndim(); ++dim) {
            for (const int parts : {2, 3, 5}) {
                for (int part = 0; part < parts; ++part) {
                    Box box = Box::whole(shape);
                    const Range range = chunk(shape[dim], parts, part);
                    box.offsets[dim] = range.begin;
                    box.sizes[dim] = range.end - range.begin;
                    if (box.empty()) continue;
                    const std::string wanted = bytes_of(*expected_, name, box);
                    EXPECT_EQ(bytes_of(*opened_, name, box), wanted) << name << " " << box.str();
                    EXPECT_EQ(bytes_of(*opened_, name, box, Verify::none), wanted) << name << " " << box.str();
                }
            }
        }
    }
}

TEST_P(Written, TheDirectoryAboveAndItsLatestMeanTheTag) {
    const std::string root = written() + "/" + GetParam();
    EXPECT_EQ(Checkpoint::open(root)->path(), opened_->path());
    EXPECT_EQ(Checkpoint::open(root + "/latest")->path(), opened_->path());
}

INSTANTIATE_TEST_SUITE_P(Cases, Written, ::testing::ValuesIn(written_cases), [](const auto& one) {
    std::string name = one.param;
    std::ranges::replace(name, '-', '_');
    return name;
});

TEST(WrittenFiles, HaveNoOtherCases) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(written())) {
        names.push_back(entry.path().filename().string());
    }
    std::ranges::sort(names);
    EXPECT_EQ(names, std::vector<std::string>(std::begin(written_cases), std::end(written_cases)));
}

}  // namespace
}  // namespace tsr::testing
