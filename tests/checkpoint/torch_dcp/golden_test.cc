// Files that real PyTorch versions wrote (tests/golden/torch_dcp/make.py), read to the last bit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <list>
#include <map>

#include "checkpoint/fixture.hpp"
#include "places.hpp"
#include "tensor/convert.hpp"

namespace tsr::testing {
namespace {

const std::string golden = tsr::testing::source_dir() + "/tests/golden/torch_dcp";

std::vector<std::string> versions() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(golden)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("2.")) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
}

// The tensor's elements in row-major order, as doubles.
std::vector<double> read(const Checkpoint& checkpoint, const std::string& name, const Dims& shape, DType dtype) {
    std::vector<std::byte> memory(static_cast<size_t>(shape.product()) * size_of(dtype) + 1);
    checkpoint.read(name, {memory.data(), shape, dtype, {}});
    std::vector<double> numbers(static_cast<size_t>(shape.product()));
    for (size_t i = 0; i < numbers.size(); ++i) {
        const std::byte* element = memory.data() + i * size_of(dtype);
        if (is_floating(dtype)) {
            convert(element, dtype, reinterpret_cast<std::byte*>(&numbers[i]), DType::f64, 1);
        } else {
            int64_t number = 0;
            std::memcpy(&number, element, size_of(dtype));
            numbers[i] = static_cast<double>(number);
        }
    }
    return numbers;
}

std::vector<double> counted(int n) {
    std::vector<double> numbers(static_cast<size_t>(n));
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i);
    return numbers;
}

class Golden : public ::testing::TestWithParam<std::string> {
   protected:
    static void expect_common(const Checkpoint& checkpoint) {
        EXPECT_EQ(read(checkpoint, "model.rows", {7, 5}, DType::f32), counted(35));
        EXPECT_EQ(read(checkpoint, "model.half", {6}, DType::f16), counted(6));
        EXPECT_EQ(read(checkpoint, "model.brain", {2, 3}, DType::bf16), counted(6));
        EXPECT_EQ(read(checkpoint, "model.transposed", {4, 3}, DType::f64),
                  (std::vector<double>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}));
        EXPECT_EQ(read(checkpoint, "model.scalar", {}, DType::i64), std::vector<double>{-3});
        EXPECT_EQ(read(checkpoint, "model.mask", {3}, DType::boolean), (std::vector<double>{1, 0, 1}));
        EXPECT_EQ(read(checkpoint, "model.empty", {0, 5}, DType::f32), std::vector<double>{});
        const Values& values = checkpoint.manifest().values;
        EXPECT_EQ(values.at("step").dump(), "7");
        EXPECT_EQ(values.at("lr").dump(), "0.5");
        EXPECT_EQ(values.at("note").as_string(), "größer");
        EXPECT_EQ(values.at("pair").dump(), R"({"~":"tuple","v":[1,[2,null]]})");
        EXPECT_EQ(values.at("config.deep.flag").dump(), "true");
        EXPECT_TRUE(checkpoint.manifest().unreadable.empty());
        EXPECT_TRUE(checkpoint.verify(Checkpoint::Depth::everything).empty());
        EXPECT_EQ(checkpoint.manifest().step, -1);
    }
};

TEST_P(Golden, TheDistributedCheckpointIsRead) {
    const auto checkpoint = Checkpoint::open(golden + "/" + GetParam() + "/dcp");
    expect_common(*checkpoint);
    EXPECT_EQ(checkpoint->manifest().format, "torch_dcp");
    EXPECT_EQ(checkpoint->manifest().world_size, 2);
    EXPECT_EQ(checkpoint->manifest().find("model.rows")->pieces.size(), 2u);
    EXPECT_EQ(read(*checkpoint, "model.columns", {3, 5}, DType::f32), counted(15));
    EXPECT_EQ(read(*checkpoint, "model.copies", {4}, DType::f32), counted(4));
    EXPECT_EQ(checkpoint->names().size(), 9u);
}

TEST_P(Golden, TheSavedFileIsRead) {
    const auto checkpoint = Checkpoint::open(golden + "/" + GetParam() + "/save.pt");
    expect_common(*checkpoint);
    EXPECT_EQ(checkpoint->manifest().format, "torch_save");
    EXPECT_EQ(read(*checkpoint, "model.shared", {2, 5}, DType::f32),
              (std::vector<double>{10, 11, 12, 13, 14, 15, 16, 17, 18, 19}));
    EXPECT_EQ(read(*checkpoint, "model.parameter", {3}, DType::f32), counted(3));
}

