// Headers and manifests that someone made on purpose: with right checksums and wrong content. Each is refused; none
// crashes, allocates without bound, or reaches outside the checkpoint's directory.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <future>
#include <random>

#include "base/attempt.hpp"
#include "base/crc32c.hpp"
#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/root/root.hpp"
#include "fixture.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

const std::string save_id = "5f3a91c2-0000-4000-8000-000000000000";

// A header of given tensors and offsets, padded, of a file with `data_bytes` of data.
std::string header_of(std::string tensors, std::string sharding, int64_t data_bytes, const std::string& extra = "") {
    const auto blocks = static_cast<size_t>((data_bytes + block_bytes - 1) / block_bytes);
    std::string inner;
    append_json_string(inner, "{\"save_id\":\"" + save_id + "\",\"block_bytes\":1048576,\"crc32c\":\"" +
                                  std::string(8 * blocks, '0') + "\"}");
    std::string offsets;
    append_json_string(offsets, sharding);
    std::string json = "{\"__metadata__\":{\"tessera\":" + inner + ",\"DCP_SHARDING_INFO\":" + offsets + extra + "}" +
                       (tensors.empty() ? "" : ",") + tensors + "}";
    while ((json.size() + 8) % 4096 != 0) json += ' ';
    std::string text(8, '\0');
    for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(json.size() >> (8 * i));
    return text + json;
}

RankFile parse(const std::string& header, int64_t data_bytes) {
    return RankFile::parse(header, "f", static_cast<int64_t>(header.size()) + data_bytes, save_id);
}

std::string refusal(const std::string& tensors, const std::string& sharding, int64_t data_bytes) {
    try {
        (void)parse(header_of(tensors, sharding, data_bytes), data_bytes);
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::corrupt);
        return error.what();
    }
    return "taken";
}

const char* const one = R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
const char* const offsets_of_a = R"({"a":{"saved_offsets":[0]}})";

TEST(HostileHeader, ASoundOneIsTaken) {
    EXPECT_EQ(refusal(one, offsets_of_a, 4), "taken");
    EXPECT_EQ(refusal("", "{}", 0), "taken");
}

TEST(HostileHeader, WrongNumbersAreRefused) {
    const auto with = [](const std::string& fields) { return "\"a\":{" + fields + "}"; };
    for (const char* fields : {
             R"("dtype":"U8","shape":[5],"data_offsets":[0,4])",                      // size
             R"("dtype":"U8","shape":[4],"data_offsets":[1,5])",                      // hole
             R"("dtype":"U8","shape":[4],"data_offsets":[4,0])",                      // backwards
             R"("dtype":"U8","shape":[4],"data_offsets":[-4,0])",                     // before the data
             R"("dtype":"U8","shape":[8],"data_offsets":[0,8])",                      // beyond the file
             R"("dtype":"U8","shape":[-4],"data_offsets":[0,4])",                     // negative
             R"("dtype":"U8","shape":[4.0],"data_offsets":[0,4])",                    // not an integer
             R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])",  // overflow
             R"("dtype":"U8","shape":[9223372036854775807,2],"data_offsets":[0,4])",
             R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,4])",
             R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,4])",  // dimensions
             R"("dtype":"Q9","shape":[4],"data_offsets":[0,4])",
             R"("dtype":"U8","shape":[4],"data_offsets":[0])",
             R"("dtype":"U8","shape":4,"data_offsets":[0,4])",
             R"("shape":[4],"data_offsets":[0,4])",
         }) {
        EXPECT_NE(refusal(with(fields), offsets_of_a, 4), "taken") << fields;
    }
    EXPECT_NE(refusal(one, R"({"a":{"saved_offsets":[0,0]}})", 4), "taken");
    EXPECT_NE(refusal(one, R"({"a":{"saved_offsets":[-1]}})", 4), "taken");
    EXPECT_NE(refusal(one, R"({"b":{"saved_offsets":[0]}})", 4), "taken");
    EXPECT_NE(refusal(one, "{}", 4), "taken");
    EXPECT_NE(refusal(one, "[]", 4), "taken");
    EXPECT_NE(refusal(one, offsets_of_a, 5), "taken") << "bytes behind the last tensor";
}

