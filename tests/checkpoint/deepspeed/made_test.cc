// Forms that DeepSpeed writes on GPUs alone (integer steps, flat vectors without ZeRO), and files that contradict
// themselves or are hostile, made here: what is sound is read, and the rest is refused with its reason.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>

#include "checkpoint/formats/deepspeed/layout.hpp"
#include "checkpoint/formats/torch_dcp/archive_writer.hpp"
#include "written.hpp"

namespace tsr::testing {
namespace {

// Writes one torch.save archive.
struct Made {
    pickle::PickleWriter out;
    std::vector<std::string> storages;
};
using Put = std::function<void(Made&)>;
using Entries = std::vector<std::pair<std::string, Put>>;

Put number(int64_t value) {
    return [=](Made& made) { made.out.integer(value); };
}
Put none() {
    return [](Made& made) { made.out.none(); };
}
Put text(std::string value) {
    return [=](Made& made) { made.out.text(value); };
}
Put list(std::vector<Put> items) {
    return [=](Made& made) {
        made.out.empty_list();
        made.out.mark();
        for (const Put& item : items) item(made);
        made.out.appends();
    };
}
Put numbers(std::vector<int64_t> values) {
    std::vector<Put> items;
    for (const int64_t value : values) items.push_back(number(value));
    return list(items);
}
Put dict(Entries entries) {
    return [=](Made& made) {
        made.out.empty_dict();
        made.out.mark();
        for (const auto& [key, value] : entries) {
            made.out.text(key);
            value(made);
        }
        made.out.setitems();
    };
}
Put by_number(std::vector<Put> values) {
    return [=](Made& made) {
        made.out.empty_dict();
        made.out.mark();
        for (size_t i = 0; i < values.size(); ++i) {
            made.out.integer(static_cast<int64_t>(i));
            values[i](made);
        }
        made.out.setitems();
    };
}
Put tensor(const Dims& shape, std::vector<float> values) {
    return [=](Made& made) {
        put_tensor(made.out, DType::f32, shape, made.storages.size());
        made.storages.emplace_back(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    };
}
Put vector(std::vector<float> values) { return tensor(Dims{static_cast<int64_t>(values.size())}, values); }
Put counted(int64_t first, int64_t count) {
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(first + i));
    return vector(values);
}
Put call(std::string module, std::string name, std::string argument) {
    return [=](Made& made) {
        made.out.global(module, name);
        made.out.text(argument);
        made.out.tuple1();
        made.out.reduce();
    };
}

void save(const std::string& path, const Put& object) {
    Made made;
    object(made);
    ZipWriter zip("archive", 0);
    begin_archive(zip, made.out.finish());
    for (size_t i = 0; i < made.storages.size(); ++i) zip.add(storage_entry(i), made.storages[i]);
    end_archive(zip);
    zip.finish();
    spill(path, zip.take_text());
}

// Replaces entries, or adds them.
Entries with(Entries entries, const Entries& changes) {
    for (const auto& [key, value] : changes) {
        const auto found = std::ranges::find(entries, key, &Entries::value_type::first);
        if (found == entries.end()) {
            entries.emplace_back(key, value);
        } else {
            found->second = value;
        }
    }
    return entries;
}

// Two ranks, stage 2: "a" has 3 elements and "b" 2 x 2, which makes 7 in a vector of 8. The parameters are 0, 1, ...
// and exp_avg 10, 11, ...
Entries model(const Entries& changes = {}) {
    return with(
        {{"module", dict({{"a", vector({9, 9, 9})}, {"b", tensor({2, 2}, {9, 9, 9, 9})}, {"mask", vector({1})}})},
         {"buffer_names", list({text("mask")})},
         {"optimizer", none()},
         {"param_shapes", list({dict({{"a", numbers({3})}, {"b", numbers({2, 2})}})})},
         {"shared_params", dict({})},
         {"global_steps", number(4)},
         {"dp_world_size", number(2)},
         {"mp_world_size", number(1)}},
        changes);
}
Put settings(const Entries& more = {}) {
    return list({dict(with({{"lr", number(1)}, {"params", numbers({0})}}, more))});
}
Entries optimizer(int rank, const Entries& changes = {}) {
    const Put state = dict({{"step", number(5)}, {"exp_avg", counted(10 + 4 * rank, 4)}});
    return with({{"zero_stage", number(2)},
                 {"partition_count", numbers({2})},
                 {"single_partition_of_fp32_groups", list({counted(4 * rank, rank == 0 ? 4 : 3)})},
                 {"base_optimizer_state", dict({{"state", by_number({state})}, {"param_groups", settings()}})}},
                changes);
}
std::string optimizer_name(int rank) { return fmt::format("zero_pp_rank_{}_mp_rank_00_optim_states.pt", rank); }

class MadeDeepSpeed : public ::testing::Test {
   protected:
    void put_model(const Entries& changes = {}) { save(dir_ / "mp_rank_00_model_states.pt", dict(model(changes))); }
    void put_optimizer(int rank, const Entries& changes = {}) {
        save(dir_ / optimizer_name(rank), dict({{"optimizer_state_dict", dict(optimizer(rank, changes))}}));
    }
    void put_all(const Entries& of_model = {}, const Entries& of_optimizer = {}) {
        put_model(of_model);
        for (const int rank : {0, 1}) put_optimizer(rank, of_optimizer);
    }
    // Of a model without ZeRO.
    void put_whole(const Put& optimizer, const Entries& changes = {}) {
        put_model(with({{"param_shapes", none()}, {"shared_params", none()}, {"optimizer", optimizer}}, changes));
    }
    [[nodiscard]] std::shared_ptr<const Checkpoint> open() const { return Checkpoint::open(dir_.path()); }
    void expect_refused(Code code, const std::string& why) {
        const Error error = error_of([&] { (void)open(); });
        EXPECT_EQ(error.code(), code) << error.what();
        EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << why << " in: " << error.what();
        EXPECT_NE(std::string(error.what()).find("states.pt"), std::string::npos) << error.what();
    }
    void expect_tensor(const Checkpoint& checkpoint, const std::string& name, const Dims& shape,
                       const std::vector<float>& values) {
        const SavedTensor* saved = checkpoint.manifest().find(name);
        ASSERT_NE(saved, nullptr) << name;
        EXPECT_EQ(saved->shape, shape) << name;
        EXPECT_EQ(bytes_of(checkpoint, name),
                  std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)))
            << name;
    }
    TempDir dir_;
};

