// Exports as files of torch.save: the same bytes whoever writes them, every dtype and value, sizes beyond 32 bits. That
// PyTorch loads them is tested in tests/interop/test_torch_save.py.
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <list>
#include <set>

#include "base/crc32.hpp"
#include "checkpoint/export/export.hpp"
#include "checkpoint/fixture.hpp"
#include "checkpoint/formats/torch_dcp/archive_writer.hpp"
#include "checkpoint/formats/torch_dcp/metadata.hpp"
#include "checkpoint/formats/torch_dcp/pickle_writer.hpp"
#include "checkpoint/formats/torch_dcp/torch_archive.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string bytes_of(const Checkpoint& checkpoint, const std::string& name) {
    const SavedTensor& tensor = *checkpoint.manifest().find(name);
    std::string bytes(static_cast<size_t>(tensor.size_bytes()), '\0');
    checkpoint.read(name, {reinterpret_cast<std::byte*>(bytes.data()), tensor.shape, tensor.dtype, {}});
    return bytes;
}

void save_alone(const std::string& root, State& state, SaveFormat format = SaveFormat::native) {
    SaverOptions options = saver_options();
    options.format = format;
    Saver(nullptr, root, options).save(1, state);
}

Exported export_alone(const std::string& from, const std::string& out, FileSystem& files = posix_file_system()) {
    ExportOptions options;
    options.format = ExportFormat::torch_save;
    Peers alone(nullptr);
    return export_checkpoint(*Checkpoint::open(from, files), alone, out, options, files);
}

class TorchSaveByRanks : public ::testing::TestWithParam<int> {};