TEST(HostileHeader, OverlapsAndDuplicatesAreRefused) {
    const std::string two = std::string(one) + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]})";
    EXPECT_NE(refusal(two, R"({"a":{"saved_offsets":[0]},"b":{"saved_offsets":[0]}})", 6), "taken");
    EXPECT_NE(refusal(std::string(one) + "," + one, offsets_of_a, 4), "taken");
    EXPECT_NE(refusal(one, R"({"a":{"saved_offsets":[0]},"a":{"saved_offsets":[1]}})", 4), "taken");
}

TEST(HostileHeader, LengthWordsAreNotTrusted) {
    const TempDir dir;
    for (const uint64_t length : {uint64_t{0}, uint64_t{4088}, uint64_t{99'999'999}, uint64_t{100'000'001},
                                  uint64_t{1} << 40, UINT64_MAX, UINT64_MAX - 7}) {
        std::string text(4096, ' ');
        for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(length >> (8 * i));
        spill(dir / "f", text);
        const Error error =
            error_of([&] { (void)RankFile::read(posix_file_system(), dir / "f", 4096, crc32c(text), save_id); });
        EXPECT_EQ(error.code(), Code::corrupt) << length;
    }
}

// --- manifests ---

std::string manifest_of(const std::string& files, const std::string& tensors, const std::string& aliases = "",
                        const std::string& values = "", const std::string& mesh = "1",
                        const std::string& placement = "\"R\"", const std::string& world = "1") {
    std::string text = R"({"format":"tessera","version":1,"sequence":1,"step":1,"save_id":")" + save_id +
                       R"(","committed":"","writer":{"library":"","language":"","version":""},"world_size":)" + world +
                       "," + R"("meshes":[{"sizes":[)" + mesh + R"(]}],"layouts":[{"mesh":0,"placements":[)" +
                       placement + R"(]}],"files":[)" + files + R"(],"tensors":{)" + tensors + R"(},"aliases":{)" +
                       aliases + R"(},"values":{)" + values + R"(},"metrics":{},)";
    return text + "\"crc32c\":\"" + hex8(crc32c(text)) + "\"}\n";
}

std::string manifest_refusal(const std::string& text) {
    try {
        (void)Manifest::parse(text, "m");
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::corrupt) << error.what();
        return error.what();
    }
    return "taken";
}

const char* const file = R"(["rank-00000.safetensors",4096,"00000000"])";

TEST(HostileManifest, ASoundOneIsTaken) {
    EXPECT_EQ(manifest_refusal(manifest_of(file, R"("a":{"dtype":"F32","shape":[2],"layout":0})")), "taken");
    EXPECT_EQ(manifest_refusal(manifest_of("", "")), "taken");
}

TEST(HostileManifest, PathsCannotLeaveTheDirectory) {
    for (const char* name :
         {"../rank-00000.safetensors", "/etc/passwd", "rank-00000.safetensors/../x", "rank-0.safetensors",
          "rank-00000.safetensors\\u0000", "", ".", "rank-00000..safetensors", "rank-/../.safetensors",
          "rank-00000.1.2.safetensors", "RANK-00000.safetensors", "rank-00000.safetensorsx"}) {
        EXPECT_NE(manifest_refusal(manifest_of("[\"" + std::string(name) + "\",4096,\"00000000\"]", "")), "taken")
            << name;
    }
}

