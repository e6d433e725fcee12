// `tessera ckpt convert` and `tessera ckpt rename-keys`: what is written is the same data, whole and durable or not
// there.
#include <gmock/gmock.h>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <unistd.h>

#include "checkpoint/root/lease.hpp"
#include "checkpoint/root/root.hpp"
#include "cli/command.hpp"
#include "patience.hpp"
#include "places.hpp"

extern char** environ;

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> names_in(const std::string& directory) {
    std::vector<std::string> names;
    (void)posix_file_system().list(directory, names);
    return names;
}

class Convert : public ::testing::TestWithParam<int> {
   protected:
    TempDir dir_;
    std::string root_ = dir_ / "root";
    std::string out_ = dir_ / "out";
};

// The header of a safetensors file as JSON.
Json header_of(const std::string& path) {
    const std::string text = slurp(path);
    uint64_t size = 0;
    std::memcpy(&size, text.data(), sizeof size);
    return Json::parse(text.substr(8, size), path);
}

TEST_P(Convert, ToNativeIsOneRanksFileOfTheSameNumbers) {
    save_numbers(root_, GetParam());
    const std::string path = json_of("convert --json " + root_ + " " + out_ + " --to native").at("path").as_string();
    EXPECT_TRUE(json_of("diff --json " + root_ + " " + path).at("same").as_bool());
    EXPECT_TRUE(json_of("diff --json " + root_ + " " + out_).at("same").as_bool()) << "the root opens too";
    EXPECT_EQ(tessera("verify " + path).code, 0);
    const Json info = json_of("info --json " + path);
    EXPECT_EQ(info.at("world_size").as_int(), 1);
    EXPECT_EQ(info.at("step").as_int(), 10);
    EXPECT_THAT(names_in(path), ::testing::ElementsAre("manifest.json", "rank-00000.safetensors"));
    EXPECT_THAT(names_in(out_), ::testing::ElementsAre("latest", std::string(name_in_path(path))));
}

TEST_P(Convert, ToSafetensorsIsWholeTensors) {
    save_numbers(root_, GetParam());
    const Json json = json_of("convert --json " + root_ + " " + out_ + " --to safetensors");
    EXPECT_EQ(json.at("tensor_count").as_int(), 6);
    EXPECT_EQ(json.at("left_out").dump(), "[\"epoch\"]");
    EXPECT_THAT(names_in(out_), ::testing::ElementsAre("model.safetensors"));
    const std::string file = out_ + "/model.safetensors";
    const Json header = header_of(file);
    EXPECT_EQ(header.at("__metadata__").at("format").as_string(), "pt");
    EXPECT_EQ(header.at("columns").at("dtype").as_string(), "I64");
    const std::string text = slurp(file);
    uint64_t header_size = 0;
    std::memcpy(&header_size, text.data(), sizeof header_size);
    const auto begin = static_cast<size_t>(header.at("grid").at("data_offsets").as_array()[0].as_int());
    for (size_t i = 0; i < 35; ++i) {
        float value = 0;
        std::memcpy(&value, text.data() + 8 + header_size + begin + i * sizeof value, sizeof value);
        EXPECT_EQ(value, static_cast<float>(i));
    }
}

// NumPy itself reads such files in the tests of the Python binding.
TEST_P(Convert, ToNpzIsOneFileWithoutValues) {
    save_numbers(root_, GetParam());
    const Result refused = tessera("convert " + root_ + " " + out_ + " --to npz");
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.output, HasSubstr("tensor 'half' is bf16, which NumPy does not support"));
    const Result said = tessera("convert " + root_ + " " + out_ + " --to npz --under g");
    EXPECT_EQ(said.code, 0);
    EXPECT_THAT(said.output, HasSubstr("1 value left out: npz can only hold tensors"));
    EXPECT_THAT(names_in(out_), ::testing::ElementsAre("model.npz"));
    EXPECT_EQ(json_of("info --json " + out_, 1).at("error").at("code").as_string(), "NOT_FOUND") << "it is not read";
    const Json json = json_of("convert --json " + root_ + " " + out_ + "-2 --to npz --under g");
    EXPECT_EQ(json.at("format").as_string(), "npz");
    EXPECT_EQ(json.at("tensor_count").as_int(), 1);
    EXPECT_EQ(json.at("left_out").dump(), "[\"epoch\"]");
    EXPECT_EQ(slurp(out_ + "-2/model.npz"), slurp(out_ + "/model.npz"));
}

