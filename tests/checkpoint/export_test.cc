// Checkpoints in other formats, written by any number of ranks: the same tensors, whole and durable or not there.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>

#include "checkpoint/export/export.hpp"
#include "checkpoint/fixture.hpp"
#include "fault/faulty_files.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> names_in(const std::string& directory) {
    std::vector<std::string> names;
    (void)posix_file_system().list(directory, names);
    return names;
}

std::string bytes_of(const Checkpoint& checkpoint, const std::string& name) {
    const SavedTensor& tensor = *checkpoint.manifest().find(name);
    std::string bytes(static_cast<size_t>(tensor.size_bytes()), '\0');
    checkpoint.read(name, {reinterpret_cast<std::byte*>(bytes.data()), tensor.shape, tensor.dtype, {}});
    return bytes;
}

// Three ranks' save of split, whole, empty and small tensors.
class Export : public ::testing::TestWithParam<int> {
   protected:
    void SetUp() override {
        expect_all_well(run_meeting(3, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            const std::vector<int> mesh{3};
            owned.add_whole({"model.large", DType::f32, {301, 100}});
            owned.add_whole({"model.scalar", DType::f64, {}});
            owned.add_whole({"model.empty", DType::i64, {0, 3}});
            owned.add_sharded({"model.rows", DType::bf16, {37, 5}},
                              Layout::placed({37, 5}, mesh, std::vector<Placement>{Placement::shard(0)}), comm->rank());
            owned.add_sharded({"optim.columns", DType::i16, {9, 40}},
                              Layout::placed({9, 40}, mesh, std::vector<Placement>{Placement::shard(1)}), comm->rank());
            owned.fill(4);
            owned.state.set_value("epoch", Json(int64_t{4}));
            Saver saver(comm, root_, saver_options());
            saver.save(4, owned.state);
        }));
    }

    void export_by(int world_size, const ExportOptions& options) const {
        expect_all_well(run_meeting(world_size, [&](const std::shared_ptr<Communicator>& comm) {
            Peers peers(comm);
            const auto source = Checkpoint::open(root_);
            const Exported exported = export_checkpoint(*source, peers, out_, options);
            EXPECT_EQ(exported.tensor_count, options.under.empty() ? 5 : 4);
            for (const std::string& name : exported.files) EXPECT_TRUE(std::filesystem::exists(out_ + "/" + name));
        }));
    }

    void expect_same(const std::string& under = "") const {
        const auto source = Checkpoint::open(root_);
        const auto out = Checkpoint::open(out_);
        EXPECT_THAT(out->verify(Depth::everything), IsEmpty());
        size_t count = 0;
        for (const std::string& name : source->names()) {
            if (!name.starts_with(under)) continue;
            ++count;
            const std::string to = name.substr(under.size());
            ASSERT_NE(out->manifest().find(to), nullptr) << to;
            EXPECT_EQ(out->manifest().find(to)->shape, source->manifest().find(name)->shape) << to;
            EXPECT_EQ(bytes_of(*out, to), bytes_of(*source, name)) << to;
        }
        EXPECT_EQ(out->names().size(), count);
        for (const auto& entry : std::filesystem::directory_iterator(dir_.path())) {
            EXPECT_THAT(entry.path().filename().string(), ::testing::AnyOf("root", "out"));
        }
    }

    TempDir dir_;
    std::string root_ = dir_ / "root";
    std::string out_ = dir_ / "out";
};

TEST_P(Export, OneFileIsFilledByAllRanks) {
    ExportOptions options;
    options.batch_bytes = 1000;  // many batches, some within a row
    export_by(GetParam(), options);
    EXPECT_THAT(names_in(out_), ElementsAre("model.safetensors"));
    expect_same();
}

TEST_P(Export, FilesOfASizeHaveAnIndex) {
    ExportOptions options;
    options.batch_bytes = 700;
    options.shard_bytes = 1000;
    options.under = "model.";
    export_by(GetParam(), options);
    EXPECT_THAT(names_in(out_), ::testing::Contains("model.safetensors.index.json"));
    EXPECT_GT(names_in(out_).size(), 2u);
    expect_same("model.");
}

TEST_P(Export, ToPyTorchEachRankWritesAFile) {
    ExportOptions options;
    options.format = ExportFormat::torch_dcp;
    options.batch_bytes = 9000;
    export_by(GetParam(), options);
    EXPECT_EQ(names_in(out_).size(), static_cast<size_t>(GetParam()) + 1);
    expect_same();
    EXPECT_EQ(Checkpoint::open(out_)->manifest().values.at("epoch"), Json(int64_t{4}));
}

TEST_P(Export, ToATorchSaveFileIsFilledByAllRanks) {
    ExportOptions options;
    options.format = ExportFormat::torch_save;
    options.batch_bytes = 1000;
    export_by(GetParam(), options);
    EXPECT_THAT(names_in(out_), ElementsAre("model.pt"));
    expect_same();
    EXPECT_EQ(Checkpoint::open(out_)->manifest().values.at("epoch"), Json(int64_t{4}));
}