// Any box of any tensor, through both ways of reading and with a conversion.
TEST_P(Golden, EveryBoxOfTensorsIsRead) {
    for (const char* file : {"/dcp", "/save.pt"}) {
        const auto checkpoint = Checkpoint::open(golden + "/" + GetParam() + file);
        for (const std::string name : {"model.rows", "model.transposed"}) {
            const Dims shape = checkpoint->manifest().find(name)->shape;
            const DType dtype = checkpoint->manifest().find(name)->dtype;
            const std::vector<double> whole = read(*checkpoint, name, shape, dtype);
            for (int64_t r = 0; r < shape[0]; ++r) {
                for (int64_t c = 0; c < shape[1]; ++c) {
                    const Box box{{r, c}, {shape[0] - r, (shape[1] - c + 1) / 2}};
                    std::vector<float> piece(static_cast<size_t>(box.numel()), -1);
                    State state;
                    const Tensor tensor{reinterpret_cast<std::byte*>(piece.data()), box.sizes, DType::f32, {}};
                    const int count = 1;
                    state.add_sharded(name, Layout::from_boxes(shape, {&box, 1}, {&count, 1}), DType::f32, {&tensor, 1},
                                      0);
                    LoadOptions options;
                    options.unexpected = Allow::yes;
                    options.cast = Allow::yes;
                    options.verify = (r + c) % 2 == 0 ? Verify::blocks : Verify::none;
                    (void)checkpoint->load(state, options);
                    for (int64_t i = 0; i < box.numel(); ++i) {
                        const auto at = static_cast<size_t>((r + i / box.sizes[1]) * shape[1] + c + i % box.sizes[1]);
                        ASSERT_EQ(piece[static_cast<size_t>(i)], static_cast<float>(whole[at]))
                            << name << " " << box.str();
                    }
                }
            }
        }
    }
}

// --- models and optimizers under each way of spreading them: expected.json beside each checkpoint has its content ---

const std::vector<std::string> jobs{"ddp", "fsdp", "grid", "hsdp", "mesh", "plain", "tp", "uneven"};
// What a version of PyTorch cannot make; make.py says why.
const std::vector<std::string> cannot{"2.4.1/hsdp", "2.4.1/mesh", "2.4.1/uneven", "2.7.1/uneven"};

std::vector<std::string> models() {
    std::vector<std::string> names;
    for (const std::string& version : versions()) {
        for (const auto& entry : std::filesystem::directory_iterator(golden + "/" + version)) {
            const std::string job = entry.path().filename().string();
            if (job != "dcp" && job != "save.pt") names.push_back(version + "/" + job);
        }
    }
    std::sort(names.begin(), names.end());
    return names;
}

TEST(GoldenModels, AreThereOfEveryVersionThatCanMakeThem) {
    std::vector<std::string> expected;
    for (const std::string& version : versions()) {
        for (const std::string& job : jobs) {
            const std::string name = version + "/" + job;
            if (std::find(cannot.begin(), cannot.end(), name) == cannot.end()) expected.push_back(name);
        }
    }
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(models(), expected);
    EXPECT_EQ(versions(), (std::vector<std::string>{"2.11.0", "2.15.0", "2.4.1", "2.7.1"}));
}

// A tensor of expected.json, in the bytes of its dtype.
struct Content {
    DType dtype = DType::f32;
    Dims shape;
    std::vector<std::byte> bytes;

    explicit Content(const Json& told) : dtype(*dtype_from_safetensors(told.at("dtype").as_string())) {
        std::vector<int64_t> sizes;
        for (const Json& size : told.at("shape").as_array()) sizes.push_back(size.as_int());
        shape = Dims(sizes);
        for (const Json& number : told.at("numbers").as_array()) {
            const double as_double = number.as_double();
            const auto as_integer = static_cast<int64_t>(as_double);
            bytes.resize(bytes.size() + size_of(dtype));
            std::byte* element = bytes.data() + bytes.size() - size_of(dtype);
            if (is_floating(dtype)) {
                convert(reinterpret_cast<const std::byte*>(&as_double), DType::f64, element, dtype, 1);
            } else {
                std::memcpy(element, &as_integer, size_of(dtype));
            }
        }
    }
    [[nodiscard]] std::vector<std::byte> part(const Box& box) const {
        std::vector<std::byte> out;
        for (int64_t i = 0; i < box.numel(); ++i) {
            const std::byte* element = bytes.data() + static_cast<size_t>(place_in(box, shape, i)) * size_of(dtype);
            out.insert(out.end(), element, element + size_of(dtype));
        }
        return out;
    }
};

