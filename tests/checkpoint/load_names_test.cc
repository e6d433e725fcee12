// Loads of a part of a state, and under other names than those that were saved: what is loaded, what is refused, and
// what is reported.
#include "checkpoint/load/load_names.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "fixture.hpp"
#include "patience.hpp"
#include "places.hpp"
#include "safetensors/file_maker.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Spec weight{"model.encoder.weight", DType::f32, {10, 6}};
const Spec bias{"model.encoder.bias", DType::f64, {5}};
const Spec head{"model.head.weight", DType::f32, {7, 3}};
const char* const tied = "model.tied.weight";  // the head's

Layout by_rows(const Spec& spec, int world_size) {
    return Layout::placed(spec.shape, std::vector<int>{world_size}, std::vector<Placement>{Placement::shard(0)});
}

Spec called(const std::string& name, const Spec& spec) { return {name, spec.dtype, spec.shape}; }

// Everything that is saved, as one rank of a world holds it.
void build(OwnedState& owned, int rank, int world_size) {
    owned.add_sharded(weight, by_rows(weight, world_size), rank);
    owned.add_whole(bias);
    owned.add_whole(head);
    owned.state.add_tensor(tied, owned.state.tensors().at(head.name).piece(0));
    owned.state.set_value("epoch", Json(int64_t{3}));
    owned.state.set_value("model.note", Json("saved"));
    owned.state.set_value(fmt::format("rank/{}/loader.position", rank), Json(int64_t{rank} + 100));
}

std::string bytes(const State& state, const std::string& name) {
    const StateTensor& tensor = state.tensors().at(name);
    std::string all;
    for (size_t i = 0; i < tensor.memory.size(); ++i) {
        const Tensor piece = tensor.piece(i);
        all.append(reinterpret_cast<const char*>(piece.data), piece.size_bytes());
    }
    return all;
}

class LoadNamesTest : public ::testing::Test {
   protected:
    static constexpr int saved_by = 2;

    LoadNamesTest() {
        const auto outcomes = run_meeting(saved_by, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            build(owned, comm->rank(), saved_by);
            owned.fill();
            Saver saver(comm, dir_.path(), saver_options());
            saver.save(1, owned.state);
        });
        for (const auto& outcome : outcomes) EXPECT_FALSE(outcome) << outcome->what();
        checkpoint_ = Checkpoint::open(dir_.path());
    }

    // Fails, and leaves the state as it was.
    Error refused(OwnedState& owned, const LoadOptions& options) {
        owned.poison();
        std::map<std::string, std::string> before;
        for (const auto& [name, tensor] : owned.state.tensors()) before[name] = bytes(owned.state, name);
        const Values values = owned.state.collect();
        Error error = error_of([&] { (void)checkpoint_->load(owned.state, options); });
        for (const auto& [name, content] : before) EXPECT_TRUE(bytes(owned.state, name) == content) << name;
        EXPECT_TRUE(owned.state.collect() == values);
        return error;
    }

    TempDir dir_;
    std::shared_ptr<const Checkpoint> checkpoint_;
};

void expect_nothing_allowed(const LoadReport& report) {
    EXPECT_THAT(report.missing, IsEmpty());
    EXPECT_THAT(report.unexpected, IsEmpty());
    EXPECT_TRUE(report.cast.empty());
}

// --- only ---

TEST_F(LoadNamesTest, WhatDoesNotFitIsNeitherLoadedNorMissingNorUnexpected) {
    OwnedState owned;
    build(owned, 0, 1);
    owned.add_whole({"model.decoder.weight", DType::f32, {4}});
    owned.state.set_value("epoch", Json(int64_t{9}));
    owned.poison();
    const std::string poisoned_head = bytes(owned.state, head.name);
    LoadOptions options;
    options.only = {"model.encoder.*", "model.note"};
    const LoadReport report = checkpoint_->load(owned.state, options);
    expect_nothing_allowed(report);
    EXPECT_THAT(report.left_alone,
                ElementsAre("model.decoder.weight", head.name, tied, "epoch", "rank/0/loader.position"));
    EXPECT_TRUE(report.verified);
    OwnedState whole;
    build(whole, 0, 1);
    whole.fill();
    for (const Spec& spec : {weight, bias}) {
        EXPECT_TRUE(bytes(owned.state, spec.name) == bytes(whole.state, spec.name)) << spec.name;
    }
    EXPECT_TRUE(bytes(owned.state, head.name) == poisoned_head);
    EXPECT_EQ(owned.state.value("epoch"), Json(int64_t{9}));
    EXPECT_EQ(owned.state.value("model.note"), Json("saved"));
}

