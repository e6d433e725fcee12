// The parts by themselves: the zip's checksums and sizes beyond 32 bits, the pickle machine's values, what metadata
// refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

#include <functional>

#include "base/crc32.hpp"
#include "checkpoint/fixture.hpp"
#include "checkpoint/formats/torch_dcp/pickle_writer.hpp"
#include "fuzz/targets.hpp"
#include "places.hpp"

namespace tsr::testing {
namespace {

TEST(Crc32, IsTheOneOfZip) {
    EXPECT_EQ(crc32("123456789"), 0xcbf43926u);
    EXPECT_EQ(crc32("789", crc32("123456")), 0xcbf43926u);
    EXPECT_EQ(crc32(""), 0u);
    for (size_t split = 0; split <= 9; ++split) {
        const std::string_view text = "123456789";
        EXPECT_EQ(
            crc32_joined(crc32(text.substr(0, split)), crc32(text.substr(split)), static_cast<int64_t>(9 - split)),
            0xcbf43926u);
    }
}

TEST(Zip, WhatIsWrittenIsReadAgain) {
    const std::string data(70000, 'd');
    ZipWriter writer("folder", 0);
    writer.add("small", "content");
    writer.add("empty", "");
    writer.add_data("data/0", 70000, crc32(data));
    std::string text = writer.take_text();
    EXPECT_EQ(text.size() % 4096, 0u) << "large data is aligned";
    text += data;
    writer.add("last", std::string(100, 'x'));
    writer.finish();
    text += writer.take_text();
    EXPECT_EQ(static_cast<int64_t>(text.size()), writer.size_bytes());

    // In the middle of a larger file.
    const std::string whole = "before" + text + "after";
    fuzz::MemoryFile file(whole);
    const std::string path = "f";
    PartReader part(file, path, 6, static_cast<int64_t>(text.size()));
    const ZipArchive archive = ZipArchive::read(part);
    ASSERT_EQ(archive.entries().size(), 4u);
    EXPECT_EQ(archive.read_entry(part, *archive.find("small"), 100), "content");
    EXPECT_EQ(archive.read_entry(part, *archive.find("empty"), 100), "");
    EXPECT_EQ(archive.read_entry(part, *archive.find("data/0"), 100000), data);
    EXPECT_EQ(archive.find("nothing"), nullptr);
    EXPECT_EQ(error_of([&] { (void)archive.read_entry(part, *archive.find("last"), 99); }).code(), Code::unsupported);
}

// The data is a hole in a sparse file: sizes and places beyond 4 GiB cost nothing here.
TEST(Zip, SizesBeyond32BitsAreWrittenAndRead) {
    const TempDir dir;
    const int64_t large = (int64_t{5} << 30) + 64;
    ZipWriter writer("archive", 0);
    writer.add("data.pkl", "N.");
    writer.add_data("data/0", large, 1);
    const std::string before = writer.take_text();
    writer.add("version", "3\n");
    writer.finish();
    const std::string after = writer.take_text();
    const std::string path = dir / "f";
    spill(path, before);
    ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(before.size()) + large), 0);
    std::ofstream(path, std::ios::binary | std::ios::app) << after;

    const auto file = open_file(posix_file_system(), path, OpenMode::read);
    ASSERT_EQ(file->size(), writer.size_bytes());
    PartReader part(*file, path, 0, file->size());
    const ZipArchive archive = ZipArchive::read(part);
    ASSERT_NE(archive.find("data/0"), nullptr);
    EXPECT_EQ(archive.find("data/0")->size, large);
    EXPECT_EQ(archive.data_begin(part, *archive.find("data/0")), static_cast<int64_t>(before.size()));
    EXPECT_EQ(archive.read_entry(part, *archive.find("version"), 10), "3\n");
}