TEST(HostileManifest, WrongContentIsRefused) {
    for (const char* tensor : {
             R"("a":{"dtype":"F32","shape":[2],"layout":1})",
             R"("a":{"dtype":"F32","shape":[2],"layout":-1})",
             R"("a":{"dtype":"F32","shape":[-2],"layout":0})",
             R"("a":{"dtype":"F32","shape":[4611686018427387904,4],"layout":0})",
             R"("a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"layout":0})",
             R"("a":{"dtype":"F99","shape":[2],"layout":0})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"files":[1]})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"files":[-1]})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"files":[0,0]})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"files":[[0,2147483647]]})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"files":[[0,2147483648]]})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"files":[[0,1,9999999]]})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"split":0})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"split":1048577})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0,"split":1048576})",
             R"("a":{"dtype":"F32","shape":[],"layout":0,"split":2})",
             R"("a":{"dtype":"F32","shape":[2],"boxes":[]})",
             R"("a":{"dtype":"F32","shape":[2],"boxes":[[[0],[1],0]]})",
             R"("a":{"dtype":"F32","shape":[2],"boxes":[[[0],[2],0],[[0],[2],0]]})",
             R"("a":{"dtype":"F32","shape":[2],"boxes":[[[0],[2],0],[[1],[1],0]]})",
             R"("a":{"dtype":"F32","shape":[2],"boxes":[[[0],[3],0]]})",
             R"("a":{"dtype":"F32","shape":[2],"boxes":[[[-1],[2],0]]})",
             R"("a":{"dtype":"F32","shape":[2],"boxes":[[[0,0],[2,1],0]]})",
             R"("a":{"dtype":"F32","shape":[2],"boxes":[[[0],[2],7]]})",
             R"("":{"dtype":"F32","shape":[2],"layout":0})",
             R"("a":{"dtype":"F32","shape":[2],"layout":0},"a":{"dtype":"F32","shape":[2],"layout":0})",
         }) {
        EXPECT_NE(manifest_refusal(manifest_of(file, tensor)), "taken") << tensor;
    }
    for (const char* told : {R"("layout":0)", R"("layout":0,"files":[])", R"("boxes":[])"}) {
        const std::string empty = fmt::format(R"("a":{{"dtype":"F32","shape":[0],{}}})", told);
        EXPECT_NE(manifest_refusal(manifest_of("", empty)), "taken") << "it stands in no file: " << told;
    }
    const std::string sound = R"("a":{"dtype":"F32","shape":[2],"layout":0})";
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, R"("b":"c")")), "taken");
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, R"("a":"a")")), "taken");
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, "", R"("v":{"~":"object","v":"os.system"})")), "taken");
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, "", R"("v":{"~":"bytes","v":"AAE"})")), "taken");
    EXPECT_NE(manifest_refusal(manifest_of(std::string(file) + "," + file, sound)), "taken");
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, "", "", "2")), "taken") << "the mesh is not the world";
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, "", "", "1", "\"S(1)\"")), "taken");
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, "", "", "1", "\"S(9)\"")), "taken");
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, "", "", "1048577")), "taken");
    EXPECT_NE(manifest_refusal(manifest_of(file, sound, "", "", "1,1")), "taken");
}

TEST(HostileManifest, NamesOfAliasesAndValuesAreNamesToo) {
    const std::string sound = R"("a":{"dtype":"F32","shape":[2],"layout":0})";
    const std::string long_name(1025, 'n');
    for (const std::string& name : {std::string(), std::string("b\\u0000c"), std::string("\\u001b[2J"), long_name}) {
        const std::string alias = fmt::format(R"("{}":"a")", name);
        const std::string value = fmt::format(R"("{}":1)", name);
        EXPECT_NE(manifest_refusal(manifest_of(file, sound, alias)), "taken") << name;
        EXPECT_NE(manifest_refusal(manifest_of(file, sound, "", value)), "taken") << name;
    }
    EXPECT_EQ(manifest_refusal(manifest_of(file, sound, R"("b":"a")", R"("v":1)")), "taken");
}

