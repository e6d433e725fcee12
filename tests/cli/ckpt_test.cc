// `tessera ckpt` as a user calls it: output, JSON, exit codes.
#include <gmock/gmock.h>

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <sstream>

#include "base/json.hpp"
#include "checkpoint/fixture.hpp"
#include "checkpoint/root/root.hpp"
#include "cli/command.hpp"
#include "sanitized.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class CkptCommand : public ::testing::Test {
   protected:
    void SetUp() override {
        expect_all_well(run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            owned.add_whole({"model.fc1.bias", DType::f32, {64}});
            owned.add_sharded(
                {"model.fc1.weight", DType::f32, {128, 64}},
                Layout::placed({128, 64}, std::vector<int>{2}, std::vector<Placement>{Placement::shard(0)}),
                comm->rank());
            owned.state.set_value("epoch", Json(int64_t{3}));
            Saver saver(comm, root_, saver_options());
            saver.save(50, owned.state);
            owned.state.set_metric("loss", 0.07125);
            saver.save(100, owned.state);
        }));
    }
    TempDir dir_;
    std::string root_ = dir_ / "root";
};

TEST_F(CkptCommand, LsIsATable) {
    const Result result = tessera("ls " + root_);
    EXPECT_EQ(result.code, 0);
    std::vector<std::string> lines;
    std::istringstream stream(result.output);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    ASSERT_EQ(lines.size(), 3u) << result.output;
    EXPECT_THAT(lines[0], ::testing::MatchesRegex("step +committed +ranks +size +loss +path"));
    EXPECT_THAT(lines[1], ::testing::MatchesRegex("  50  20..-..-.. ..:..:.. UTC +2 .*"));
    EXPECT_THAT(lines[1], Not(HasSubstr("latest")));
    EXPECT_THAT(lines[2], HasSubstr("0.07125"));
    EXPECT_TRUE(lines[2].ends_with("  latest")) << lines[2];
    const Json json = Json::parse(tessera("ls --json " + root_).output, "ls");
    ASSERT_EQ(json.as_array().size(), 2u);
    EXPECT_EQ(json.as_array()[1].at("step").as_int(), 100);
    EXPECT_TRUE(json.as_array()[1].at("latest").as_bool());
    EXPECT_EQ(json.as_array()[1].at("state").as_string(), "committed");
}

TEST_F(CkptCommand, LsOfOneCheckpointShowsThatOne) {
    const std::string newest = Checkpoint::open(root_)->path();
    for (const std::string& path : {newest, root_ + "/latest", newest + "/manifest.json"}) {
        SCOPED_TRACE(path);
        const Result result = tessera("ls " + path);
        EXPECT_EQ(result.code, 0);
        EXPECT_THAT(result.output, HasSubstr(newest + " is a checkpoint, not a root"));
        EXPECT_THAT(result.output, HasSubstr(newest + "  latest\n"));
        const Json json = Json::parse(tessera("ls --json " + path, "2>/dev/null").output, "ls");
        ASSERT_EQ(json.as_array().size(), 1u);
        EXPECT_EQ(json.as_array()[0].at("step").as_int(), 100);
        EXPECT_TRUE(json.as_array()[0].at("latest").as_bool());
    }
    const std::vector<SavedStep> saves = scan_root(posix_file_system(), root_);
    const Json older =
        Json::parse(tessera("ls --json " + root_ + "/" + saves[0].directory, "2>/dev/null").output, "ls");
    EXPECT_FALSE(older.as_array().at(0).at("latest").as_bool());
}

TEST_F(CkptCommand, LsWithoutCheckpointsEndsWithOneAndSaysWhereTheyAre) {
    const Result above = tessera("ls " + dir_.path());
    EXPECT_EQ(above.code, 1);
    EXPECT_THAT(above.output, HasSubstr(dir_.path() + " holds no checkpoint"));
    EXPECT_THAT(above.output, HasSubstr("run `tessera ckpt ls " + root_ + "`"));
    std::filesystem::create_directory(dir_ / "empty");
    const Result nothing = tessera("ls " + (dir_ / "empty"));
    EXPECT_EQ(nothing.code, 1);
    EXPECT_THAT(nothing.output, HasSubstr("pass the root of the trainer's saver"));
    EXPECT_EQ(tessera("ls --json " + (dir_ / "empty"), "2>/dev/null").output, "[]\n");
    EXPECT_EQ(tessera("tree " + (dir_ / "empty")).code, 1);
}