TEST_F(Convert, WhatCannotBeReadIsToldByTheExitCode) {
    const std::string from = dir_ / "a.safetensors";
    save_unreadable(from, 2);
    for (const std::string to : {"native", "torch_dcp", "safetensors"}) {
        SCOPED_TRACE(to);
        const Result result = tessera("convert " + from + " " + out_ + "-" + to + " --to " + to);
        EXPECT_EQ(result.code, 1);
        EXPECT_THAT(result.output, HasSubstr("'odd' was left out: dtype F6_E3M2"));
        EXPECT_THAT(tessera("tree " + out_ + "-" + to).output, HasSubstr("w")) << "the rest is there";
        const Json json = json_of("convert --json " + from + " " + out_ + "-json-" + to + " --to " + to, 1);
        EXPECT_NE(json.at("unreadable").find("odd"), nullptr);
    }
    EXPECT_EQ(tessera("convert " + from + " " + out_ + " --to npz --under w").code, 2) << "nothing is left of its name";
}

TEST_F(Convert, WhatPyTorchsRecordSaysIsNobodysValue) {
    Numbers numbers;
    numbers.values.emplace("rank/0/torch",
                           parse_value(R"({"version":1,"paths":{},"names":[],"pickles":[],"dtypes":{}})", ""));
    save_numbers(root_, 1, numbers);
    const Json json = json_of("convert --json " + root_ + " " + out_ + " --to safetensors");
    EXPECT_EQ(json.at("left_out").dump(), "[\"epoch\"]");
    EXPECT_EQ(tessera("convert " + root_ + " " + out_ + "-dcp --to torch_dcp").code, 0);
    EXPECT_EQ(json_of("info --json " + out_ + "-dcp").at("values").dump(), R"({"epoch":3})");
    EXPECT_EQ(json_of("info --json " + root_).at("values").dump(), R"({"epoch":3})");
    for (const char* command : {"info ", "tree ", "tree --json "}) {
        EXPECT_THAT(tessera(command + root_).output, Not(HasSubstr("torch"))) << command;
    }
    EXPECT_EQ(tessera("diff " + root_ + " " + out_ + "-dcp").code, 0);
    EXPECT_EQ(tessera("convert " + root_ + " " + out_ + "-native --to native").code, 0);
    EXPECT_THAT(Checkpoint::open(out_ + "-native")->manifest_text(), HasSubstr("rank/0/torch"))
        << "for PyTorch's loads";
    numbers.values["rank/0/torch"] = Json(int64_t{7});
    save_numbers(root_ + "-own", 1, numbers);
    EXPECT_THAT(tessera("info " + root_ + "-own").output, HasSubstr("rank/0/torch = 7")) << "of a program's own";
}

TEST_P(Convert, ShardsHaveAnIndex) {
    save_numbers(root_, GetParam());
    const Json json = json_of("convert --json " + root_ + " " + out_ + " --to safetensors --shard-size 150B");
    const Json index = Json::parse(slurp(out_ + "/model.safetensors.index.json"), "index");
    EXPECT_EQ(index.at("metadata").at("total_size").as_int(), json.at("size_bytes").as_int());
    EXPECT_EQ(index.at("weight_map").as_object().size(), 6u);
    EXPECT_EQ(json.at("files").as_array().size(), 4u) << "columns | empty, flags, .. | grid | ..";
    for (const Json::Member& tensor : index.at("weight_map").as_object()) {
        EXPECT_NE(header_of(out_ + "/" + tensor.value.as_string()).find(tensor.key), nullptr) << tensor.key;
    }
}

TEST_P(Convert, RenamedKeysKeepFilesAndLayouts) {
    const std::string save = save_numbers(root_, GetParam());
    const Json json = json_of("rename-keys --json " + root_ + " " + out_ +
                              " --map grid=net.matrix --regex 's/^(col)umns$/\\1.&/' --map epoch=round");
    EXPECT_EQ(json.at("renamed").dump(), R"({"columns":"col.columns","grid":"net.matrix","epoch":"round"})");
    EXPECT_EQ(tessera("verify " + out_).code, 0);
    EXPECT_EQ(json_of("cat --json " + out_ + " round").at("value").as_int(), 3);
    EXPECT_EQ(json_of("cat --json " + out_ + " net.matrix").at("max").as_double(), 34);
    const Json before = json_of("tree --json " + root_).at("tensors");
    const Json after = json_of("tree --json " + out_).at("tensors");
    EXPECT_EQ(before.at("grid"), after.at("net.matrix"));
    EXPECT_EQ(before.at("columns"), after.at("col.columns"));
    // Back again it is the same.
    const std::string back = dir_ / "back";
    EXPECT_EQ(tessera("rename-keys " + out_ + " " + back +
                      " --map net.matrix=grid --map col.columns=columns --map round=epoch")
                  .code,
              0);
    EXPECT_TRUE(json_of("diff --json " + root_ + " " + back).at("same").as_bool());
    EXPECT_TRUE(std::filesystem::exists(save)) << "the source stays";
}