TEST_F(LoadNamesTest, WhatFitsIsAsStrictAsEver) {
    OwnedState owned;
    owned.add_whole(called(weight.name, {"", DType::f32, {6, 10}}));
    owned.add_whole({"model.encoder.scale", DType::f32, {4}});
    LoadOptions options;
    options.only = {"model.encoder.*"};
    const Error error = refused(owned, options);
    EXPECT_EQ(error.code(), Code::mismatch);
    EXPECT_THAT(error.what(), HasSubstr("'model.encoder.weight': saved with shape [10, 6], the state has [6, 10]"));
    EXPECT_THAT(error.what(), HasSubstr("'model.encoder.scale' is missing"));
    EXPECT_THAT(error.what(), HasSubstr("'model.encoder.bias' is unexpected"));
    EXPECT_THAT(error.what(), HasSubstr("3 differences (to load what fits, choose names with `only`, or set "
                                        "allow_missing and allow_unexpected; a resume is always strict):\n"));
}

TEST_F(LoadNamesTest, APatternThatNoNameOfTheStateFitsIsNamed) {
    OwnedState owned;
    build(owned, 0, 1);
    LoadOptions options;
    options.only = {"model.*", "decoder.*", "model.head", "rank/*"};
    options.missing = options.unexpected = options.cast = Allow::yes;
    const Error error = refused(owned, options);
    EXPECT_EQ(error.code(), Code::mismatch);
    EXPECT_THAT(error.what(), HasSubstr("no name of the state matches 'decoder.*'"));
    EXPECT_THAT(error.what(), HasSubstr("no name of the state matches 'model.head'"));
    EXPECT_THAT(error.what(), HasSubstr("2 differences:\n")) << "no other advice";
}

TEST_F(LoadNamesTest, ANameThatLooksLikeAPatternFitsItself) {
    const TempDir dir;
    OwnedState owned;
    owned.add_whole({"layers[0]", DType::f32, {3}});
    owned.fill();
    Saver saver(nullptr, dir.path(), saver_options());
    saver.save(1, owned.state);
    owned.poison();
    LoadOptions options;
    options.only = {"layers[0]"};
    (void)Checkpoint::open(dir.path())->load(owned.state, options);
    EXPECT_EQ(owned.differences(), 0);
}

// --- rules ---

const std::vector<NameRule> rules{{"model.encoder.", "encoder."}, {head.name, "lm.weight"}, {tied, "output.weight"},
                                  {"epoch", "training.epoch"},    {"model.", "about."},     {"loader.", "data."}};

// The same under the names that the rules make, on a rank of any world.
void build_renamed(OwnedState& owned, int rank, int world_size) {
    const Spec as = called("encoder.weight", weight);
    owned.add_sharded(as, by_rows(as, world_size), rank);
    owned.add_whole(called("encoder.bias", bias));
    owned.add_whole(called("lm.weight", head));
    owned.add_whole(called("output.weight", head));  // not tied here
    owned.state.set_value("training.epoch", Json(int64_t{0}));
    owned.state.set_value("about.note", Json(""));
    owned.state.set_value(fmt::format("rank/{}/data.position", rank), Json(int64_t{-1}));
    owned.poison();
}

void expect_renamed(const OwnedState& owned, int rank, int world_size) {
    OwnedState expected;
    build(expected, rank, world_size);
    expected.fill();
    for (const auto& [here, saved] : std::map<std::string, std::string>{{"encoder.weight", weight.name},
                                                                        {"encoder.bias", bias.name},
                                                                        {"lm.weight", head.name},
                                                                        {"output.weight", head.name}}) {
        EXPECT_TRUE(bytes(owned.state, here) == bytes(expected.state, saved)) << here << " of rank " << rank;
    }
    EXPECT_EQ(owned.state.value("training.epoch"), Json(int64_t{3}));
    EXPECT_EQ(owned.state.value("about.note"), Json("saved"));
    // A rank that the save did not have keeps its own.
    EXPECT_EQ(owned.state.value(fmt::format("rank/{}/data.position", rank)), Json(int64_t{rank < 2 ? rank + 100 : -1}));
}