// What is refused is told, but not all of it.
TEST(HostileManifest, MessagesStayShortWhateverItSays) {
    const std::string text(1 << 20, 'x');
    const std::string sound = R"("a":{"dtype":"F32","shape":[2],"layout":0})";
    const std::string dtype = fmt::format(R"("a":{{"dtype":"{}","shape":[2],"layout":0}})", text);
    const std::string alias = fmt::format(R"("{0}":"{0}")", text);
    for (const std::string& refused :
         {manifest_of(fmt::format("[\"{}\",4096,\"00000000\"]", text), ""), manifest_of(file, dtype),
          manifest_of(file, fmt::format(R"("{}":{{}})", text)), manifest_of(file, sound, alias),
          manifest_of(file, sound, "", "", "1", "\"" + text + "\"")}) {
        const std::string told = manifest_refusal(refused);
        EXPECT_NE(told, "taken");
        EXPECT_LT(told.size(), 4096u) << told.substr(0, 200);
    }
    const std::string of_header = fmt::format(R"("{}":{{"dtype":"U9","shape":[4],"data_offsets":[0,4]}})", text);
    EXPECT_LT(refusal(of_header, offsets_of_a, 4).size(), 8192u);
}

// Each size is one that a file or a tensor can have, but no number holds their sum.
TEST(HostileManifest, SizesWhoseSumIsNoNumberAreRefused) {
    const TempDir dir;
    const auto opened = [&](const std::string& files, const std::string& tensors, const std::string& aliases = "") {
        spill(dir / "manifest.json", manifest_of(files, tensors, aliases));
        const auto error = attempt([&] { (void)Checkpoint::open(dir.path()); });
        if (error) {
            EXPECT_EQ(error->code(), Code::corrupt) << error->what();
        }
        return !error;
    };
    const std::string half = R"({"dtype":"U8","shape":[4611686018427387904],"layout":0})";  // 2^62
    const std::string huge = R"(["rank-00000.safetensors",9223372036854775807,"00000000"])";
    const std::string more = R"(["rank-00001.safetensors",1,"00000000"])";
    EXPECT_TRUE(opened(huge, "\"a\":" + half));
    EXPECT_FALSE(opened(huge + "," + more, "\"a\":" + half));
    EXPECT_FALSE(opened(huge, "\"a\":" + half + ",\"b\":" + half));
    EXPECT_FALSE(opened(huge, "\"a\":" + half, R"("b":"a")"));
}

// The next save's sequence is one more: neither it nor the sum may overflow.
// A million shards of thousands of tensors, in a few bytes each: to walk over them took minutes.
TEST(HostileManifest, ManyEmptyShardsCostNothing) {
    const std::string many = "1048576";
    const auto of_shapes = [&](const char* first) {
        std::string tensors;
        for (int i = 1; i <= 5000; ++i) {
            tensors +=
                fmt::format(R"({}"t{}":{{"dtype":"F32","shape":[{},{}],"layout":0}})", i == 1 ? "" : ",", i, first, i);
        }
        return manifest_of(file, tensors, "", "", many, "\"S(0)\"", many);
    };
    EXPECT_EQ(manifest_refusal(of_shapes("0")), "taken");
    EXPECT_EQ(manifest_refusal(of_shapes("1")), "taken");
    EXPECT_NE(manifest_refusal(of_shapes("2")).find("more pieces than there are files"), std::string::npos);
}