TEST_F(CkptCommand, AFailureIsAnObjectInJson) {
    const std::string out = " " + (dir_ / "out");
    const std::pair<const char*, std::string> commands[] = {{"ls", ""},
                                                            {"info", ""},
                                                            {"tree", ""},
                                                            {"cat", " name"},
                                                            {"shards", ""},
                                                            {"diff", " " + root_},
                                                            {"verify", ""},
                                                            {"convert", out + " --to safetensors"},
                                                            {"gc", ""},
                                                            {"latest", ""},
                                                            {"rename-keys", out + " --prefix p."}};
    for (const auto& [name, rest] : commands) {
        SCOPED_TRACE(name);
        const Result result = tessera(std::string(name) + " --json " + root_ + "/nope" + rest, "2>/dev/null");
        EXPECT_EQ(result.code, 2);
        const Json json = Json::parse(result.output, "error");
        EXPECT_EQ(json.at("error").at("code").as_string(), "NOT_FOUND");
        EXPECT_THAT(json.at("error").at("message").as_string(), HasSubstr(root_ + "/nope"));
        if (std::string(name) == "info") {
            EXPECT_EQ(json.at("error").at("message").as_string(),
                      "no checkpoint at " + root_ + "/nope: the path does not exist");
        }
    }
}

TEST_F(CkptCommand, HelpTellsTheExitCodes) {
    for (const char* name :
         {"", "ls", "info", "tree", "cat", "shards", "diff", "latest", "gc", "convert", "rename-keys", "verify"}) {
        const Result result = tessera(std::string(name) + " --help");
        EXPECT_EQ(result.code, 0);
        EXPECT_THAT(result.output, HasSubstr("Exit codes:")) << name;
        const bool is_convert = std::string(name) == "convert";
        EXPECT_EQ(result.output.find("were left out") != std::string::npos, is_convert) << name;
    }
}

// A terminal obeys control characters, and a manifest may come from anyone.
TEST_F(CkptCommand, ControlCharactersOfAManifestDoNotReachTheTerminal) {
    const std::string path = Checkpoint::open(root_)->path() + "/manifest.json";
    Manifest manifest = Manifest::parse(slurp(path), path);
    manifest.committed = R"(\u001b[2J)";  // as it stands there
    manifest.writer.library = "\033]0;x\007";
    manifest.metrics.emplace("loss\x7f", Json("\x7f\xc2\x9b"));
    manifest.save_id = R"(\u001b[2J)";  // the rank files are of another, which verify tells
    spill(path, manifest.dump());
    for (const char* command : {"info ", "ls ", "verify ", "verify --fast "}) {
        const std::string output = tessera(command + root_).output;
        EXPECT_THAT(output, HasSubstr("?")) << command;
        for (const char* control : {"\033", "\x7f", "\xc2\x9b"}) {
            EXPECT_THAT(output, Not(HasSubstr(control))) << command;
        }
    }
}

// Each tensor names all ranks that hold it: too much to be in memory at once.
TEST_F(CkptCommand, TreeAsJsonIsWrittenAsItIsMade) {
    const std::string path = Checkpoint::open(root_)->path() + "/manifest.json";
    Manifest manifest = Manifest::parse(slurp(path), path);
    constexpr int ranks = 1 << 17;
    const std::vector<int> mesh{ranks};
    const std::vector<Placement> placed{Placement::replicate()};
    SavedTensor everywhere;
    everywhere.dtype = DType::f32;
    everywhere.shape = Dims{1};
    everywhere.layout = Layout::placed(everywhere.shape, mesh, placed);
    const auto shared = std::make_shared<const SavedTensor>(everywhere);
    manifest.world_size = ranks;
    manifest.tensors.clear();
    manifest.aliases.clear();
    for (int i = 0; i < 64; ++i) manifest.tensors.emplace(std::to_string(i), shared);
    spill(path, manifest.dump());
    // A sanitizer's shadow takes terabytes of addresses.
    const std::string limit = sanitized ? "" : "ulimit -v 262144; ";
    const std::string command = limit + binary_dir() + "/tessera ckpt tree --json " + root_ + " | tail -c 100";
    FILE* pipe = ::popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    char text[128] = {};
    const size_t size = std::fread(text, 1, sizeof text - 1, pipe);
    EXPECT_EQ(::pclose(pipe), 0);
    EXPECT_THAT(std::string(text, size), HasSubstr("\"values\":{\"epoch\":"));
}