TEST_P(TorchSaveByRanks, TheFileIsTheSameWhoeverWritesIt) {
    const TempDir dir;
    State state;
    std::list<std::string> memory;
    for (int number = 1; is_known(static_cast<DType>(number)); ++number) {
        const auto dtype = static_cast<DType>(number);
        for (const Dims& shape : {Dims{}, Dims{0, 3}, Dims{7}, Dims{13, 5, 3}}) {
            const std::string name = fmt::format("{}.{}", name_of(dtype), memory.size());
            std::string& bytes = memory.emplace_back(static_cast<size_t>(shape.product()) * size_of(dtype), '\0');
            Pattern(name).write(reinterpret_cast<std::byte*>(bytes.data()), 1, 0, std::ssize(bytes));
            state.add_tensor(name, {reinterpret_cast<std::byte*>(bytes.data()), shape, dtype, {}});
        }
    }
    memory.emplace_back(70'003, 'L');  // beyond 64 KiB: it begins at a page
    state.add_tensor("large", {reinterpret_cast<std::byte*>(memory.back().data()), {70'003}, DType::u8, {}});
    state.set_value("step", Json(int64_t{7}));
    save_alone(dir / "root", state, SaveFormat::torch_dcp);  // c128 is in no native save
    (void)export_alone(dir / "root", dir / "alone");
    const std::string wanted = slurp(dir / "alone/model.pt");

    const auto source = Checkpoint::open(dir / "root");
    for (const int64_t batch_bytes : {61, 1000, 4096, 1 << 20}) {
        const std::string out = dir / fmt::format("out-{}", batch_bytes);
        expect_all_well(run_meeting(GetParam(), [&](const std::shared_ptr<Communicator>& comm) {
            ExportOptions options;
            options.format = ExportFormat::torch_save;
            options.batch_bytes = batch_bytes;
            Peers peers(comm);
            const Exported exported = export_checkpoint(*source, peers, out, options);
            EXPECT_THAT(exported.files, ElementsAre("model.pt"));
            EXPECT_THAT(exported.left_out, IsEmpty());
        }));
        EXPECT_TRUE(slurp(out + "/model.pt") == wanted) << "batches of " << batch_bytes;
    }
    const auto read = Checkpoint::open(dir / "alone");
    EXPECT_EQ(read->manifest().format, "torch_save");
    EXPECT_EQ(read->names(), source->names());
    EXPECT_TRUE(read->has_checksums());
    EXPECT_THAT(read->verify(Depth::everything), IsEmpty());
    EXPECT_EQ(read->manifest().values, source->manifest().values);
    for (const std::string& name : source->names()) {
        EXPECT_EQ(read->manifest().find(name)->dtype, source->manifest().find(name)->dtype) << name;
        EXPECT_EQ(read->manifest().find(name)->shape, source->manifest().find(name)->shape) << name;
        EXPECT_EQ(bytes_of(*read, name), bytes_of(*source, name)) << name;
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TorchSaveByRanks, ::testing::Values(1, 2, 3, 4),
                         [](const auto& one) { return std::to_string(one.param) + "Ranks"; });

TEST(TorchSave, TiedNamesShareAStorage) {
    const TempDir dir;
    State state;
    std::vector<float> memory{1, 2, 3};
    const Tensor tensor{reinterpret_cast<std::byte*>(memory.data()), {3}, DType::f32, {}};
    for (const char* name : {"model.head", "model.embedding", "other"}) state.add_tensor(name, tensor);
    float alone = 4;
    state.add_tensor("model.alone", {reinterpret_cast<std::byte*>(&alone), {}, DType::f32, {}});
    save_alone(dir / "root", state);
    EXPECT_EQ(export_alone(dir / "root", dir / "out").tensor_count, 2);

    const auto read = Checkpoint::open(dir / "out/model.pt");
    EXPECT_THAT(read->names(), ElementsAre("model.alone", "model.embedding", "model.head", "other"));
    for (const char* name : {"model.head", "model.embedding", "other"}) {
        EXPECT_EQ(bytes_of(*read, name), std::string(reinterpret_cast<const char*>(memory.data()), 12)) << name;
    }
    const std::string path = dir / "out/model.pt";
    const auto file = open_file(posix_file_system(), path, OpenMode::read);
    PartReader part(*file, path, 0, file->size());
    std::vector<std::string> entries;
    const ZipArchive archive = ZipArchive::read(part);
    for (const ZipEntry& entry : archive.entries()) entries.push_back(entry.name);
    EXPECT_THAT(entries, ElementsAre("data.pkl", "byteorder", "data/0", "data/1", "version"));
}

// Dicts stay dicts in the file, and are named by their parts when it is read, but for those that cannot be.
TEST(TorchSave, ValuesArePlainData) {
    const TempDir dir;
    State state;
    float w = 1;
    state.add_tensor("model.w", {reinterpret_cast<std::byte*>(&w), {}, DType::f32, {}});
    const std::map<std::string, std::string> given{
        {"optim.lr", "0.5"},
        {"note", "\"größer\\n\""},
        {"pair", R"({"~":"tuple","v":[1,[2,null]]})"},
        {"big", R"({"~":"int","v":"-123456789012345678901234567890"})"},
        {"nan", R"({"~":"double","v":"nan"})"},
        {"bytes", R"({"~":"bytes","v":"AP+A"})"},
        {"config", R"({"deep":{"flag":true},"list":[1,2],"empty":{}})"},
        {"groups", R"([{"lr":0.1},{"lr":0.2}])"},
        {"numbered", R"({"~":"map","v":[[1,"a"],[null,"b"]]})"},
        // By a key that is no text, by a name that is taken, and by what no name may hold: whole.
        {"keyed", R"({"~":"map","v":[[{"~":"tuple","v":[1,2]},{"a":1}]]})"},
        {"taken", R"({"a":{"b":1}})"},
        {"taken.a.b", "2"},
        {"model", R"({"w":3})"},
        {"vocabulary", R"({"\n":0,"x":1})"},
        {"twice", R"({"b":{"c":1},"b.c":2})"},
    };
    for (const auto& [name, value] : given) state.set_value(name, parse_value(value, name));
    save_alone(dir / "root", state);
    EXPECT_THAT(export_alone(dir / "root", dir / "out").left_out, IsEmpty());

    const auto read = Checkpoint::open(dir / "out");
    EXPECT_THAT(read->names(), ElementsAre("model.w"));
    EXPECT_THAT(read->manifest().unreadable, IsEmpty());
    std::map<std::string, std::string> found;
    for (const auto& [name, value] : read->manifest().values) found[name] = value.dump();
    std::map<std::string, std::string> wanted = given;
    for (const char* name : {"config", "groups", "numbered", "taken", "twice"}) wanted.erase(name);
    wanted.insert({{"config.deep.flag", "true"}, {"config.list", "[1,2]"}, {"config.empty", "{}"}});
    wanted.insert({{"groups.0.lr", "0.1"}, {"groups.1.lr", "0.2"}});
    wanted.insert({{"numbered.1", "\"a\""}, {"numbered.None", "\"b\""}});
    wanted.insert({{"taken.a", R"({"b":1})"}, {"twice.b", R"({"c":1})"}, {"twice.b.c", "2"}});
    wanted["note"] = Json("größer\n").dump();
    EXPECT_EQ(found, wanted);
}

TEST(TorchSave, AValueNestedAsDeepAsAStateTakesItIsRead) {
    const TempDir dir;
    float w = 1;
    State state;
    state.add_tensor("w", {reinterpret_cast<std::byte*>(&w), {}, DType::f32, {}});
    std::string list = "1";
    for (int i = 0; i < max_value_depth; ++i) list = "[" + list + "]";
    state.set_value("list", parse_value(list, "list"));
    std::string map = "1";
    for (int i = 0; i < max_value_depth; ++i) map = R"({"~":"map","v":[[1.5,)" + map + "]]}";
    state.set_value("map", parse_value(map, "map"));
    save_alone(dir / "root", state);
    (void)export_alone(dir / "root", dir / "out");
    const auto read = Checkpoint::open(dir / "out");
    EXPECT_THAT(read->manifest().unreadable, IsEmpty());
    EXPECT_EQ(read->manifest().values.at("list").dump(), list);
    EXPECT_EQ(read->manifest().values.at("map").dump(), map);
}

// A dict within a file of PyTorch's own whose tensors cannot be named is told, and all else is read.
TEST(TorchSave, TensorsWithoutANameOfTheirOwnAreTold) {
    const TempDir dir;
    pickle::PickleWriter out;
    const auto tensor = [&](size_t storage) { put_tensor(out, DType::u8, {1}, storage); };
    out.empty_dict();
    out.mark();
    out.text("good");
    tensor(0);
    out.text("cache");
    out.empty_dict();
    out.mark();
    out.mark();
    out.integer(1);
    out.tuple();
    tensor(1);
    out.setitems();
    out.setitems();
    ZipWriter zip(std::string(archive_folder), 0);
    begin_archive(zip, out.finish());
    std::string text;
    for (size_t i = 0; i < 2; ++i) {
        (void)zip.add_data(storage_entry(i), 1, crc32("x"));
        text += zip.take_text() + "x";
    }
    end_archive(zip);
    zip.finish();
    spill(dir / "f.pt", text + zip.take_text());
    const auto read = Checkpoint::open(dir / "f.pt");
    EXPECT_THAT(read->names(), ElementsAre("good"));
    EXPECT_EQ(bytes_of(*read, "good"), "x");
    EXPECT_EQ(read->manifest().unreadable.at("cache"), "a dict has a tuple as a key");
}

TEST(TorchSave, BatchesThatDoNotMakeTheWholeAreFound) {
    const TempDir dir;
    OwnedState owned;
    owned.add_whole({"w", DType::f32, {100}});
    owned.fill();
    save_alone(dir / "root", owned.state);
    expect_all_well(run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        ExportOptions options;
        options.format = ExportFormat::torch_save;
        options.batch_bytes = comm->rank() == 0 ? 100 : 48;
        Peers peers(comm);
        const auto source = Checkpoint::open(dir / "root");
        const Error error = error_of([&] { (void)export_checkpoint(*source, peers, dir / "out", options); });
        EXPECT_EQ(error.code(), Code::internal);
        EXPECT_THAT(error.what(), HasSubstr("of tensor 'w', expected 400"));
    }));
    EXPECT_FALSE(std::filesystem::exists(dir / "out"));
}

// What lies behind the values would have another place.
TEST(TorchSave, RanksWithOtherValuesAreRefused) {
    const TempDir dir;
    for (const char* root : {"0", "1"}) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {4}});
        owned.fill();
        owned.state.set_value("note", Json(std::string(root)));
        save_alone(dir / root, owned.state);
    }
    expect_all_well(run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        ExportOptions options;
        options.format = ExportFormat::torch_save;
        Peers peers(comm);
        const auto source = Checkpoint::open(dir / std::to_string(comm->rank()));
        const Error error = error_of([&] { (void)export_checkpoint(*source, peers, dir / "out", options); });
        EXPECT_EQ(error.code(), Code::mismatch) << error.what();
    }));
    EXPECT_FALSE(std::filesystem::exists(dir / "out"));
}