INSTANTIATE_TEST_SUITE_P(Worlds, Convert, ::testing::Values(1, 2, 3));

TEST_F(Convert, PrefixesGoOnAndOff) {
    save_numbers(root_, 2);
    EXPECT_EQ(tessera("rename-keys " + root_ + " " + out_ + " --prefix model.").code, 0);
    EXPECT_EQ(json_of("cat --json " + out_ + " epoch").at("value").as_int(), 3) << "values keep their names";
    const std::string plain = dir_ / "plain";
    EXPECT_EQ(tessera("rename-keys " + out_ + " " + plain + " --map model.=").code, 0);
    EXPECT_TRUE(json_of("diff --json " + root_ + " " + plain).at("same").as_bool());
    const std::string export_only = dir_ / "export";
    EXPECT_EQ(json_of("convert --json " + out_ + " " + export_only + " --to safetensors --under model.")
                  .at("tensor_count")
                  .as_int(),
              6);
    EXPECT_NE(header_of(export_only + "/model.safetensors").find("grid"), nullptr);
    const auto refused = [&](const std::string& command, const std::string& rest) {
        return tessera(command + " " + out_ + " " + (dir_ / "refused") + " " + rest).output;
    };
    EXPECT_THAT(
        refused("convert", "--to npz --under model"),
        HasSubstr("'model.columns' without the prefix 'model' is '.columns'; did you mean the prefix \"model.\"?"));
    EXPECT_THAT(refused("rename-keys", "--map model=net"), HasSubstr("did you mean \"--map model.=net.\"?"));
    EXPECT_THAT(refused("rename-keys", "--map model.=net"), HasSubstr("did you mean \"--map model.=net.\"?"));
    EXPECT_THAT(refused("rename-keys", "--map mode=net"), HasSubstr("run `tessera ckpt tree`"));
    EXPECT_FALSE(std::filesystem::exists(dir_ / "refused"));
}

// A trainer that resumes takes the renamed checkpoint for the newest.
TEST_F(Convert, RenamingIntoTheSameRootIsTheNextSave) {
    const std::string save = save_numbers(root_, 2);
    EXPECT_EQ(tessera("rename-keys " + root_ + " " + root_ + " --prefix a.").code, 0);
    const auto saves = scan_root(posix_file_system(), root_);
    ASSERT_EQ(saves.size(), 2u);
    EXPECT_EQ(saves[1].sequence, saves[0].sequence + 1);
    EXPECT_NE(json_of("tree --json " + root_).at("tensors").find("a.grid"), nullptr);
    EXPECT_FALSE(std::filesystem::exists(root_ + "/.owner"));
}

TEST_F(Convert, TiedNamesStayTied) {
    expect_all_well(run_meeting(1, [&](const std::shared_ptr<Communicator>& comm) {
        std::vector<float> memory(64, 1.5F);
        State state;
        state.add_tensor("embed", tensor_of(std::span(memory), DType::f32));
        state.add_tensor("head", tensor_of(std::span(memory), DType::f32));
        Saver saver(comm, root_, saver_options());
        saver.save(1, state);
    }));
    EXPECT_EQ(tessera("rename-keys " + root_ + " " + out_ + " --prefix m.").code, 0);
    EXPECT_EQ(json_of("cat --json " + out_ + " m.head").at("alias_of").as_string(), "m.embed");
    EXPECT_EQ(tessera("verify " + out_).code, 0);
    const std::string exported = dir_ / "export";
    EXPECT_EQ(tessera("convert " + root_ + " " + exported + " --to safetensors").code, 0);
    const Json header = header_of(exported + "/model.safetensors");
    EXPECT_EQ(header.find("head"), nullptr);
    EXPECT_EQ(header.at("__metadata__").at("head").as_string(), "embed");
}