TEST_F(MadeDeepSpeed, AStepThatIsANumberIsATensor) {
    put_all();
    const auto checkpoint = open();
    expect_tensor(*checkpoint, "model.a", {3}, {0, 1, 2});
    expect_tensor(*checkpoint, "model.b", {2, 2}, {3, 4, 5, 6});
    expect_tensor(*checkpoint, "optim.state.a.exp_avg", {3}, {10, 11, 12});
    expect_tensor(*checkpoint, "optim.state.b.exp_avg", {2, 2}, {13, 14, 15, 16});
    expect_tensor(*checkpoint, "optim.state.a.step", {}, {5});
    expect_tensor(*checkpoint, "optim.state.b.step", {}, {5});
    expect_tensor(*checkpoint, "model.mask", {1}, {1});
    EXPECT_EQ(checkpoint->manifest().step, 4);
    EXPECT_EQ(checkpoint->manifest().values.at("optim.param_groups.0.lr").as_int(), 1);
    EXPECT_FALSE(checkpoint->manifest().values.contains("optim.param_groups.0.params"));
    EXPECT_TRUE(checkpoint->verify(Depth::everything).empty());
}

TEST_F(MadeDeepSpeed, AStepOfTheGroupIsOneOfItsParameters) {
    put_model();
    for (const int rank : {0, 1}) {
        const Put state = dict({{"exp_avg", counted(10 + 4 * rank, 4)}});
        put_optimizer(rank, {{"base_optimizer_state", dict({{"state", by_number({state})},
                                                            {"param_groups", settings({{"step", number(6)}})}})}});
    }
    expect_tensor(*open(), "optim.state.b.step", {}, {6});
}