// Leaves holes where zeros are written, and knows of one that is read, so that gigabytes cost neither disk nor page
// cache.
std::string model_of(const TempDir& dir, pickle::PickleWriter& object) {
    ZipWriter zip(std::string(archive_folder), 0);
    begin_archive(zip, object.finish());
    end_archive(zip);
    zip.finish();
    const std::string path = dir / "model.pt";
    spill(path, zip.take_text());
    return path;
}

// A value of ours has each key once; a manifest that told of such a one would be refused.
TEST(TorchSave, AValueThatNoManifestMayHoldIsUnreadable) {
    const TempDir dir;
    pickle::PickleWriter object;
    object.empty_dict();
    object.mark();
    object.text("nans");
    object.empty_dict();
    object.mark();
    for (int i = 0; i < 2; ++i) {
        object.real(std::nan(""));
        object.integer(i);
    }
    object.setitems();
    object.text("sound");
    object.integer(3);
    object.setitems();
    const auto read = Checkpoint::open(model_of(dir, object));
    EXPECT_TRUE(read->manifest().unreadable.contains("nans"));
    EXPECT_FALSE(read->manifest().values.contains("nans"));
    EXPECT_EQ(read->manifest().values.at("sound").dump(), "3");
}

// A megabyte that would be half a gigabyte of values.
TEST(TorchSave, ValuesTakeNoMoreThanAFewTimesTheirFile) {
    const TempDir dir;
    pickle::PickleWriter object;
    object.empty_dict();
    object.mark();
    object.text("shared");
    object.empty_list();
    object.mark();
    object.empty_list();
    object.mark();
    for (int i = 0; i < 1'000'000; ++i) object.none();
    object.appends();
    const uint32_t list = object.put();
    for (int i = 0; i < 14; ++i) object.get(list);
    object.appends();
    object.setitems();
    const auto read = Checkpoint::open(model_of(dir, object));
    ASSERT_TRUE(read->manifest().unreadable.contains("shared"));
    EXPECT_THAT(read->manifest().unreadable.at("shared"), HasSubstr("far larger than its file"));
}