TEST_F(LoadNamesTest, TensorsTiedNamesAndValuesComeUnderOtherNamesAtAnyWorldSize) {
    for (const int world_size : {1, 3}) {
        for (int rank = 0; rank < world_size; ++rank) {
            OwnedState owned;
            build_renamed(owned, rank, world_size);
            LoadOptions options;
            options.rules = rules;
            expect_nothing_allowed(checkpoint_->load(owned.state, options));
            expect_renamed(owned, rank, world_size);
        }
    }
}

TEST_F(LoadNamesTest, DifferencesAreToldByTheNamesOfTheState) {
    OwnedState owned;
    build_renamed(owned, 0, 1);
    owned.add_whole({"encoder.scale", DType::f32, {2}});
    owned.add_whole({"decoder.bias", DType::f16, {5}});
    LoadOptions options;
    options.rules = {{bias.name, "decoder.bias"}};
    options.rules.insert(options.rules.end(), rules.begin(), rules.end() - 2);  // without the note and the positions
    options.missing = options.unexpected = options.cast = Allow::yes;
    const LoadReport report = checkpoint_->load(owned.state, options);
    EXPECT_THAT(report.missing, ElementsAre("encoder.bias", "encoder.scale", "about.note", "rank/0/data.position"));
    EXPECT_THAT(report.unexpected, ElementsAre("model.note"));
    EXPECT_EQ(report.json().dump(),
              R"({"missing":["encoder.bias","encoder.scale","about.note","rank/0/data.position"],)"
              R"("unexpected":["model.note"],"cast":[{"name":"decoder.bias","from":"f64","to":"f16"}],)"
              R"("left_alone":[],"verified":true})");
    options.missing = options.unexpected = options.cast = Allow::no;
    const Error error = refused(owned, options);
    EXPECT_THAT(error.what(), HasSubstr("'encoder.scale' is missing"));
    EXPECT_THAT(error.what(), HasSubstr("'model.note' is unexpected"));
    EXPECT_THAT(error.what(), HasSubstr("'decoder.bias': saved as f64, the state has f16"));
}

TEST_F(LoadNamesTest, ARuleAndAPatternMeetAtTheNameOfTheState) {
    OwnedState owned;
    build_renamed(owned, 0, 1);
    LoadOptions options;
    options.rules = rules;
    options.only = {"lm.*", "rank/*/data.*"};
    expect_nothing_allowed(checkpoint_->load(owned.state, options));
    OwnedState expected;
    expected.add_whole(head);
    expected.fill();
    EXPECT_TRUE(bytes(owned.state, "lm.weight") == bytes(expected.state, head.name));
    EXPECT_FALSE(bytes(owned.state, "output.weight") == bytes(expected.state, head.name));
    EXPECT_EQ(owned.state.value("rank/0/data.position"), Json(int64_t{100}));
    EXPECT_EQ(owned.state.value("training.epoch"), Json(int64_t{0}));
}

TEST(LoadNames, OfRulesTheFirstThatFitsCounts) {
    const Manifest manifest;
    const auto here = [&](const std::vector<NameRule>& given, const std::string& saved) {
        return LoadNames(manifest, {}, given).here(saved);
    };
    const NameRule exact{"a.b.w", "exact"};
    const NameRule near{"a.b.", "near."};
    const NameRule far{"a.", "far."};
    const NameRule all{"", "all."};
    EXPECT_EQ(here({exact, near, far, all}, "a.b.w"), "exact");
    EXPECT_EQ(here({near, exact, far, all}, "a.b.w"), "near.w");
    EXPECT_EQ(here({far, near, exact, all}, "a.b.w"), "far.b.w");
    EXPECT_EQ(here({all, far, near, exact}, "a.b.w"), "all.a.b.w");
    EXPECT_EQ(here({near, {"a.b.", "second."}}, "a.b.w"), "near.w");
    EXPECT_EQ(here({exact, near}, "a.b"), "a.b");
    EXPECT_EQ(here({exact}, "a.b.w.x"), "a.b.w.x");
    EXPECT_EQ(here({{"a.", ""}}, "a.a.w"), "a.w");
    EXPECT_EQ(here({{"a.", ""}}, "rank/12/a.w"), "rank/12/w");
    EXPECT_EQ(here({all}, "rank/0/a.w"), "rank/0/all.a.w");
    EXPECT_EQ(here({}, "rank/0/a.w"), "rank/0/a.w");
}