TEST_F(MadeDeepSpeed, ElasticStatesAreRead) {
    put_model();
    for (const int rank : {0, 1}) {
        const Put state = dict({{"exp_avg", counted(10 + 4 * rank, rank == 0 ? 4 : 3)}});
        put_optimizer(rank, {{"base_optimizer_state", list({state})}, {"base_optimizer_state_step", number(7)}});
    }
    const auto checkpoint = open();
    expect_tensor(*checkpoint, "optim.state.b.exp_avg", {2, 2}, {13, 14, 15, 16});
    expect_tensor(*checkpoint, "optim.state.a.step", {}, {7});
}

TEST_F(MadeDeepSpeed, AnOptimizerThatHasNotSteppedHasNoMoments) {
    put_all({}, {{"base_optimizer_state", dict({{"state", dict({})}, {"param_groups", settings()}})}});
    const auto checkpoint = open();
    expect_tensor(*checkpoint, "model.a", {3}, {0, 1, 2});
    for (const auto& [name, tensor] : checkpoint->manifest().tensors) EXPECT_TRUE(name.starts_with("model.")) << name;
}

TEST_F(MadeDeepSpeed, PaddingAfterAParameterIsSkipped) {
    put_model();
    // "a", one element of padding, and "b", in two partitions of four.
    for (const int rank : {0, 1}) {
        put_optimizer(rank, {{"single_partition_of_fp32_groups", list({counted(4 * rank, 4)})},
                             {"param_alignment_paddings", list({numbers({1, 0})})}});
    }
    const auto checkpoint = open();
    expect_tensor(*checkpoint, "model.a", {3}, {0, 1, 2});
    expect_tensor(*checkpoint, "model.b", {2, 2}, {4, 5, 6, 7});
    expect_tensor(*checkpoint, "optim.state.b.exp_avg", {2, 2}, {14, 15, 16, 17});
    for (const int64_t padding : {int64_t{-1}, int64_t{1} << 62}) {
        put_optimizer(0, {{"param_alignment_paddings", list({numbers({padding, 0})})}});
        expect_refused(Code::corrupt, fmt::format("a padding of {}", padding));
    }
    put_optimizer(0, {{"param_alignment_paddings", list({numbers({1})})}});
    expect_refused(Code::corrupt, "not those of group 0's 2 parameters");
}

TEST_F(MadeDeepSpeed, WithoutZeROAFlatVectorIsCutByTheModel) {
    const Put state = dict({{"step", number(3)}, {"exp_avg", counted(20, 7)}});
    const auto put = [&](const Put& flats) {
        put_whole(dict({{"optimizer_state_dict", dict({{"state", by_number({state})}, {"param_groups", settings()}})},
                        {"fp32_groups_flat", flats}}));
    };
    put(list({counted(0, 7)}));
    const auto checkpoint = open();
    expect_tensor(*checkpoint, "model.b", {2, 2}, {3, 4, 5, 6});
    expect_tensor(*checkpoint, "optim.state.b.exp_avg", {2, 2}, {23, 24, 25, 26});
    expect_tensor(*checkpoint, "optim.state.a.step", {}, {3});
    expect_tensor(*checkpoint, "model.mask", {1}, {1});
    put(list({counted(0, 3), counted(3, 4)}));
    expect_refused(Code::unsupported, "its fp32 parameters cannot be found");
    put(list({counted(0, 8)}));
    expect_refused(Code::unsupported, "its fp32 parameters cannot be found");
}

