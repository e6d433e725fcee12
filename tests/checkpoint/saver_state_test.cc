// What a state is after a save and a load: values of every kind, tied tensors, names that are stripped or refused, and
// the differences that a load reports.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/export/export.hpp"
#include "fixture.hpp"
#include "saver_fixture.hpp"

namespace tsr::testing {
namespace {

TEST_F(SaverTest, ValuesOfEveryKindReturnAsTheyWere) {
    const std::vector<std::string> texts{"null",
                                         "true",
                                         "-9223372036854775808",
                                         "9223372036854775807",
                                         "0.1",
                                         "-0.0",
                                         "1e+300",
                                         "\"é\\n\"",
                                         "[]",
                                         "[1,2.0,\"x\"]",
                                         R"({"a":{"b":[]}})",
                                         R"({"~":"bytes","v":"AAECAw=="})",
                                         R"({"~":"tuple","v":[1,{"~":"tuple","v":[]}]})",
                                         R"({"~":"map","v":[[1,"one"],[true,2.0]]})",
                                         R"({"~":"int","v":"-123456789012345678901234567890"})",
                                         R"({"~":"double","v":"nan"})",
                                         R"({"~":"double","v":"-inf"})"};
    const auto name = [](size_t i) { return fmt::format("v{}", i); };
    for (size_t i = 0; i < texts.size(); ++i) owned_.state.set_value(name(i), parse_value(texts[i], "v"));
    owned_.state.set_metric("loss", std::nan(""));
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, owned_.state);
    for (size_t i = 0; i < texts.size(); ++i) owned_.state.set_value(name(i), Json("other"));
    EXPECT_EQ(saver.resume(owned_.state), 1);
    for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(owned_.state.value(name(i)).dump(), texts[i]);
    EXPECT_TRUE(std::isnan(double_of(Checkpoint::open(dir_.path())->manifest().metrics.at("loss"), "loss")));
}

TEST_F(SaverTest, TiedTensorsAreSavedOnceAndLoadApart) {
    std::vector<float> memory(1000, 1.5F);
    const Tensor tied = tensor_of(std::span(memory), DType::f32);
    State state;
    state.add_tensor("embed.weight", tied);
    state.add_tensor("head.weight", tied);
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, state);
    const auto checkpoint = Checkpoint::open(dir_.path());
    EXPECT_EQ(checkpoint->manifest().tensors.size(), 1u);
    EXPECT_EQ(checkpoint->names(), (std::vector<std::string>{"embed.weight", "head.weight"}));
    EXPECT_LT(checkpoint->manifest().size_bytes(), 4096 + 4100);

    std::vector<float> a(1000);
    std::vector<float> b(1000);
    State apart;
    apart.add_tensor("embed.weight", tensor_of(std::span(a), DType::f32));
    apart.add_tensor("head.weight", tensor_of(std::span(b), DType::f32));
    EXPECT_EQ(saver.resume(apart), 1);
    EXPECT_EQ(a, memory);
    EXPECT_EQ(b, memory);
}

// What an untied checkpoint has of the second name may be another thing, and would be written at the same time.
TEST_F(SaverTest, TensorsThatAreTiedInTheStateAloneAreLoadedFromTheFirst) {
    std::vector<float> a(3 << 20, 1.0F);
    std::vector<float> b(a.size(), 2.0F);
    State apart;
    apart.add_tensor("a", tensor_of(std::span(a), DType::f32));
    apart.add_tensor("b", tensor_of(std::span(b), DType::f32));
    for (const SaveFormat format : {SaveFormat::native, SaveFormat::torch_dcp}) {
        SaverOptions options = saver_options();
        options.format = format;
        const std::string root = dir_ / fmt::format("root-{}", static_cast<int>(format));
        Saver(nullptr, root, options).save(1, apart);
        std::vector<float> memory(a.size());
        State tied;
        tied.add_tensor("a", tensor_of(std::span(memory), DType::f32));
        tied.add_tensor("b", tensor_of(std::span(memory), DType::f32));
        (void)Checkpoint::open(root)->load(tied);
        EXPECT_TRUE(memory == a);
    }
}