// The bytes that each rank wrote, of an export of all of them.
std::vector<int64_t> written_by(int world_size, const std::string& from, const std::string& to, ExportFormat format) {
    std::vector<int64_t> written(static_cast<size_t>(world_size));
    expect_all_well(run_meeting(world_size, [&](const std::shared_ptr<Communicator>& comm) {
        int64_t& mine = written[static_cast<size_t>(comm->rank())];
        FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
            if (call.name.starts_with("write ")) mine += static_cast<int64_t>(call.bytes);
            return {};
        });
        Peers peers(comm);
        ExportOptions options;
        options.format = format;
        options.batch_bytes = 1000;
        if (format == ExportFormat::npz) options.under = "model.l";  // the large one: NumPy has no bf16
        (void)export_checkpoint(*Checkpoint::open(from), peers, to, options, files);
    }));
    return written;
}

TEST_P(Export, IsWrittenInEqualPartsByAllRanks) {
    for (const ExportFormat format :
         {ExportFormat::safetensors, ExportFormat::torch_dcp, ExportFormat::torch_save, ExportFormat::npz}) {
        SCOPED_TRACE(name_of(format));
        const auto world_size = GetParam();
        const std::vector<int64_t> written =
            written_by(world_size, root_, fmt::format("{}-{}", out_, name_of(format)), format);
        // 120 kB of tensors in batches of 1 kB, a few of which are smaller; headers and directories are rank 0's.
        for (const int64_t bytes : written)
            EXPECT_GT(bytes, 120'000 / world_size / 2) << ::testing::PrintToString(written);
    }
}

// NumPy itself reads such files in the tests of the Python binding.
TEST_P(Export, ToNpzIsTheSameFileByAnyNumberOfRanks) {
    std::vector<float> memory(3000);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
    const TempDir other;
    {
        State state;
        const Tensor large{reinterpret_cast<std::byte*>(memory.data()), {30, 100}, DType::f32, {}};
        state.add_tensor("large", large);
        state.add_tensor("tied", large);
        state.add_tensor("empty", {nullptr, {0, 3}, DType::i64, {}});
        state.set_value("epoch", Json(int64_t{4}));
        Saver(nullptr, other.path(), saver_options()).save(4, state);
    }
    std::vector<std::string> texts;
    for (const int world_size : {1, GetParam()}) {
        const std::string out = fmt::format("{}-{}", out_, texts.size());
        expect_all_well(run_meeting(world_size, [&](const std::shared_ptr<Communicator>& comm) {
            Peers peers(comm);
            ExportOptions options;
            options.format = ExportFormat::npz;
            options.batch_bytes = 1000;
            const Exported exported = export_checkpoint(*Checkpoint::open(other.path()), peers, out, options);
            EXPECT_EQ(exported.tensor_count, 3);
            EXPECT_THAT(exported.left_out, ElementsAre("epoch"));
            EXPECT_THAT(exported.files, ElementsAre("model.npz"));
        }));
        texts.push_back(slurp(out + "/model.npz"));
    }
    EXPECT_EQ(texts[0], texts[1]);
    for (const std::string name : {"large", "tied"}) {
        const size_t entry = texts[0].find("\x93NUMPY", texts[0].find(name + ".npy"));
        ASSERT_NE(entry, std::string::npos);
        EXPECT_EQ(entry % 64, 0U);
        const std::string said = "{'descr': '<f4', 'fortran_order': False, 'shape': (30, 100), }";
        EXPECT_EQ(texts[0].substr(entry + 10, said.size()), said);
        const size_t data = texts[0].find('\n', entry) + 1;
        EXPECT_EQ(data % 64, 0U);
        EXPECT_EQ(texts[0].substr(data, 12000), std::string(reinterpret_cast<const char*>(memory.data()), 12000));
    }
}

TEST_P(Export, ToTorchSaveOfOnePartLeavesTheBeginningOut) {
    ExportOptions options;
    options.format = ExportFormat::torch_save;
    options.under = "model.";
    export_by(GetParam(), options);
    expect_same("model.");
    EXPECT_THAT(Checkpoint::open(out_)->manifest().values, IsEmpty());
}

TEST_P(Export, ProgressEndsAtItsTotal) {
    std::mutex mutex;
    std::vector<int64_t> ends;
    expect_all_well(run_meeting(GetParam(), [&](const std::shared_ptr<Communicator>& comm) {
        int64_t last = -1;
        ExportOptions options;
        options.progress = [&](Phase phase, int64_t done, int64_t total) {
            EXPECT_EQ(phase, Phase::write);
            EXPECT_TRUE(last >= 0 || done == 0) << done;
            last = done == total ? 0 : 1;
        };
        Peers peers(comm);
        (void)export_checkpoint(*Checkpoint::open(root_), peers, out_, options);
        const std::lock_guard lock(mutex);
        ends.push_back(last);
    }));
    EXPECT_THAT(ends, ::testing::Each(0));
}

TEST_P(Export, AnErrorOfOneRankIsToldByAllAndNothingIsLeft) {
    const int world_size = GetParam();
    for (const ExportFormat format :
         {ExportFormat::safetensors, ExportFormat::torch_dcp, ExportFormat::torch_save, ExportFormat::npz}) {
        expect_all_well(run_meeting(world_size, [&](const std::shared_ptr<Communicator>& comm) {
            Peers peers(comm);
            const auto source = Checkpoint::open(root_);
            ExportOptions options;
            options.format = format;
            options.batch_bytes = 1000;
            if (format == ExportFormat::npz) options.under = "optim.";  // the rest has a dtype that it lacks
            if (comm->rank() == world_size - 1) {
                options.progress = [](Phase, int64_t done, int64_t) {
                    if (done == 0) throw Error(Code::io, "the disk of the last rank");
                };
            }
            const Error error = error_of([&] { (void)export_checkpoint(*source, peers, out_, options); });
            EXPECT_EQ(error.code(), Code::io);
            EXPECT_THAT(error.what(), HasSubstr("the disk of the last rank"));
        }));
        EXPECT_THAT(names_in(dir_.path()), ElementsAre("root")) << name_of(format);
    }
}

TEST_P(Export, WhatCannotBeExportedIsRefusedBeforeAnythingIsThere) {
    const auto refusal = [&](const std::string& out, const ExportOptions& options, Code code) {
        std::string text;
        std::mutex mutex;
        expect_all_well(run_meeting(GetParam(), [&](const std::shared_ptr<Communicator>& comm) {
            Peers peers(comm);
            const auto source = Checkpoint::open(root_);
            const Error error = error_of([&] { (void)export_checkpoint(*source, peers, out, options); });
            EXPECT_EQ(error.code(), code) << error.what();
            const std::lock_guard lock(mutex);
            text = error.what();
        }));
        EXPECT_THAT(names_in(dir_.path()), ElementsAre("root"));
        return text;
    };
    EXPECT_THAT(refusal(root_, {}, Code::invalid_argument), HasSubstr("already exists"));
    std::filesystem::create_symlink("nowhere", dir_ / "root/link");
    EXPECT_THAT(refusal(dir_ / "root/link", {}, Code::invalid_argument), HasSubstr("already exists"));
    ExportOptions none;
    none.under = "nothing.";
    EXPECT_THAT(refusal(out_, none, Code::invalid_argument), HasSubstr("begins with 'nothing.'"));
    ExportOptions cut;
    cut.format = ExportFormat::torch_dcp;
    cut.shard_bytes = 1;
    EXPECT_THAT(refusal(out_, cut, Code::invalid_argument), HasSubstr("each rank writes one"));
    for (const ExportFormat format : {ExportFormat::torch_save, ExportFormat::npz}) {
        cut.format = format;
        EXPECT_THAT(refusal(out_, cut, Code::invalid_argument), HasSubstr("it writes a single file"));
    }
    cut.shard_bytes = 0;
    EXPECT_THAT(refusal(out_, cut, Code::unsupported), HasSubstr("'model.rows' is bf16, which NumPy does not support"));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Export, ::testing::Values(1, 2, 5),
                         [](const auto& one) { return std::to_string(one.param) + "Ranks"; });

TEST(ExportOfRanks, ThatDifferIsRefused) {
    const TempDir dir;
    expect_all_well(run_meeting(1, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {4}});
        owned.fill(1);
        Saver(comm, dir / "root", saver_options()).save(1, owned.state);
    }));
    expect_all_well(run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        Peers peers(comm);
        const auto source = Checkpoint::open(dir / "root");
        const std::string out = dir / (comm->rank() == 0 ? "a" : "b");
        const Error error = error_of([&] { (void)export_checkpoint(*source, peers, out, {}); });
        EXPECT_EQ(error.code(), Code::mismatch);
        EXPECT_THAT(error.what(), HasSubstr("rank 1"));
    }));
    EXPECT_THAT(names_in(dir.path()), ElementsAre("root"));
}