TEST_F(MadeDeepSpeed, WithoutZeROShapesSayWhichParametersTheStatesHave) {
    const auto put = [&](const Put& module) {
        const Put state = dict({{"step", tensor({}, {3})}, {"exp_avg", counted(20, 3)}});
        put_whole(dict({{"state", by_number({state})}, {"param_groups", settings()}}), {{"module", module}});
    };
    put(dict({{"a", vector({1, 2, 3})}, {"frozen", tensor({2, 2}, {4, 5, 6, 7})}, {"mask", vector({1})}}));
    const auto checkpoint = open();
    expect_tensor(*checkpoint, "optim.state.a.exp_avg", {3}, {20, 21, 22});
    expect_tensor(*checkpoint, "optim.state.a.step", {}, {3});
    expect_tensor(*checkpoint, "model.frozen", {2, 2}, {4, 5, 6, 7});
    EXPECT_TRUE(checkpoint->manifest().unreadable.empty());
    // Either may be the frozen one.
    put(dict({{"a", vector({1, 2, 3})}, {"frozen", vector({4, 5, 6})}, {"mask", vector({1})}}));
    const auto unclear = open();
    expect_tensor(*unclear, "model.a", {3}, {1, 2, 3});
    EXPECT_EQ(unclear->manifest().find("optim.state.a.exp_avg"), nullptr);
    EXPECT_TRUE(unclear->manifest().unreadable.contains("optim.state"));
}

TEST_F(MadeDeepSpeed, PartitionsThatDoNotFitTheParametersAreRefused) {
    put_all();
    put_optimizer(1, {{"single_partition_of_fp32_groups", list({counted(4, 2)})}});
    expect_refused(Code::corrupt, "group 0 has 6 elements in all ranks' files, but parameter 'b' ends at element 7");
    put_optimizer(1, {{"single_partition_of_fp32_groups", list({counted(4, 7)})}});
    expect_refused(Code::corrupt, "group 0 has 11 elements in all ranks' files, but its parameters have 7");
    put_optimizer(1, {{"single_partition_of_fp32_groups", list({})}});
    expect_refused(Code::corrupt, "it has 0 groups of parameters, but mp_rank_00_model_states.pt has 1");
    put_optimizer(1, {{"single_partition_of_fp32_groups", list({tensor({1, 3}, {4, 5, 6})})}});
    expect_refused(Code::corrupt, "a partition has the shape");
    put_optimizer(1, {{"single_partition_of_fp32_groups", list({text("x")})}});
    expect_refused(Code::corrupt, "a tensor");
    put_optimizer(1, {{"partition_count", numbers({3})}});
    expect_refused(Code::corrupt, "cut for 3 ranks, but 2 saved");
}

TEST_F(MadeDeepSpeed, StatesThatDoNotFitAreRefusedOrLeftOut) {
    put_all();
    put_optimizer(1, {{"base_optimizer_state",
                       dict({{"state", by_number({dict({{"step", number(5)}})})}, {"param_groups", settings()}})}});
    expect_refused(Code::corrupt, "its optimizer has no 'exp_avg'");
    put_optimizer(1, {{"base_optimizer_state", dict({{"state", dict({})}, {"param_groups", list({})}})}});
    expect_refused(Code::corrupt, "its optimizer has no tensor 0 in group 0");
    // Optimizers of other kinds may keep anything.
    const Put state =
        dict({{"exp_avg", counted(10, 2)}, {"kind", text("x")}, {"factor", tensor({2, 2}, {1, 2, 3, 4})}});
    put_all({}, {{"base_optimizer_state", dict({{"state", by_number({state})}, {"param_groups", settings()}})}});
    const auto checkpoint = open();
    expect_tensor(*checkpoint, "model.a", {3}, {0, 1, 2});
    for (const char* name : {"optim.state.a.exp_avg", "optim.state.b.kind", "optim.state.b.factor"}) {
        EXPECT_TRUE(checkpoint->manifest().unreadable.contains(name)) << name;
    }
}

TEST_F(MadeDeepSpeed, ParametersThatContradictEachOtherAreRefused) {
    const auto expect = [&](const Put& shapes, const std::string& why) {
        put_all({{"param_shapes", shapes}}, {});
        expect_refused(Code::corrupt, why);
    };
    expect(list({dict({{"a", numbers({3})}, {"a", numbers({4})}})}), "two parameters are called 'a'");
    expect(list({dict({{"a\n", numbers({3})}, {"b", numbers({4})}})}), "name");
    expect(list({dict({{"a", numbers({-3})}})}), "-3");
    expect(list({dict({{"a", numbers({int64_t{1} << 62, 1 << 10})}})}), "parameter 'a'");
    expect(list({dict({{"a", text("x")}})}), "a size");
    expect(dict({}), "a list");
    put_all({{"shared_params", dict({{"a", text("b")}})}});
    expect_refused(Code::corrupt, "two objects have the name 'model.a'");
}