// Such a file would be written, and never read again.
TEST_F(SaverTest, ANameThatSafetensorsKeepsIsRefusedBeforeAnythingIsWritten) {
    OwnedState owned;
    owned.add_whole({"__metadata__", DType::f32, {10}});
    owned.fill(1);
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        const Error error = error_of([&] { saver.save(1, owned.state); });
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_NE(std::string(error.what()).find("'__metadata__'"), std::string::npos) << error.what();
        EXPECT_TRUE(committed(dir_.path()).empty());
    }
    SaverOptions options = saver_options();
    options.format = SaveFormat::torch_dcp;
    Saver saver(nullptr, dir_.path(), options);
    saver.save(2, owned.state);
    owned.poison();
    EXPECT_EQ(saver.resume(owned.state), 2);
    EXPECT_EQ(owned.differences(1), 0);
    Peers alone(nullptr);
    const auto source = Checkpoint::open(dir_.path());
    const Error error = error_of([&] { (void)export_checkpoint(*source, alone, dir_ / "exported", ExportOptions()); });
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_FALSE(std::filesystem::exists(dir_ / "exported"));
}

TEST_F(SaverTest, WrappersNamesAreStripped) {
    std::vector<float> memory(3, 2.0F);
    State state;
    state.add_tensor("model.module._orig_mod.fc.weight", tensor_of(std::span(memory), DType::f32));
    EXPECT_TRUE(state.tensors().contains("model.fc.weight"));
    EXPECT_EQ(error_of([&] { state.add_tensor("model.fc.weight", tensor_of(std::span(memory), DType::f32)); }).code(),
              Code::invalid_argument);
}

// Such a name would be saved, and never read again.
TEST_F(SaverTest, ANameOfWrappersAloneIsRefused) {
    std::vector<float> memory(3, 2.0F);
    State state;
    for (const char* name : {"module.", "_orig_mod.", "module._orig_mod."}) {
        const Error error = error_of([&] { state.add_tensor(name, tensor_of(std::span(memory), DType::f32)); });
        EXPECT_EQ(error.code(), Code::invalid_argument) << name;
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
    EXPECT_TRUE(state.tensors().empty());
    EXPECT_NO_THROW(state.add_tensor("module", tensor_of(std::span(memory), DType::f32)));
}

TEST_F(SaverTest, AStateThatDoesNotFitIsRefusedWithEveryDifferenceAndUntouched) {
    Saver saver(nullptr, dir_.path(), saver_options());
    owned_.add_whole({"only.saved", DType::i64, {2}});
    owned_.add_whole({"shape", DType::f32, {2, 3}});
    owned_.add_whole({"dtype", DType::f32, {4}});
    owned_.add_whole({"kind", DType::i32, {4}});
    saver.save(1, owned_.state);
    OwnedState other;
    other.add_whole({"w", DType::f32, {100}});
    other.add_whole({"only.here", DType::f32, {1}});
    other.add_whole({"shape", DType::f32, {3, 2}});
    other.add_whole({"dtype", DType::bf16, {4}});
    other.add_whole({"kind", DType::f32, {4}});
    other.poison();
    const Error error = error_of([&] { (void)saver.resume(other.state); });
    EXPECT_EQ(error.code(), Code::mismatch);
    const std::string message = error.what();
    for (const char* told :
         {"'only.saved' is unexpected", "'only.here' is missing", "'shape': saved with shape [2, 3]",
          "'dtype': saved as f32, the state has bf16", "'kind': saved as i32", "'epoch' is unexpected"}) {
        EXPECT_NE(message.find(told), std::string::npos) << told << " in " << message;
    }
    // Not one byte was written.
    OwnedState poisoned;
    poisoned.add_whole({"w", DType::f32, {100}});
    poisoned.poison();
    EXPECT_EQ(std::memcmp(other.state.tensors().at("w").memory[0], poisoned.state.tensors().at("w").memory[0], 400), 0);
}

TEST_F(SaverTest, WhatIsAllowedIsReported) {
    Saver saver(nullptr, dir_.path(), saver_options());
    std::vector<float> numbers{1.0F, 1.0F / 3, -65504.0F, 1e-8F, INFINITY};
    owned_.state.add_tensor("cast", tensor_of(std::span(numbers), DType::f32));
    owned_.fill();
    saver.save(1, owned_.state);
    std::vector<uint16_t> halves(5);
    State other;
    other.add_tensor("cast", tensor_of(std::span(halves), DType::f16));
    other.set_value("new", Json(true));
    LoadOptions options;
    options.missing = options.unexpected = options.cast = Allow::yes;
    const LoadReport report = Checkpoint::open(dir_.path())->load(other, options);
    EXPECT_EQ(report.missing, (std::vector<std::string>{"new"}));
    EXPECT_EQ(report.unexpected, (std::vector<std::string>{"w", "epoch"}));
    EXPECT_EQ(report.cast.size(), 1u);
    EXPECT_EQ(halves, (std::vector<uint16_t>{0x3c00, 0x3555, 0xfbff, 0x0000, 0x7c00}));
    EXPECT_EQ(other.value("new"), Json(true));
}

}  // namespace
}  // namespace tsr::testing
