// Checkpoints of more files than a process may have open: those that a read touches are open a few at a time.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <filesystem>

#include "checkpoint/safetensors/file_maker.hpp"
#include "fault/faulty_files.hpp"

namespace tsr::testing {
namespace {

constexpr int file_count = 100;
constexpr int64_t allowed = 72;  // 64 are kept, a thread holds one, the manifest is locked

const Spec rows{"rows", DType::f64, {file_count, 3}};

// Every rank of many writes a file.
std::string saved(const TempDir& dir, SaveFormat format) {
    const auto layout =
        Layout::placed(rows.shape, std::vector<int>{file_count}, std::vector<Placement>{Placement::shard(0)});
    const auto outcomes = run_meeting(file_count, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_sharded(rows, layout, comm->rank());
        owned.fill();
        SaverOptions options = saver_options();
        options.format = format;
        Saver saver(comm, dir / "root", options);
        saver.save(1, owned.state);
    });
    for (const auto& outcome : outcomes) EXPECT_FALSE(outcome) << outcome->what();
    return only_save(dir / "root");
}

void expect_read_with_few_open(const std::string& path) {
    FaultyFiles files;
    const auto checkpoint = Checkpoint::open(path, files);
    EXPECT_GE(checkpoint->manifest().files.size(), size_t{file_count});
    OwnedState owned;
    owned.add_whole(rows);
    owned.poison();
    (void)checkpoint->load(owned.state);
    EXPECT_EQ(owned.differences(), 0);
    EXPECT_TRUE(checkpoint->verify(Depth::everything).empty());
    EXPECT_LE(files.most_open(), allowed);
}

TEST(ManyFiles, OfANativeSaveAreOpenAFewAtATime) {
    const TempDir dir;
    expect_read_with_few_open(saved(dir, SaveFormat::native));
}

TEST(ManyFiles, OfADistributedCheckpointAreOpenAFewAtATime) {
    const TempDir dir;
    expect_read_with_few_open(saved(dir, SaveFormat::torch_dcp));
}

TEST(ManyFiles, OfSafetensorsAreOpenAFewAtATime) {
    const TempDir dir;
    FaultyFiles files;
    for (int i = 0; i < file_count; ++i) {
        const Part part{fmt::format("t{}", i), "I64", "[1]", bytes_of(std::vector<int64_t>{i}), ""};
        spill(dir / fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, file_count), safetensors_file({part}));
    }
    const auto checkpoint = Checkpoint::open(dir.path(), files);
    std::vector<int64_t> numbers(file_count, -1);
    std::vector<std::string> names;
    for (int i = 0; i < file_count; ++i) names.push_back(fmt::format("t{}", i));
    std::vector<ReadPart> parts;
    for (size_t i = 0; i < names.size(); ++i) {
        parts.push_back({names[i], Box::whole({1}), reinterpret_cast<std::byte*>(&numbers[i])});
    }
    checkpoint->read(parts);
    for (int i = 0; i < file_count; ++i) EXPECT_EQ(numbers[static_cast<size_t>(i)], i);
    EXPECT_TRUE(checkpoint->verify(Depth::everything).empty());
    EXPECT_LE(files.most_open(), allowed);
}

}  // namespace
}  // namespace tsr::testing