TEST_F(MadeDeepSpeed, OtherParallelismIsRefused) {
    put_all({{"mp_world_size", number(2)}});
    expect_refused(Code::unsupported, "2 model-parallel ranks");
    put_all({{"ds_autoep_layers", list({dict({})})}});
    expect_refused(Code::unsupported, "experts");
    put_all({{"dp_world_size", number(-1)}});
    expect_refused(Code::corrupt, "dp_world_size is -1");
    put_all({{"module", none()}});
    expect_refused(Code::corrupt, "it has no 'module'");
}

TEST_F(MadeDeepSpeed, ClassesAreNeverImported) {
    const std::string witness = dir_ / "witness";
    const Put attack = call("os", "system", "touch " + witness);
    put_all({{"epoch", number(2)}, {"evil", attack}, {"lr_scheduler", dict({{"last", number(1)}, {"evil", attack}})}},
            {{"loss_scaler", attack}});
    const auto checkpoint = open();
    EXPECT_EQ(checkpoint->manifest().values.at("client_state.epoch").as_int(), 2);
    EXPECT_EQ(checkpoint->manifest().values.at("lr_scheduler.last").as_int(), 1);
    for (const char* name : {"client_state.evil", "lr_scheduler.evil"}) {
        const auto found = checkpoint->manifest().unreadable.find(name);
        ASSERT_NE(found, checkpoint->manifest().unreadable.end()) << name;
        EXPECT_NE(found->second.find("os.system"), std::string::npos) << found->second;
    }
    put_all({{"param_shapes", attack}});
    expect_refused(Code::corrupt, "a list");
    put_all({}, {{"partition_count", attack}});
    expect_refused(Code::corrupt, "a list");
    EXPECT_FALSE(std::filesystem::exists(witness));
}

TEST(DeepSpeedLayout, RangesAreFoundInPartitions) {
    const std::vector<int64_t> ends{4, 4, 6, 9};
    const auto found = partitions_of(ends, {3, 8});
    ASSERT_EQ(found.size(), 3u);
    const auto expect = [&](size_t i, FlatRange wanted) {
        EXPECT_EQ(std::tuple(found[i].partition, found[i].begin, found[i].count, found[i].first),
                  std::tuple(wanted.partition, wanted.begin, wanted.count, wanted.first));
    };
    expect(0, {0, 3, 1, 0});
    expect(1, {2, 0, 2, 1});
    expect(2, {3, 0, 2, 3});
    EXPECT_TRUE(partitions_of(ends, {4, 4}).empty());
    EXPECT_EQ(partitions_of(ends, {4, 5})[0].partition, 2u);
}

TEST(DeepSpeedLayout, OnlyTheOneWayIsTaken) {
    const Dims two{2};
    const Dims three{3};
    using Some = std::vector<std::optional<Dims>>;
    const auto places = [](const Some& some, const std::vector<Dims>& all) { return places_by_shape(some, all); };
    EXPECT_EQ(places({two, three}, {two, three}), (std::vector<size_t>{0, 1}));
    EXPECT_EQ(places({three, two}, {three, three, two}), std::nullopt);
    EXPECT_EQ(places({two, three}, {three, two, two, three}), std::nullopt);
    EXPECT_EQ(places({two, two, three}, {three, two, two, three}), (std::vector<size_t>{1, 2, 3}));
    EXPECT_EQ(places({std::nullopt, std::nullopt}, {two, three}), (std::vector<size_t>{0, 1}));
    EXPECT_EQ(places({std::nullopt}, {two, three}), std::nullopt);
    EXPECT_EQ(places({three}, {two}), std::nullopt);
    EXPECT_EQ(places({}, {two}), std::vector<size_t>{});
}

}  // namespace
}  // namespace tsr::testing