// A file that is small on the disk may claim any size.
TEST(Zip, ADirectoryThatIsAHoleIsRefusedUnread) {
    const TempDir dir;
    const int64_t hole = int64_t{1} << 40;
    std::string end;
    const auto put = [&](uint64_t value, int bytes) {
        for (int i = 0; i < bytes; ++i) end += static_cast<char>(value >> (8 * i));
    };
    put(0x06064b50, 4);
    put(44, 8);
    put(45, 2);
    put(45, 2);
    put(0, 8);
    put(1, 8);
    put(1, 8);
    put(static_cast<uint64_t>(hole), 8);
    put(0, 8);
    put(0x07064b50, 4);
    put(0, 4);
    put(static_cast<uint64_t>(hole), 8);
    put(1, 4);
    put(0x06054b50, 4);
    put(0, 4);
    put(0xffffffff, 4);
    put(0xffffffffffffffff, 8);
    put(0, 2);
    const std::string path = dir / "f";
    spill(path, "");
    ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(hole)), 0);
    std::ofstream(path, std::ios::binary | std::ios::app) << end;
    const auto file = open_file(posix_file_system(), path, OpenMode::read);
    PartReader part(*file, path, 0, file->size());
    const Error error = error_of([&] { (void)ZipArchive::read(part); });
    EXPECT_EQ(error.code(), Code::unsupported);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("directory has 1099511627776 bytes"));
}

Json value_in(const std::string& text) {
    const pickle::Tree tree = pickle::Tree::parse(text, "p");
    int64_t budget = 1'000'000;
    return value_of(tree, tree.root(), budget);
}

TEST(Pickle, TypedValuesComeBackAsTheyWere) {
    for (const char* text : {
             "null",
             "true",
             "false",
             "0",
             "255",
             "256",
             "65536",
             "-1",
             "2147483647",
             "2147483648",
             "-2147483648",
             "-2147483649",
             "9223372036854775807",
             "-9223372036854775808",
             "0.0",
             "-0.0",
             "1e+300",
             R"("text")",
             R"("größer €")",
             R"("")",
             "[]",
             "[1,[2,[]]]",
             "{}",
             R"({"a":1,"b":{"c":null}})",
             R"({"~":"tuple","v":[]})",
             R"({"~":"tuple","v":[1,{"~":"tuple","v":[2]}]})",
             R"({"~":"map","v":[[1,"a"],["~",2]]})",
             R"({"~":"int","v":"9223372036854775808"})",
             R"({"~":"int","v":"-9223372036854775809"})",
             R"({"~":"int","v":"123456789012345678901234567890"})",
             R"({"~":"int","v":"-340282366920938463463374607431768211456"})",
             R"({"~":"double","v":"nan"})",
             R"({"~":"double","v":"inf"})",
             R"({"~":"double","v":"-inf"})",
             R"({"~":"bytes","v":""})",
             R"({"~":"bytes","v":"AP+A"})",
             R"({"~":"bytes","v":"/w=="})",
         }) {
        pickle::PickleWriter writer;
        writer.typed(parse_value(text, "value"));
        EXPECT_EQ(value_in(writer.finish()).dump(), parse_value(text, "value").dump());
    }
}

TEST(Pickle, AMessageNamesPlaceAndOpcode) {
    const Error error = error_of([] { (void)pickle::Tree::parse("\x80\x02]NNs.", "x"); });
    EXPECT_EQ(error.code(), Code::corrupt);
    EXPECT_STREQ(error.what(), "x: byte 5, opcode SETITEM: cannot add items to a list");
    EXPECT_EQ(error_of([] { (void)pickle::Tree::parse("I1\n.", "x"); }).code(), Code::unsupported);
}

// Values that are small on disk and endless in memory.
TEST(Pickle, BombsEndInAnError) {
    std::string bomb = "\x80\x02Nq";
    bomb += '\0';
    for (int i = 0; i < 200; ++i) {
        bomb += {'0', 'h', static_cast<char>(i), '2', '\x86', 'q', static_cast<char>(i + 1)};
    }
    bomb += '.';
    EXPECT_EQ(error_of([&] { (void)value_in(bomb); }).code(), Code::unsupported);
    EXPECT_EQ(error_of([] { (void)value_in(std::string("\x80\x02]q\0h\0a.", 9)); }).code(), Code::unsupported)
        << "a cycle";
    std::string deep = "\x80\x02N";
    deep.append(1'000'000, '\x85');
    EXPECT_EQ(error_of([&] { (void)value_in(deep + "."); }).code(), Code::unsupported);
}