// The last piece that is not empty tells whether there are enough files.
TEST(HostileManifest, AsManyFilesAsPiecesThatAreNotEmptyAreEnough) {
    const std::string two = std::string(file) + R"(,["rank-00001.safetensors",4096,"00000000"])";
    const auto refused = [&](const char* files, const char* tensor, const char* placement) {
        const std::string text = manifest_of(files, fmt::format(R"("a":{{"dtype":"F32",{},"layout":0}})", tensor), "",
                                             "", "8", placement, "8");
        return manifest_refusal(text) != "taken";
    };
    for (const char* shape : {R"("shape":[2])", R"("shape":[2,5])", R"("shape":[0])"}) {
        EXPECT_FALSE(refused(two.c_str(), shape, "\"S(0)\"")) << shape;
    }
    EXPECT_TRUE(refused(file, R"("shape":[2])", "\"S(0)\""));
    EXPECT_TRUE(refused(two.c_str(), R"("shape":[3])", "\"S(0)\""));
    EXPECT_FALSE(refused(two.c_str(), R"("shape":[1,2],"split":4)", "\"R\""));
    EXPECT_TRUE(refused(two.c_str(), R"("shape":[1,3],"split":4)", "\"R\""));
    EXPECT_FALSE(refused(two.c_str(), R"("shape":[1,2],"split":4)", "\"S(0)\""));
    EXPECT_TRUE(refused(two.c_str(), R"("shape":[2,2],"split":4)", "\"S(0)\""));
}

TEST(HostileManifest, ASequenceAfterWhichNoneCanComeIsRefused) {
    const auto with_sequence = [](int64_t sequence) {
        std::string text = manifest_of("", "");
        text.replace(text.find("\"sequence\":1"), 12, fmt::format("\"sequence\":{}", sequence));
        text.erase(text.rfind("\"crc32c\""));
        return text + "\"crc32c\":\"" + hex8(crc32c(text)) + "\"}\n";
    };
    for (const int64_t sequence : {INT64_MAX, INT64_MAX - 1, max_sequence + 1}) {
        EXPECT_NE(manifest_refusal(with_sequence(sequence)), "taken") << sequence;
    }
    EXPECT_EQ(manifest_refusal(with_sequence(max_sequence)), "taken");

    const TempDir dir;
    OwnedState owned;
    owned.add_whole({"w", DType::f32, {10}});
    Saver saver(nullptr, dir.path(), saver_options());
    const auto put = [&](int64_t sequence) {
        std::filesystem::create_directory(dir / "step-00000007-5f3a91c2");
        spill(dir / "step-00000007-5f3a91c2/manifest.json", with_sequence(sequence));
    };
    put(INT64_MAX);
    saver.save(1, owned.state);
    EXPECT_EQ(scan_root(posix_file_system(), dir.path()).back().sequence, 1);
    put(max_sequence);
    const Error error = error_of([&] { saver.save(2, owned.state); });
    EXPECT_EQ(error.code(), Code::corrupt);
    EXPECT_NE(std::string(error.what()).find("step-00000007-5f3a91c2"), std::string::npos) << error.what();
}

// Random edits of sound text, with the checksum made right again: whatever comes of it, it is an Error or a manifest.
TEST(HostileManifest, RandomEditsNeverCrash) {
    const uint32_t seed = 99;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::string sound = manifest_of(
        file,
        R"("a":{"dtype":"F32","shape":[20,3],"layout":0,"split":1,"files":[0]},"b":{"dtype":"U8","shape":[2],"boxes":[[[0],[2],0]]})",
        R"("c":"a")", R"("v":{"~":"tuple","v":[1,2.5,null]})");
    const std::string body = sound.substr(0, sound.rfind("\"crc32c\""));
    int taken = 0;
    for (int i = 0; i < 20000; ++i) {
        std::string edited = body;
        for (uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
            const size_t at = random() % edited.size();
            switch (random() % 3) {
                case 0: edited[at] = static_cast<char>(random()); break;
                case 1: edited.erase(at, 1 + random() % 4); break;
                default: edited.insert(at, edited.substr(random() % edited.size(), random() % 8));
            }
        }
        edited += "\"crc32c\":\"" + hex8(crc32c(edited)) + "\"}\n";
        try {
            const Manifest manifest = Manifest::parse(edited, "m");
            ++taken;
            // What was taken can be walked.
            for (const auto& named : manifest.tensors) {
                const auto& tensor = *named.second;
                tensor.for_each_piece(Box::whole(tensor.shape), [&](const Box& box, int index) {
                    ASSERT_TRUE(box.inside(tensor.shape));
                    ASSERT_LT(static_cast<size_t>(index), manifest.files.size());
                });
            }
        } catch (const Error& error) {
            ASSERT_TRUE(error.code() == Code::corrupt || error.code() == Code::version) << error.what();
        }
    }
    EXPECT_GT(taken, 0);
    EXPECT_LT(taken, 10000);
}