TEST_F(LoadNamesTest, NamesThatWouldBeOneAreRefusedAndBothAreTold) {
    struct Row {
        std::vector<NameRule> rules;
        const char* first;
        const char* second;
    };
    const Row rows[] = {
        {{{head.name, weight.name}},
         "'model.encoder.weight' and 'model.head.weight'",
         "be named 'model.encoder.weight'"},
        {{{tied, "x"}, {head.name, "x"}}, "'model.head.weight' and 'model.tied.weight'", "be named 'x'"},
        {{{"epoch", head.name}}, "'model.head.weight' and 'epoch'", "be named 'model.head.weight'"},
        {{{"epoch", "model.note"}}, "'epoch' and 'model.note'", "be named 'model.note'"},
    };
    OwnedState owned;
    build(owned, 0, 1);
    LoadOptions options;
    options.missing = options.unexpected = options.cast = Allow::yes;
    for (const Row& row : rows) {
        options.rules = row.rules;
        const Error error = refused(owned, options);
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_THAT(error.what(), HasSubstr(row.first));
        EXPECT_THAT(error.what(), HasSubstr(row.second));
    }
    // What the load is not about may meet.
    options.rules = {{"epoch", head.name}};
    options.only = {"model.encoder.*"};
    expect_nothing_allowed(checkpoint_->load(owned.state, options));
}

TEST_F(LoadNamesTest, WhatIsNoNameIsRefused) {
    OwnedState owned;
    build(owned, 0, 1);
    struct Row {
        std::vector<std::string> only;
        std::vector<NameRule> rules;
        const char* told;
    };
    const Row rows[] = {
        {{""}, {}, "a name pattern is empty"},
        {{"model.*", "\xff*"}, {}, "a name pattern is not UTF-8"},
        {{std::string(1025, 'a')}, {}, "1025 bytes"},
        {{}, {{"\xff", "a"}}, "a name in a rule is not UTF-8"},
        {{}, {{"a", "\xc3"}}, "a name in a rule is not UTF-8"},
        {{}, {{"a\n", "b"}}, "a name in a rule contains a control character"},
        {{}, {{"model.", "encoder"}}, "the rule 'model.' -> 'encoder'"},
        {{}, {{"epoch", "training."}}, "the rule 'epoch' -> 'training.'"},
        {{}, {{"epoch", ""}}, "the rule 'epoch' -> ''"},
        {{}, {{"", "model"}}, "the rule '' -> 'model'"},
    };
    for (const Row& row : rows) {
        LoadOptions options;
        options.only = row.only;
        options.rules = row.rules;
        const Error error = refused(owned, options);
        EXPECT_EQ(error.code(), Code::invalid_argument) << row.told;
        EXPECT_THAT(error.what(), HasSubstr(row.told));
    }
}

// --- ranks together ---

Outcomes run_with_comm(int world_size, const RankBody& body) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    return run_threads(world_size,
                       [&](int rank) { body(Communicator::create(store, rank, world_size, test_options())); });
}

TEST_F(LoadNamesTest, RanksThatLoadTogetherMayWantOtherNames) {
    expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        LoadOptions options;
        options.comm = comm;
        options.least_shared_bytes = 1;
        OwnedState owned;
        if (comm->rank() == 0) {
            build(owned, 0, 1);
            owned.poison();
            options.only = {head.name, "epoch"};
            expect_nothing_allowed(checkpoint_->load(owned.state, options));
            OwnedState expected;
            expected.add_whole(head);
            expected.fill();
            EXPECT_TRUE(bytes(owned.state, head.name) == bytes(expected.state, head.name));
        } else {
            build_renamed(owned, comm->rank(), 3);
            options.rules = rules;
            expect_nothing_allowed(checkpoint_->load(owned.state, options));
            expect_renamed(owned, comm->rank(), 3);
        }
    }));
}

TEST_F(LoadNamesTest, NamesThatOneRankCannotLoadFailAll) {
    struct Row {
        std::vector<std::string> only;
        std::vector<NameRule> rules;
        Code code;
        const char* told;
    };
    const Row rows[] = {{{"nope.*"}, {}, Code::mismatch, "no name of the state matches 'nope.*'"},
                        {{"\xff"}, {}, Code::invalid_argument, "not UTF-8"},
                        {{}, {{"epoch", "model.note"}}, Code::invalid_argument, "'epoch' and 'model.note'"}};
    for (const Row& row : rows) {
        const auto outcomes = run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            build(owned, comm->rank(), 3);
            LoadOptions options;
            options.comm = comm;
            if (comm->rank() == 1) {
                options.only = row.only;
                options.rules = row.rules;
            }
            (void)checkpoint_->load(owned.state, options);
        });
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), row.code) << outcome->what();
            EXPECT_THAT(outcome->what(), HasSubstr("rank 1: "));
            EXPECT_THAT(outcome->what(), HasSubstr(row.told));
        }
    }
}