std::string text_of(const Values& values) {
    std::string text;
    for (const auto& [name, value] : values) text += fmt::format("{}: {}\n", name, value.dump());
    return text;
}

class GoldenModel : public ::testing::TestWithParam<std::string> {
   protected:
    GoldenModel() {
        const std::string file = path_ + "/expected.json";
        const Json expected = Json::parse(slurp(file), file);
        for (const auto& [name, told] : expected.at("tensors").as_object()) tensors_.emplace(name, told);
        for (const auto& [name, value] : expected.at("values").as_object()) values_.emplace(name, value);
    }

    // Tensors are cut over all ranks along the dimension `dim`, or the last if they have fewer; those without one are
    // whole everywhere.
    void expect_loaded(const Checkpoint& checkpoint, const std::shared_ptr<Communicator>& comm, int dim) const {
        struct Part {
            std::string name;
            Box box;
            std::vector<std::byte> memory;
        };
        std::list<Part> parts;
        State state;
        for (const auto& [name, content] : tensors_) {
            const auto tensor_of = [&, n = &name, c = &content](const Box& box) {
                const auto size = static_cast<size_t>(box.numel()) * size_of(c->dtype);
                parts.push_back({*n, box, std::vector<std::byte>(size, std::byte{0xcd})});
                return Tensor{parts.back().memory.data(), box.sizes, c->dtype, {}};
            };
            if (content.shape.ndim() == 0) {
                state.add_tensor(name, tensor_of(Box::whole(content.shape)));
                continue;
            }
            const int size = comm->world_size();
            const Placement placement = Placement::shard(std::min(dim, content.shape.ndim() - 1));
            const Layout layout = Layout::placed(content.shape, {&size, 1}, {&placement, 1});
            std::vector<Tensor> pieces;
            for (const Box& box : layout.boxes_of(comm->rank())) pieces.push_back(tensor_of(box));
            state.add_sharded(name, layout, content.dtype, pieces, comm->rank());
        }
        for (const auto& [name, value] : values_) state.set_value(name, Json("not loaded"));
        LoadOptions options;
        options.comm = comm;
        const LoadReport report = checkpoint.load(state, options);
        EXPECT_TRUE(report.missing.empty() && report.unexpected.empty() && report.cast.empty());
        for (const Part& part : parts) {
            EXPECT_EQ(part.memory, tensors_.at(part.name).part(part.box)) << part.name << " " << part.box.str();
        }
        EXPECT_EQ(text_of(state.collect()), text_of(values_));
    }

    const std::string path_ = golden + "/" + GetParam();
    std::map<std::string, Content> tensors_;
    Values values_;
};

TEST_P(GoldenModel, IsReadWhole) {
    const auto checkpoint = Checkpoint::open(path_);
    std::vector<std::string> names;
    for (const auto& [name, content] : tensors_) {
        names.push_back(name);
        std::vector<std::byte> memory(content.bytes.size());
        checkpoint->read(name, {memory.data(), content.shape, content.dtype, {}});
        EXPECT_EQ(memory, content.bytes) << name;
    }
    EXPECT_EQ(checkpoint->names(), names);
    EXPECT_EQ(text_of(checkpoint->manifest().values), text_of(values_));
    EXPECT_TRUE(checkpoint->manifest().unreadable.empty());
    EXPECT_TRUE(checkpoint->verify(Checkpoint::Depth::everything).empty());
}

TEST_P(GoldenModel, IsLoadedByOneTwoAndThreeRanks) {
    for (int world_size = 1; world_size <= 3; ++world_size) {
        for (int dim = 0; dim < 2; ++dim) {
            SCOPED_TRACE(fmt::format("{} ranks, cut along {}", world_size, dim));
            const Outcomes outcomes = run_meeting(world_size, [&](const std::shared_ptr<Communicator>& comm) {
                expect_loaded(*Checkpoint::open(path_), comm, dim);
            });
            for (const auto& outcome : outcomes) EXPECT_FALSE(outcome) << outcome->what();
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Jobs, GoldenModel, ::testing::ValuesIn(models()), [](const auto& one) {
    std::string name = "torch_" + one.param;
    std::replace_if(name.begin(), name.end(), [](char c) { return c == '.' || c == '/'; }, '_');
    return name;
});

INSTANTIATE_TEST_SUITE_P(Versions, Golden, ::testing::ValuesIn(versions()), [](const auto& one) {
    std::string name = "torch_" + one.param;
    std::replace(name.begin(), name.end(), '.', '_');
    return name;
});

}  // namespace
}  // namespace tsr::testing