TEST(Metadata, WhatIsWrittenIsReadAgain) {
    DcpMetadata metadata;
    metadata.files = {"__0_0.distcp", "sub/__1_0.distcp"};
    metadata.tensors["a"] = {
        DType::bf16, {4, 3}, {{{{0, 0}, {2, 3}}, {0, 100, 50}}, {{{2, 0}, {2, 3}}, {1, int64_t{1} << 40, 70}}}};
    metadata.tensors["scalar"] = {DType::i64, {}, {{{{}, {}}, {0, 0, 100}}}};
    metadata.tensors["empty"] = {DType::f32, {0, 4}, {}};
    metadata.values["v"] = {1, 5, 6};
    const DcpMetadata again = DcpMetadata::parse(metadata.dump(), "m");
    EXPECT_EQ(again.files.size(), 2u);
    ASSERT_EQ(again.tensors.size(), 3u);
    const DcpTensor& a = again.tensors.at("a");
    EXPECT_EQ(a.dtype, DType::bf16);
    ASSERT_EQ(a.chunks.size(), 2u);
    EXPECT_EQ(a.chunks[1].box, (Box{{2, 0}, {2, 3}}));
    EXPECT_EQ(a.chunks[1].item.offset, int64_t{1} << 40);
    EXPECT_EQ(again.files[static_cast<size_t>(a.chunks[1].item.file)], "sub/__1_0.distcp");
    EXPECT_EQ(again.values.at("v").length, 6);
    EXPECT_TRUE(again.tensors.at("empty").chunks.empty());
}

// Each look for a field goes through all, and any number of objects may share them.
TEST(Metadata, AnObjectOfVeryManyFieldsIsRefused) {
    pickle::PickleWriter writer;
    writer.global("torch.distributed.checkpoint.metadata", "Metadata");
    writer.empty_tuple();
    writer.new_object();
    writer.empty_dict();
    writer.mark();
    for (int i = 0; i < 33; ++i) {
        writer.text("field " + std::to_string(i));
        writer.none();
    }
    writer.setitems();
    writer.build();
    const Error error = error_of([&] { (void)DcpMetadata::parse(writer.finish(), "m"); });
    EXPECT_EQ(error.code(), Code::corrupt);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("too many fields"));
}

std::string refusal_of(const std::string& name) {
    const std::string text = slurp(tsr::testing::source_dir() + "/tests/fuzz/corpus/metadata/" + name);
    EXPECT_FALSE(text.empty()) << name;
    try {
        const DcpMetadata metadata = DcpMetadata::parse(text, "m");
        return metadata.unreadable.contains("a") ? "unreadable: " + metadata.unreadable.at("a") : "taken";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::corrupt) << name;
        return error.what();
    }
}

TEST(Metadata, PathsCannotLeaveTheDirectory) {
    EXPECT_EQ(refusal_of("made"), "taken");
    for (const char* name : {"traversal", "inner-traversal", "absolute", "nul", "empty-path", "dot"}) {
        EXPECT_NE(refusal_of(name).find("invalid or outside the directory"), std::string::npos)
            << name << ": " << refusal_of(name);
    }
}

TEST(Metadata, ChunksThatDoNotFitAreRefused) {
    for (const char* name :
         {"negative-offset", "overflow", "beyond-64", "negative-size", "huge-size", "outside", "hole", "overlap",
          "twice", "other-dims", "no-place", "second-without-place", "chunk-bomb", "not-metadata", "dtype"}) {
        const std::string told = refusal_of(name);
        EXPECT_TRUE(told != "taken" && !told.starts_with("unreadable")) << name << ": " << told;
    }
}

TEST(Metadata, WhatIsSoundButNotReadIsTold) {
    EXPECT_NE(refusal_of("quantised").find("quint8"), std::string::npos);
    EXPECT_NE(refusal_of("transformed").find("stream.zstd/1"), std::string::npos);
    EXPECT_NE(refusal_of("nine-dims").find("9 dimensions"), std::string::npos);
    for (const char* name : {"quantised", "transformed", "nine-dims"}) {
        EXPECT_TRUE(refusal_of(name).starts_with("unreadable")) << refusal_of(name);
    }
}

}  // namespace
}  // namespace tsr::testing