TEST_F(CkptCommand, LongWorkShowsItsProgressOnATerminalOnly) {
    EXPECT_THAT(tessera("verify " + root_).output, Not(HasSubstr("%")));
    const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    ASSERT_GE(terminal, 0);
    ASSERT_EQ(::grantpt(terminal), 0);
    ASSERT_EQ(::unlockpt(terminal), 0);
    char name[64];
    ASSERT_EQ(::ptsname_r(terminal, name, sizeof name), 0);
    const int other_end = ::open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);  // keeps what was written there until it is read
    ASSERT_GE(other_end, 0);
    const std::pair<std::string, std::string> commands[] = {{"verify", ""},
                                                            {"convert", (dir_ / "a") + " --to native"},
                                                            {"convert", (dir_ / "b") + " --to safetensors"},
                                                            {"convert", (dir_ / "c") + " --to torch_dcp"},
                                                            {"diff", root_},
                                                            {"cat", "model.fc1.weight"},
                                                            {"rename-keys", (dir_ / "d") + " --prefix p."}};
    for (const auto& [command, rest] : commands) {
        SCOPED_TRACE(command + " " + rest);
        EXPECT_EQ(tessera(command + " " + root_ + " " + rest, std::string("2>") + name).code, 0);
        char text[1024];
        const ssize_t n = ::read(terminal, text, sizeof text);
        const std::string shown(text, n > 0 ? static_cast<size_t>(n) : 0);
        EXPECT_THAT(shown, ::testing::ContainsRegex(command + ": [0-9]+ % of [0-9]+ KiB"));
    }
    ::close(other_end);
    ::close(terminal);
}

TEST_F(CkptCommand, ARootWhoseOnlySaveIsNotCommittedIsToldAsThat) {
    const std::string root = dir_ / "one";
    std::filesystem::remove(save_numbers(root, 1) + "/manifest.json");
    std::filesystem::remove(root + "/latest");
    const Result result = tessera("info " + root);
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.output, HasSubstr("holds 1 save, which is not committed: it has no manifest.json"));
}

TEST_F(CkptCommand, TreeShowsSoManyPartsOfNamesAndThoseThatFit) {
    const Result cut = tessera("tree --depth 1 " + root_);
    EXPECT_EQ(cut.code, 0);
    EXPECT_THAT(cut.output, HasSubstr("├── epoch"));
    EXPECT_THAT(cut.output, ::testing::ContainsRegex("└── model +\\([0-9]+ tensors, .*iB\\)"));
    EXPECT_THAT(cut.output, Not(HasSubstr("fc1")));
    const Result fit = tessera("tree --only '*.fc1.*' --only epo?h " + root_);
    EXPECT_THAT(fit.output, HasSubstr("epoch"));
    EXPECT_THAT(fit.output, HasSubstr("model.fc1"));
    const Json json = Json::parse(tessera("tree --json --only '*weight' " + root_, "2>/dev/null").output, "tree");
    ASSERT_EQ(json.at("tensors").as_object().size(), 1u);
    EXPECT_EQ(json.at("tensors").as_object()[0].key, "model.fc1.weight");
    EXPECT_TRUE(json.at("values").as_object().empty());
    const Result none = tessera("tree --only nope.* " + root_);
    EXPECT_EQ(none.code, 1);
    EXPECT_THAT(none.output, HasSubstr("no name that matches nope.*"));
}

TEST_F(CkptCommand, TreeTellsWhoHoldsWhat) {
    const Result result = tessera("tree " + root_ + "/latest");
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.output, HasSubstr("├── bias"));
    EXPECT_THAT(result.output, HasSubstr("f32   [128, 64]    32 KiB  dim 0 in 2 parts, written by ranks 0-1"));
    EXPECT_THAT(result.output, HasSubstr("epoch"));
    const Json json = Json::parse(tessera("tree --json " + root_).output, "tree");
    const Json& weight = json.at("tensors").at("model.fc1.weight");
    const auto& held = weight.at("held_by").as_array();
    ASSERT_EQ(held.size(), 2u);
    EXPECT_EQ(held[1].at("rank").as_int(), 1);
    EXPECT_EQ(held[1].at("offsets").as_array()[0].as_int(), 64);
    EXPECT_EQ(held[1].at("sizes").as_array()[1].as_int(), 64);
    EXPECT_EQ(weight.at("written_by").as_array()[1].at("file").as_string(), "rank-00001.safetensors");
}