TEST_F(Convert, WhatIsRefusedLeavesNothing) {
    const std::string save = save_numbers(root_, 2);
    const auto before = names_in(root_);
    const auto refused = [&](const std::string& arguments, const std::string& why) {
        const Result result = tessera(arguments);
        EXPECT_EQ(result.code, 2) << arguments;
        EXPECT_THAT(result.output, HasSubstr(why)) << arguments;
        EXPECT_FALSE(std::filesystem::exists(out_)) << arguments;
    };
    refused("rename-keys " + root_ + " " + out_, "nothing to rename; use --map, --regex or --prefix");
    refused("rename-keys " + root_ + " " + out_ + " --map grid=columns", "two entries would be named 'columns'");
    refused("rename-keys " + root_ + " " + out_ + " --map epoch=grid", "two entries would be named 'grid'");
    refused("rename-keys " + root_ + " " + out_ + " --map nope=x", "--map nope=x matches no name");
    refused("rename-keys " + root_ + " " + out_ + " --map grid=", "is empty");
    refused("rename-keys " + root_ + " " + out_ + " --regex 's/(/x/'", "--regex \"s/(/x/\"");
    refused("rename-keys " + root_ + " " + out_ + " --regex grid", "expected s/pattern/replacement/");
    refused("convert " + root_ + " " + out_ + " --to safetensors --under nope.", "begins with 'nope.'");
    refused("convert " + root_ + " " + out_ + " --to nonsense", "--to");
    refused("convert " + root_ + " " + out_, "--to is required");
    refused("convert " + root_ + " " + save + " --to native", "is a checkpoint, not a root; pass a new directory");
    refused("convert " + root_ + " " + root_ + " --to safetensors", "already exists");
    EXPECT_EQ(names_in(root_), before);
    {
        const Lease lease(posix_file_system(), root_, random_id());
        refused("rename-keys " + root_ + " " + root_ + " --prefix a.", "another live job saves into");
    }
    EXPECT_EQ(names_in(root_), before);
}

TEST_F(Convert, DamageIsNotPassedOn) {
    const std::string save = save_numbers(root_, 2);
    const std::string path = save + "/rank-00001.safetensors";
    std::string bytes = slurp(path);
    bytes[bytes.size() - 1] ^= 1;
    spill(path, bytes);
    for (const char* how : {"rename-keys", "convert"}) {
        for (const char* to : {"--to native", "--to safetensors"}) {
            const std::string options = std::string(how) == "convert" ? to : "--prefix a.";
            EXPECT_EQ(json_of(std::string(how) + " --json " + root_ + " " + out_ + " " + options, 1)
                          .at("error")
                          .at("code")
                          .as_string(),
                      "CORRUPT");
            EXPECT_THAT(names_in(dir_.path()), ::testing::ElementsAre("root")) << options;
        }
    }
}

// The command shows its progress on a terminal that takes no more text, so that it stands still between its first byte
// and its last when the signal comes.
TEST_F(Convert, AnInterruptRemovesWhatWasBegun) {
    save_numbers(root_, 2);
    for (const char* to : {"native", "safetensors"}) {
        SCOPED_TRACE(to);
        const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
        ASSERT_GE(terminal, 0);
        ASSERT_EQ(::grantpt(terminal), 0);
        ASSERT_EQ(::unlockpt(terminal), 0);
        char name[64];
        ASSERT_EQ(::ptsname_r(terminal, name, sizeof name), 0);
        const int other_end = ::open(name, O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
        ASSERT_GE(other_end, 0);
        const std::string filler(4096, '.');
        // The kernel moves what is written to the other side a little later, which makes room again.
        pollfd writable{other_end, POLLOUT, 0};
        do {
            while (::write(other_end, filler.data(), filler.size()) > 0) continue;
            while (::write(other_end, filler.data(), 1) > 0) continue;
        } while (::poll(&writable, 1, 200) > 0);

        const std::string binary = tsr::testing::binary_dir() + "/tessera";
        std::vector<std::string> words{binary, "ckpt", "convert", root_, out_, "--to", to};
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        posix_spawn_file_actions_t actions;
        ASSERT_EQ(::posix_spawn_file_actions_init(&actions), 0);
        ASSERT_EQ(::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, name, O_RDWR | O_NOCTTY, 0), 0);
        pid_t pid = 0;
        ASSERT_EQ(::posix_spawn(&pid, binary.c_str(), &actions, nullptr, argv.data(), environ), 0);
        (void)::posix_spawn_file_actions_destroy(&actions);
        const auto deadline = Clock::now() + patience(std::chrono::seconds(30));
        while (names_in(dir_.path()).size() < 2 && Clock::now() < deadline) std::this_thread::yield();
        ASSERT_EQ(::kill(pid, SIGINT), 0);
        int status = 0;
        std::vector<char> drained(65536);
        while (::waitpid(pid, &status, WNOHANG) == 0 && Clock::now() < deadline) {
            (void)!::read(terminal, drained.data(), drained.size());
        }
        ::close(other_end);
        ::close(terminal);
        ASSERT_TRUE(WIFEXITED(status));
        EXPECT_EQ(WEXITSTATUS(status), 130);
        EXPECT_THAT(names_in(dir_.path()), ::testing::ElementsAre("root"));
    }
}

}  // namespace
}  // namespace tsr::testing