// Of tensors `config.a` and `tied.b`, which have those names already.
TEST(TorchDcp, APartOfAValueTakesNoTensorsName) {
    const TempDir dir;
    std::vector<float> memory{1, 2, 3};
    const Tensor tensor{reinterpret_cast<std::byte*>(memory.data()), {3}, DType::f32, {}};
    State state;
    state.add_tensor("config.a", tensor);
    state.add_tensor("tied.b", tensor);
    state.set_value("config", parse_value(R"({"a":1})", "config"));
    state.set_value("tied", parse_value(R"({"b":2})", "tied"));
    state.set_value("free", parse_value(R"({"c":3})", "free"));
    save_alone(dir / "root", state, SaveFormat::torch_dcp);
    save_alone(dir / "native", state);
    ExportOptions options;
    options.format = ExportFormat::torch_dcp;
    Peers alone(nullptr);
    (void)export_checkpoint(*Checkpoint::open(dir / "native"), alone, dir / "out", options);
    for (const char* path : {"root", "out"}) {
        const auto read = Checkpoint::open(dir / path);
        EXPECT_THAT(read->names(), ElementsAre("config.a", "tied.b")) << path;
        EXPECT_EQ(bytes_of(*read, "config.a"), std::string(reinterpret_cast<const char*>(memory.data()), 12));
        if (std::string(path) == "root") continue;
        const Values& values = read->manifest().values;
        EXPECT_EQ(values.at("config").dump(), R"({"a":1})");
        EXPECT_EQ(values.at("tied").dump(), R"({"b":2})");
        EXPECT_EQ(values.at("free.c").dump(), "3");
    }
    (void)Checkpoint::open(dir / "root")->load(state);
    EXPECT_TRUE(DcpMetadata::parse(slurp(only_save(dir / "root") + "/.metadata"), "m").values.contains("config"));
}