TEST_F(CkptCommand, InfoTellsValuesAndWriter) {
    const Result result = tessera("info " + root_);
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.output, HasSubstr("tessera test from c++ 20"));
    EXPECT_THAT(result.output, HasSubstr("epoch = 3"));
    EXPECT_EQ(Json::parse(tessera("info --json " + root_).output, "info").at("values").at("epoch").as_int(), 3);
}

TEST_F(CkptCommand, VerifyEndsWithOneWhereSomethingIsWrong) {
    EXPECT_EQ(tessera("verify " + root_).code, 0);
    EXPECT_THAT(tessera("verify " + root_).output, HasSubstr("every byte checked"));
    const std::string save = Checkpoint::open(root_)->path();
    const std::string path = save + "/rank-00001.safetensors";
    std::string text = slurp(path);
    text[text.size() - 5] ^= 1;
    spill(path, text);
    EXPECT_EQ(tessera("verify --fast " + root_).code, 0) << "data is not read";
    const Result result = tessera("verify " + root_);
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.output, HasSubstr("rank-00001.safetensors: bytes 4096 to"));
    const Json json = Json::parse(tessera("verify --json " + root_).output, "verify");
    EXPECT_FALSE(json.at("sound").as_bool());
    EXPECT_EQ(json.at("faults").as_array().size(), 1u);

    spill(save + "/manifest.json", "{}");
    EXPECT_EQ(tessera("verify " + save).code, 1);
    const Result list = tessera("ls " + root_);
    EXPECT_EQ(list.code, 1);
    EXPECT_THAT(list.output, HasSubstr("damaged"));
}

TEST_F(CkptCommand, LsTellsOfFilesThatAreGoneOrCutShort) {
    const std::string save = Checkpoint::open(root_)->path();
    const std::string path = save + "/rank-00001.safetensors";
    const std::string text = slurp(path);
    spill(path, text.substr(0, text.size() - 1));
    const Result cut = tessera("ls " + root_);
    EXPECT_EQ(cut.code, 1);
    EXPECT_THAT(cut.output, ::testing::ContainsRegex("-  damaged +-  .*" + save + "\n"));
    EXPECT_THAT(cut.output, HasSubstr(path + " has " + std::to_string(text.size() - 1) + " bytes, expected " +
                                      std::to_string(text.size()) + "\n"));
    EXPECT_THAT(cut.output, ::testing::ContainsRegex("  50  .*  latest\n")) << "the newest that is not damaged";

    std::filesystem::remove(path);
    const Json gone = json_of("ls --json " + root_, 1);
    EXPECT_EQ(gone.as_array().at(1).at("state").as_string(), "damaged");
    EXPECT_EQ(gone.as_array().at(1).at("fault").as_string(), path + " is missing");
    EXPECT_FALSE(gone.as_array().at(1).at("latest").as_bool());
    EXPECT_EQ(gone.as_array().at(0).at("state").as_string(), "committed");
    const Result one = tessera("ls " + save);
    EXPECT_EQ(one.code, 1);
    EXPECT_THAT(one.output, HasSubstr(path + " is missing\n"));

    std::filesystem::create_directory(path);
    std::filesystem::remove(save + "/rank-00000.safetensors");
    EXPECT_THAT(tessera("ls " + root_).output,
                HasSubstr("rank-00000.safetensors is missing; 2 files are missing or have another size\n"));
}

TEST_F(CkptCommand, WhatIsNotThereOrNotMeantIsTwo) {
    EXPECT_EQ(tessera("ls " + root_ + "/nope").code, 2);
    EXPECT_EQ(tessera("tree " + root_ + "/nope").code, 2);
    EXPECT_EQ(tessera("verify").code, 2);
    EXPECT_EQ(tessera("frobnicate " + root_).code, 2);
    EXPECT_EQ(tessera("--help").code, 0);
    std::filesystem::remove(Checkpoint::open(root_)->path() + "/manifest.json");
    const Result list = tessera("ls " + root_);
    EXPECT_EQ(list.code, 0);
    EXPECT_THAT(list.output, HasSubstr("not committed"));
}

}  // namespace
}  // namespace tsr::testing