// --- what was verified, and other formats ---

TEST_F(LoadNamesTest, ALoadThatWasNotVerifiedSaysSo) {
    OwnedState owned;
    build(owned, 0, 1);
    LoadOptions options;
    EXPECT_TRUE(checkpoint_->load(owned.state, options).verified);
    options.verify = Verify::none;
    EXPECT_FALSE(checkpoint_->load(owned.state, options).verified);
}

const std::string golden = source_dir() + "/tests/golden/torch_dcp/2.15.0";

// What tests/golden/torch_dcp/make.py wrote, under names without the model.
LoadReport load_of_pytorch(const std::string& path, Verify verify = Verify::blocks) {
    std::vector<float> memory(35);
    State state;
    state.add_tensor("rows", {reinterpret_cast<std::byte*>(memory.data()), {7, 5}, DType::f32, {}});
    state.set_value("steps", Json(int64_t{0}));
    LoadOptions options;
    options.only = {"rows", "steps"};
    options.rules = {{"model.", ""}, {"step", "steps"}};
    options.verify = verify;
    LoadReport report = Checkpoint::open(path)->load(state, options);
    for (size_t i = 0; i < memory.size(); ++i) EXPECT_EQ(memory[i], static_cast<float>(i));
    EXPECT_EQ(state.value("steps"), Json(int64_t{7}));
    expect_nothing_allowed(report);
    return report;
}

TEST(LoadNames, OfPyTorchsFilesAreChosenAndRenamedToo) {
    for (const char* file : {"/dcp", "/save.pt"}) {
        EXPECT_TRUE(load_of_pytorch(golden + file).verified) << file;
        EXPECT_FALSE(load_of_pytorch(golden + file, Verify::none).verified) << file;
    }
}

// As torch.serialization.set_crc32_options(False) has it.
TEST(LoadNames, AnArchiveWithoutChecksumsIsNotVerified) {
    std::string text = slurp(golden + "/save.pt");
    for (const auto& [signature, crc] :
         std::map<std::string, size_t>{{"PK\x01\x02", 16}, {"PK\x03\x04", 14}, {"PK\x07\x08", 4}}) {
        for (size_t at = text.find(signature); at != std::string::npos; at = text.find(signature, at + 1)) {
            text.replace(at + crc, 4, 4, '\0');
        }
    }
    const TempDir dir;
    spill(dir / "save.pt", text);
    EXPECT_FALSE(load_of_pytorch(dir / "save.pt").verified);
    const auto checkpoint = Checkpoint::open(dir / "save.pt");
    EXPECT_TRUE(checkpoint->verify(Checkpoint::Depth::everything).empty());
    EXPECT_FALSE(checkpoint->has_checksums());
}

TEST(LoadNames, OfSafetensorsAreChosenAndRenamedToo) {
    const TempDir dir;
    const std::vector<float> numbers{1, 2, 3};
    spill(dir / "m.safetensors",
          safetensors_file({{"model.w", "F32", "[3]", bytes_of(numbers), ""}, {"model.fp4", "F4", "[4]", "ab", ""}}));
    const auto checkpoint = Checkpoint::open(dir / "m.safetensors");
    std::vector<float> memory(3);
    std::byte byte{};
    State state;
    state.add_tensor("w", tensor_of(std::span(memory), DType::f32));
    LoadOptions options;
    options.rules = {{"model.", ""}};
    const Error unexpected = error_of([&] { (void)checkpoint->load(state, options); });
    EXPECT_THAT(unexpected.what(), HasSubstr("'fp4' is unexpected"));
    options.only = {"w"};
    expect_nothing_allowed(checkpoint->load(state, options));
    options.only.clear();
    state.add_tensor("fp4", {&byte, {1}, DType::u8, {}});
    options.missing = options.unexpected = Allow::yes;
    const Error unreadable = error_of([&] { (void)checkpoint->load(state, options); });
    EXPECT_THAT(unreadable.what(), HasSubstr("'fp4' cannot be read: "));
    options.missing = options.unexpected = Allow::no;
    options.only = {"w"};
    const LoadReport report = checkpoint->load(state, options);
    expect_nothing_allowed(report);
    EXPECT_FALSE(report.verified);
    EXPECT_EQ(memory, numbers);
}

}  // namespace
}  // namespace tsr::testing