TEST(HostileHeader, RandomEditsNeverCrash) {
    const uint32_t seed = 101;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::string sound =
        header_of(std::string(one) + R"(,"b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]})",
                  R"({"a":{"saved_offsets":[0]},"b":{"saved_offsets":[1,2]}})", 28);
    ASSERT_NO_THROW((void)parse(sound, 28));
    const size_t used = sound.find_last_not_of(' ') + 1;
    for (int i = 0; i < 20000; ++i) {
        std::string edited = sound;
        for (uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
            const size_t at = 8 + random() % (used - 8);
            edited[at] = random() % 2 == 0 ? static_cast<char>(random()) : edited[8 + random() % (used - 8)];
        }
        try {
            const RankFile parsed = parse(edited, 28);
            for (const FileEntry& entry : parsed.entries()) ASSERT_LE(entry.end, 28);
        } catch (const Error& error) {
            ASSERT_EQ(error.code(), Code::corrupt) << error.what();
        }
    }
}

TEST(Root, OnlyNamesOfOursAreTouched) {
    EXPECT_TRUE(is_step_directory_name("step-00000042-5f3a91c2"));
    EXPECT_TRUE(is_step_directory_name("step-1234567890-5f3a91c2"));
    for (const char* name : {"step-42-5f3a91c2", "step-00000042", "step-00000042-5F3A91C2", "step-00000042-5f3a91c",
                             "step-00000042-5f3a91c2.old", "xstep-00000042-5f3a91c2", "step-0000x042-5f3a91c2",
                             "step-00000042-5f3a91c2/..", "step-99999999999999999999-5f3a91c2"}) {
        EXPECT_FALSE(is_step_directory_name(name)) << name;
    }
}

TEST(Root, WhatIsNoCheckpointIsToldSo) {
    const TempDir dir;
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(dir / "nothing"); }).code(), Code::not_found);
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(dir.path()); }).code(), Code::not_found);
    spill(dir / "file", "x");
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(dir / "file"); }).code(), Code::not_found);
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(dir / "file/x"); }).code(), Code::not_found);
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(""); }).code(), Code::invalid_argument);
}

// --- what is no file ---

// Opening a pipe waits for whoever writes into it, which may be nobody.
TEST(HostileRoot, APipeInPlaceOfAFileIsRefusedAtOnce) {
    for (const char* name : {"step-00000001-5f3a91c2/manifest.json", "latest", "best", ".owner", "model.safetensors"}) {
        const TempDir dir;
        const std::string path = dir / name;
        std::filesystem::create_directories(std::filesystem::path(path).parent_path());
        ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
        auto looked = std::async(std::launch::async, [&] {
            for (const std::string& place : {dir.path(), path, dir / "best"}) {
                EXPECT_THROW((void)Checkpoint::open(place), Error) << name;
            }
            State nothing;
            (void)attempt([&] { Saver(nullptr, dir.path(), saver_options()).save(1, nothing); });
        });
        const bool in_time = looked.wait_for(patience(std::chrono::seconds(60))) == std::future_status::ready;
        EXPECT_TRUE(in_time) << name;
        if (in_time) continue;
        const int other_end = ::open(path.c_str(), O_RDWR | O_NONBLOCK);  // so that the test ends
        looked.wait();
        ::close(other_end);
    }
}

}  // namespace
}  // namespace tsr::testing