// Each opened the newest save, while a job went on saving: all would be equal but the data.
TEST(ExportOfRanks, ThatOpenedDifferentSavesIsRefused) {
    const TempDir dir;
    OwnedState owned;
    owned.add_whole({"w", DType::f32, {4}});
    Saver saver(nullptr, dir / "root", saver_options());
    for (const int64_t step : {1, 2}) {
        owned.fill(static_cast<uint64_t>(step));
        saver.save(step, owned.state);
    }
    const std::vector<SavedStep> saves = scan_root(posix_file_system(), dir / "root");
    for (const ExportFormat format : {ExportFormat::safetensors, ExportFormat::npz}) {
        expect_all_well(run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
            Peers peers(comm);
            const auto source = Checkpoint::open(dir / "root/" + saves.at(static_cast<size_t>(comm->rank())).directory);
            ExportOptions options;
            options.format = format;
            const Error error = error_of([&] { (void)export_checkpoint(*source, peers, dir / "out", options); });
            EXPECT_EQ(error.code(), Code::mismatch);
            EXPECT_THAT(error.what(), HasSubstr("rank 1's export differs from rank 0's"));
        }));
    }
    EXPECT_THAT(names_in(dir.path()), ElementsAre("root"));
}

}  // namespace
}  // namespace tsr::testing