// A member's key may be any text. Such a save was committed, and then nothing of it could be read.
TEST(TorchDcp, AValueWithAMemberThatCanHaveNoNameStaysWhole) {
    const TempDir dir;
    float w = 1;
    State state;
    state.add_tensor("w", {reinterpret_cast<std::byte*>(&w), {}, DType::f32, {}});
    const std::map<std::string, std::string> given{
        {"vocabulary", R"({"\n":0,"x":1})"},
        {"deep", R"({"a":{"tab\t":[{"b":1}]},"c":2})"},
        {"long", fmt::format(R"({{"{}":1}})", std::string(max_name_bytes, 'k'))},
        {"empty", R"({"":1})"},
    };
    for (const auto& [name, value] : given) state.set_value(name, parse_value(value, name));
    save_alone(dir / "root", state, SaveFormat::torch_dcp);
    save_alone(dir / "native", state);
    ExportOptions options;
    options.format = ExportFormat::torch_dcp;
    Peers alone(nullptr);
    (void)export_checkpoint(*Checkpoint::open(dir / "native"), alone, dir / "out", options);

    std::map<std::string, std::string> wanted = given;
    wanted.erase("deep");
    wanted.erase("empty");
    wanted.insert({{"deep.a", R"({"tab\t":[{"b":1}]})"}, {"deep.c", "2"}, {"empty.", "1"}});
    std::map<std::string, std::string> found;
    const auto read = Checkpoint::open(dir / "out");
    for (const auto& [name, value] : read->manifest().values) found[name] = value.dump();
    EXPECT_EQ(found, wanted);
    w = 0;
    (void)Checkpoint::open(dir / "root")->load(state);
    EXPECT_EQ(w, 1);
}

class SparseFiles final : public FileSystem {
   public:
    SparseFiles(int64_t hole_begin, int64_t hole_end) : hole_begin_(hole_begin), hole_end_(hole_end) {}
    int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) override {
        std::unique_ptr<File> file;
        const int64_t result = files_.open(path, mode, file);
        if (result == 0) out = std::make_unique<SparseFile>(*this, std::move(file), mode == OpenMode::read);
        return result;
    }
    int64_t make_directory(const std::string& path) override { return files_.make_directory(path); }
    int64_t rename(const std::string& from, const std::string& to) override { return files_.rename(from, to); }
    int64_t link(const std::string& from, const std::string& to) override { return files_.link(from, to); }
    int64_t remove_file(const std::string& path) override { return files_.remove_file(path); }
    int64_t remove_directory(const std::string& path) override { return files_.remove_directory(path); }
    int64_t sync_directory(const std::string& path) override { return files_.sync_directory(path); }
    int64_t list(const std::string& path, std::vector<std::string>& names) override { return files_.list(path, names); }
    int64_t status(const std::string& path, FileStatus& out) override { return files_.status(path, out); }
    int64_t touch(const std::string& path) override { return files_.touch(path); }

   private:
    class SparseFile final : public File {
       public:
        SparseFile(SparseFiles& owner, std::unique_ptr<File> file, bool has_hole)
            : owner_(owner), file_(std::move(file)), has_hole_(has_hole) {}
        int64_t read(std::span<std::byte> into, int64_t offset) override {
            const int64_t end = offset + static_cast<int64_t>(into.size());
            if (!has_hole_ || offset < owner_.hole_begin_ || end > owner_.hole_end_) return file_->read(into, offset);
            std::memset(into.data(), 0, into.size());
            return static_cast<int64_t>(into.size());
        }
        int64_t write(std::span<const std::byte> from, int64_t offset) override {
            const bool is_zero =
                from.front() == std::byte{0} && std::memcmp(from.data(), from.data() + 1, from.size() - 1) == 0;
            return is_zero ? static_cast<int64_t>(from.size()) : file_->write(from, offset);
        }
        int64_t size() override { return file_->size(); }
        int64_t allocate(int64_t) override { return -EOPNOTSUPP; }
        int64_t truncate(int64_t size) override { return file_->truncate(size); }
        int64_t sync() override { return file_->sync(); }
        void start_writeback(int64_t, int64_t) override {}
        bool is_direct() const override { return file_->is_direct(); }
        int64_t leave_direct() override { return file_->leave_direct(); }
        bool is_cached(int64_t offset) override { return file_->is_cached(offset); }

       private:
        SparseFiles& owner_;
        std::unique_ptr<File> file_;
        bool has_hole_;
    };

    FileSystem& files_ = posix_file_system();
    const int64_t hole_begin_;
    const int64_t hole_end_;
};

TEST(TorchSave, SizesAndPlacesBeyond32BitsAreWritten) {
    const TempDir dir;
    const int64_t large = (int64_t{4} << 30) + 5;
    const std::string json = fmt::format(
        R"({{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}},"b":{{"dtype":"U8","shape":[3],"data_offsets":[{0},{1}]}}}})",
        large, large + 3);
    std::string header;
    for (size_t i = 0; i < 8; ++i) header += static_cast<char>(json.size() >> (8 * i) & 0xff);
    spill(dir / "in.safetensors", header + json);
    const auto hole = static_cast<int64_t>(header.size() + json.size());
    std::filesystem::resize_file(dir / "in.safetensors", static_cast<size_t>(hole + large));
    std::ofstream(dir / "in.safetensors", std::ios::binary | std::ios::app) << "end";

    SparseFiles files(hole, hole + large);
    EXPECT_EQ(export_alone(dir / "in.safetensors", dir / "out", files).size_bytes, large + 3);
    const auto read = Checkpoint::open(dir / "out");
    EXPECT_THAT(read->verify(Depth::headers), IsEmpty());
    EXPECT_EQ(read->manifest().find("a")->shape, Dims{large});
    EXPECT_EQ(bytes_of(*read, "b"), "end");
    // The checksum of so many zeros, from those of fewer.
    uint32_t crc = 0;
    uint32_t of_power = crc32(std::string_view("\0", 1));
    for (int bit = 0; bit < 33; ++bit) {
        const int64_t power = int64_t{1} << bit;
        if ((large & power) != 0) crc = crc32_joined(of_power, crc, large & (power - 1));
        of_power = crc32_joined(of_power, of_power, power);
    }
    const std::string path = dir / "out/model.pt";
    const auto file = open_file(posix_file_system(), path, OpenMode::read);
    PartReader part(*file, path, 0, file->size());
    const ZipArchive archive = ZipArchive::read(part);
    EXPECT_EQ(archive.find("data/0")->crc, crc);
    EXPECT_GT(archive.find("data/1")->header, large);
}

}  // namespace
}  // namespace tsr::testing
