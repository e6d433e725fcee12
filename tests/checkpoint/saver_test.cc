// What savers promise: agreement before anything is written, commits in order, retention, resume, background saves, one
// job a root.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <future>
#include <thread>

#include "base/crc32c.hpp"
#include "checkpoint/export.hpp"
#include "checkpoint/native/root.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "new_threads.hpp"
#include "patience.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

std::vector<std::string> committed(const std::string& root) {
    std::vector<std::string> found;
    for (const SavedStep& save : scan_root(posix_file_system(), root)) {
        if (save.committed) found.push_back(std::to_string(save.step));
    }
    return found;
}

using Steps = std::vector<std::string>;

class SaverTest : public ::testing::Test {
   protected:
    SaverTest() {
        owned_.add_whole({"w", DType::f32, {100}});
        owned_.state.set_value("epoch", Json(int64_t{0}));
    }

    // Of savers that find a dead job's lease at the same time.
    void expect_one_winner(const SaverOptions& options) {
        for (int round = 0; round < 10; ++round) {
            Holder dead = Holder::this_process("dead");
            dead.start_time -= 1;
            spill(dir_ / ".owner", dead.dump());
            std::atomic<int> winners{0};
            std::atomic<int> refused{0};
            std::mutex mutex;
            std::vector<std::unique_ptr<Saver>> savers;
            expect_all_well(run_threads(4, [&](int) {
                try {
                    auto saver = std::make_unique<Saver>(nullptr, dir_.path(), options);
                    ++winners;
                    const std::lock_guard lock(mutex);
                    savers.push_back(std::move(saver));
                } catch (const Error& error) {
                    EXPECT_EQ(error.code(), Code::invalid_state) << error.what();
                    ++refused;
                }
            }));
            EXPECT_EQ(winners, 1);
            EXPECT_EQ(refused, 3);
        }
    }

    // A save by `ranks` ranks; rank 0 calls `before_manifest` when all have voted and it is about to write the manifest.
    Outcomes save_until_manifest(
        const std::shared_ptr<Meeting>& meeting, int ranks, const std::function<void()>& before_manifest,
        const std::function<void(int rank)>& ended = [](int) {}) {
        return run_threads(ranks, [&, meeting](int rank) {
            OwnedState owned;
            owned.add_whole({"w", DType::f32, {10}});
            FaultyFiles files;
            SaverOptions options = saver_options();
            if (rank == 0) {
                options.files = &files;
                files.on_call = [&](int64_t, const std::string& call) {
                    if (call.starts_with("create") && call.find("manifest.json.tmp") != std::string::npos) {
                        before_manifest();
                    }
                };
            }
            Saver saver(std::make_shared<MeetingComm>(meeting, rank, ranks), dir_.path(), options);
            try {
                saver.save(1, owned.state);
            } catch (const Error&) {
                ended(rank);
                throw;
            }
            ended(rank);
        });
    }

    TempDir dir_;
    OwnedState owned_;
};

TEST_F(SaverTest, ResumeIsZeroWhereNothingIsYet) {
    Saver saver(nullptr, dir_ / "not/yet/there", saver_options());
    EXPECT_EQ(saver.resume(owned_.state), 0);
}

TEST_F(SaverTest, LatestNamesTheNewestAndPathsFollowIt) {
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(10, owned_.state);
    saver.save(20, owned_.state);
    EXPECT_TRUE(slurp(dir_ / "latest").starts_with("step-00000020-"));
    EXPECT_EQ(Checkpoint::open(dir_ / "latest")->manifest().step, 20);
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 20);
    // It is a hint: the scan decides.
    spill(dir_ / "latest", "step-00000099-00000000\n");
    EXPECT_EQ(Checkpoint::open(dir_ / "latest")->manifest().step, 20);
    std::filesystem::remove(dir_ / "latest");
    EXPECT_EQ(Checkpoint::open(dir_ / "latest")->manifest().step, 20);
}

// Where it is not certain what the newest save is, resume says so: it neither begins anew nor goes back in silence.
TEST_F(SaverTest, ResumeNeverPassesOverADamagedSaveThatMayBeTheNewest) {
    const auto manifest_of = [&](int step) {
        for (const SavedStep& save : scan_root(posix_file_system(), dir_.path())) {
            if (save.step == step) return dir_ / (save.directory + "/manifest.json");
        }
        throw std::runtime_error("no such save");
    };
    const auto refuses = [&](const std::string& named) {
        Saver saver(nullptr, dir_.path(), saver_options());
        const Error error = error_of([&] { (void)saver.resume(owned_.state); });
        EXPECT_EQ(error.code(), Code::corrupt) << error.what();
        EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("move the damaged one out of " + dir_.path()), std::string::npos)
            << error.what();
    };
    std::string latest;
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        saver.save(10, owned_.state);
        latest = slurp(dir_ / "latest");
        saver.save(20, owned_.state);
    }
    const std::string damaged = manifest_of(20);
    spill(damaged, "");
    refuses(damaged);  // `latest` names it
    std::filesystem::remove(dir_ / "latest");
    refuses(damaged);  // nothing tells which is the newest
    // The newest by `latest` is sound, so the damaged one is an older one.
    spill(dir_ / "latest", latest);
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        EXPECT_EQ(saver.resume(owned_.state), 10);
    }
    const std::string last = manifest_of(10);
    spill(last, "");
    std::filesystem::remove(dir_ / "latest");
    refuses(last);  // and the other: no save is left
    std::filesystem::remove(last);
    std::filesystem::remove(damaged);
    spill(dir_ / "latest", latest);
    refuses("latest");  // there was a save, and it is gone
}

TEST_F(SaverTest, ACompletionCallbackMayDestroyItsSaver) {
    std::promise<Code> waited;
    std::promise<void> gone;
    // The save stops before its commit until the callback is there, so that it runs on the saver's own thread.
    std::promise<void> registered;
    FaultyFiles files;
    files.on_call = [&, ready = registered.get_future().share()](int64_t, const std::string& name) {
        if (name.ends_with("manifest.json") && name.starts_with("rename")) ready.wait();
    };
    SaverOptions options = saver_options();
    options.files = &files;
    auto saver = std::make_unique<Saver>(nullptr, dir_.path(), options);
    Saver* raw = saver.get();
    const WorkPtr work = saver->save_async(5, owned_.state);
    work->on_done([&](const std::optional<Error>&) {
        waited.set_value(error_of([&] { raw->wait(); }).code());
        saver.reset();
        gone.set_value();
    });
    registered.set_value();
    EXPECT_EQ(waited.get_future().get(), Code::invalid_state);
    gone.get_future().wait();
    EXPECT_FALSE(std::filesystem::exists(dir_ / ".owner"));
    EXPECT_EQ(committed(dir_.path()), (Steps{"5"}));
}

// A child of fork has copies of everything but the threads; what it destroys is still its parent's.
TEST_F(SaverTest, AForkedChildLeavesTheRootToItsParent) {
    auto saver = std::make_unique<Saver>(nullptr, dir_.path(), saver_options());
    const pid_t child = ::fork();
    if (child == 0) {
        saver.reset();
        ::_exit(0);
    }
    int status = -1;
    try {
        wait_until([&] { return ::waitpid(child, &status, WNOHANG) == child; }, soon(), "child");
    } catch (const Error&) {
        ::kill(child, SIGKILL);
        ::waitpid(child, &status, 0);
    }
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    saver->save(1, owned_.state);
}

TEST_F(SaverTest, AZombiesRootIsTakenOver) {
    const pid_t child = ::fork();
    if (child == 0) {
        const Holder holder = Holder::this_process("child");
        std::ofstream(dir_ / ".owner") << holder.dump();
        ::_exit(0);
    }
    siginfo_t info{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);  // dead, not yet reaped
    EXPECT_NO_THROW(Saver(nullptr, dir_.path(), saver_options()).save(1, owned_.state));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
}

TEST_F(SaverTest, NewestIsTheLastCommittedEvenAfterGoingBack) {
    SaverOptions options = saver_options();
    options.retention.latest = 2;
    Saver saver(nullptr, dir_.path(), options);
    saver.save(100, owned_.state);
    saver.save(200, owned_.state);
    saver.save(150, owned_.state);  // the job went back to 100 and came this far
    EXPECT_EQ(saver.resume(owned_.state), 150);
    saver.save(160, owned_.state);
    EXPECT_EQ(committed(dir_.path()), (Steps{"150", "160"}));
}

TEST_F(SaverTest, RetentionKeepsTheNewestAndTouchesNothingElse) {
    SaverOptions options = saver_options();
    options.retention.latest = 2;
    std::filesystem::create_directory(dir_ / "notes");
    spill(dir_ / "notes/step.txt", "mine");
    std::filesystem::create_directory(dir_ / "step-00000001-abcdef01.copy");
    Saver saver(nullptr, dir_.path(), options);
    for (int step = 1; step <= 4; ++step) saver.save(step, owned_.state);
    EXPECT_EQ(committed(dir_.path()), (Steps{"3", "4"}));
    EXPECT_EQ(slurp(dir_ / "notes/step.txt"), "mine");
    EXPECT_TRUE(std::filesystem::exists(dir_ / "step-00000001-abcdef01.copy"));
}

TEST_F(SaverTest, AnotherSaveOfTheSameStepIsAnotherCheckpoint) {
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(5, owned_.state);
    saver.save(5, owned_.state);
    EXPECT_EQ(committed(dir_.path()), (Steps{"5", "5"}));
}

TEST_F(SaverTest, ValuesOfEveryKindReturnAsTheyWere) {
    const std::vector<std::string> texts{"null",
                                         "true",
                                         "-9223372036854775808",
                                         "9223372036854775807",
                                         "0.1",
                                         "-0.0",
                                         "1e+300",
                                         "\"é\\n\"",
                                         "[]",
                                         "[1,2.0,\"x\"]",
                                         R"({"a":{"b":[]}})",
                                         R"({"~":"bytes","v":"AAECAw=="})",
                                         R"({"~":"tuple","v":[1,{"~":"tuple","v":[]}]})",
                                         R"({"~":"map","v":[[1,"one"],[true,2.0]]})",
                                         R"({"~":"int","v":"-123456789012345678901234567890"})",
                                         R"({"~":"double","v":"nan"})",
                                         R"({"~":"double","v":"-inf"})"};
    const auto name = [](size_t i) { return fmt::format("v{}", i); };
    for (size_t i = 0; i < texts.size(); ++i) owned_.state.set_value(name(i), parse_value(texts[i], "v"));
    owned_.state.set_metric("loss", std::nan(""));
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, owned_.state);
    for (size_t i = 0; i < texts.size(); ++i) owned_.state.set_value(name(i), Json("other"));
    EXPECT_EQ(saver.resume(owned_.state), 1);
    for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(owned_.state.value(name(i)).dump(), texts[i]);
    EXPECT_TRUE(std::isnan(double_of(Checkpoint::open(dir_.path())->manifest().metrics.at("loss"), "loss")));
}

TEST_F(SaverTest, TiedTensorsAreSavedOnceAndLoadApart) {
    std::vector<float> memory(1000, 1.5F);
    const Tensor tied = tensor_of(std::span(memory), DType::f32);
    State state;
    state.add_tensor("embed.weight", tied);
    state.add_tensor("head.weight", tied);
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, state);
    const auto checkpoint = Checkpoint::open(dir_.path());
    EXPECT_EQ(checkpoint->manifest().tensors.size(), 1u);
    EXPECT_EQ(checkpoint->names(), (std::vector<std::string>{"embed.weight", "head.weight"}));
    EXPECT_LT(checkpoint->manifest().size_bytes(), 4096 + 4100);

    std::vector<float> a(1000);
    std::vector<float> b(1000);
    State apart;
    apart.add_tensor("embed.weight", tensor_of(std::span(a), DType::f32));
    apart.add_tensor("head.weight", tensor_of(std::span(b), DType::f32));
    EXPECT_EQ(saver.resume(apart), 1);
    EXPECT_EQ(a, memory);
    EXPECT_EQ(b, memory);
}

// What an untied checkpoint has of the second name may be another thing, and would be written at the same time.
TEST_F(SaverTest, TensorsThatAreTiedInTheStateAloneAreLoadedFromTheFirst) {
    std::vector<float> a(3 << 20, 1.0F);
    std::vector<float> b(a.size(), 2.0F);
    State apart;
    apart.add_tensor("a", tensor_of(std::span(a), DType::f32));
    apart.add_tensor("b", tensor_of(std::span(b), DType::f32));
    for (const SaveFormat format : {SaveFormat::native, SaveFormat::torch_dcp}) {
        SaverOptions options = saver_options();
        options.format = format;
        const std::string root = dir_ / fmt::format("root-{}", static_cast<int>(format));
        Saver(nullptr, root, options).save(1, apart);
        std::vector<float> memory(a.size());
        State tied;
        tied.add_tensor("a", tensor_of(std::span(memory), DType::f32));
        tied.add_tensor("b", tensor_of(std::span(memory), DType::f32));
        (void)Checkpoint::open(root)->load(tied);
        EXPECT_TRUE(memory == a);
    }
}

// Such a file would be written, and never read again.
TEST_F(SaverTest, ANameThatSafetensorsKeepsIsRefusedBeforeAnythingIsWritten) {
    OwnedState owned;
    owned.add_whole({"__metadata__", DType::f32, {10}});
    owned.fill(1);
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        const Error error = error_of([&] { saver.save(1, owned.state); });
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_NE(std::string(error.what()).find("'__metadata__'"), std::string::npos) << error.what();
        EXPECT_TRUE(committed(dir_.path()).empty());
    }
    SaverOptions options = saver_options();
    options.format = SaveFormat::torch_dcp;
    Saver saver(nullptr, dir_.path(), options);
    saver.save(2, owned.state);
    owned.poison();
    EXPECT_EQ(saver.resume(owned.state), 2);
    EXPECT_EQ(owned.differences(1), 0);
    Peers alone(nullptr);
    const auto source = Checkpoint::open(dir_.path());
    const Error error = error_of([&] { (void)export_checkpoint(*source, alone, dir_ / "exported", ExportOptions()); });
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_FALSE(std::filesystem::exists(dir_ / "exported"));
}

TEST_F(SaverTest, WrappersNamesAreStripped) {
    std::vector<float> memory(3, 2.0F);
    State state;
    state.add_tensor("model.module._orig_mod.fc.weight", tensor_of(std::span(memory), DType::f32));
    EXPECT_TRUE(state.tensors().contains("model.fc.weight"));
    EXPECT_EQ(error_of([&] { state.add_tensor("model.fc.weight", tensor_of(std::span(memory), DType::f32)); }).code(),
              Code::invalid_argument);
}

// Such a name would be saved, and never read again.
TEST_F(SaverTest, ANameOfWrappersAloneIsRefused) {
    std::vector<float> memory(3, 2.0F);
    State state;
    for (const char* name : {"module.", "_orig_mod.", "module._orig_mod."}) {
        const Error error = error_of([&] { state.add_tensor(name, tensor_of(std::span(memory), DType::f32)); });
        EXPECT_EQ(error.code(), Code::invalid_argument) << name;
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
    EXPECT_TRUE(state.tensors().empty());
    EXPECT_NO_THROW(state.add_tensor("module", tensor_of(std::span(memory), DType::f32)));
}

TEST_F(SaverTest, AStateThatDoesNotFitIsRefusedWithEveryDifferenceAndUntouched) {
    Saver saver(nullptr, dir_.path(), saver_options());
    owned_.add_whole({"only.saved", DType::i64, {2}});
    owned_.add_whole({"shape", DType::f32, {2, 3}});
    owned_.add_whole({"dtype", DType::f32, {4}});
    owned_.add_whole({"kind", DType::i32, {4}});
    saver.save(1, owned_.state);
    OwnedState other;
    other.add_whole({"w", DType::f32, {100}});
    other.add_whole({"only.here", DType::f32, {1}});
    other.add_whole({"shape", DType::f32, {3, 2}});
    other.add_whole({"dtype", DType::bf16, {4}});
    other.add_whole({"kind", DType::f32, {4}});
    other.poison();
    const Error error = error_of([&] { (void)saver.resume(other.state); });
    EXPECT_EQ(error.code(), Code::mismatch);
    const std::string message = error.what();
    for (const char* told :
         {"'only.saved' is unexpected", "'only.here' is missing", "'shape': saved with shape [2, 3]",
          "'dtype': saved as f32, the state has bf16", "'kind': saved as i32", "'epoch' is unexpected"}) {
        EXPECT_NE(message.find(told), std::string::npos) << told << " in " << message;
    }
    // Not one byte was written.
    OwnedState poisoned;
    poisoned.add_whole({"w", DType::f32, {100}});
    poisoned.poison();
    EXPECT_EQ(std::memcmp(other.state.tensors().at("w").memory[0], poisoned.state.tensors().at("w").memory[0], 400), 0);
}

TEST_F(SaverTest, WhatIsAllowedIsReported) {
    Saver saver(nullptr, dir_.path(), saver_options());
    std::vector<float> numbers{1.0F, 1.0F / 3, -65504.0F, 1e-8F, INFINITY};
    owned_.state.add_tensor("cast", tensor_of(std::span(numbers), DType::f32));
    owned_.fill();
    saver.save(1, owned_.state);
    std::vector<uint16_t> halves(5);
    State other;
    other.add_tensor("cast", tensor_of(std::span(halves), DType::f16));
    other.set_value("new", Json(true));
    LoadOptions options;
    options.missing = options.unexpected = options.cast = Allow::yes;
    const LoadReport report = Checkpoint::open(dir_.path())->load(other, options);
    EXPECT_EQ(report.missing, (std::vector<std::string>{"new"}));
    EXPECT_EQ(report.unexpected, (std::vector<std::string>{"w", "epoch"}));
    EXPECT_EQ(report.cast.size(), 1u);
    EXPECT_EQ(halves, (std::vector<uint16_t>{0x3c00, 0x3555, 0xfbff, 0x0000, 0x7c00}));
    EXPECT_EQ(other.value("new"), Json(true));
}

// --- ranks ---

TEST_F(SaverTest, RanksThatDifferAreToldBeforeAnythingIsWritten) {
    const auto attempt = [&](const std::function<void(State&, int rank, int64_t& step)>& change) {
        std::vector<float> memory(8);
        return run_meeting(3, [&](const std::shared_ptr<Communicator>& comm) {
            std::vector<float> own(8);
            State state;
            state.add_tensor("a", tensor_of(std::span(own), DType::f32));
            int64_t step = 7;
            change(state, comm->rank(), step);
            Saver saver(comm, dir_.path(), saver_options());
            saver.save(step, state);
        });
    };
    static std::vector<float> extra(3);
    const auto expect = [&](const Outcomes& outcomes, const char* told) {
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::mismatch);
            EXPECT_NE(std::string(outcome->what()).find(told), std::string::npos) << outcome->what();
            EXPECT_STREQ(outcome->what(), outcomes[0]->what());
        }
        EXPECT_TRUE(scan_root(posix_file_system(), dir_.path()).empty());
    };
    expect(attempt([](State& state, int rank, int64_t&) {
               if (rank == 1) state.add_tensor("b", tensor_of(std::span(extra), DType::f32));
           }),
           "rank 1: its state differs from rank 0's: it has tensor 'b' f32 [3]");
    expect(attempt([](State& state, int rank, int64_t&) {
               if (rank == 0) state.add_tensor("b", tensor_of(std::span(extra), DType::f32));
           }),
           "rank 1: its state differs from rank 0's: it has nothing more where rank 0 has tensor 'b'");
    expect(attempt([](State& state, int rank, int64_t&) {
               if (rank == 2) state.set_value("x", Json(true));
           }),
           "rank 2: its state differs from rank 0's: it has value 'x'");
    expect(attempt([](State&, int rank, int64_t& step) { step += rank == 2 ? 1 : 0; }),
           "rank 2: it saves step 8 while rank 0 saves step 7");
}

TEST_F(SaverTest, ALayoutOfAnotherWorldIsRefused) {
    const Outcomes outcomes = run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_sharded({"w", DType::f32, {9}},
                          Layout::placed({9}, std::vector<int>{3}, std::vector<Placement>{Placement::shard(0)}),
                          comm->rank());
        Saver saver(comm, dir_.path(), saver_options());
        saver.save(1, owned.state);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::invalid_argument);
        EXPECT_NE(std::string(outcome->what()).find("layout of 3 ranks, the saver has 2"), std::string::npos);
    }
}

TEST_F(SaverTest, BoxesThatLeaveAHoleAreRefused) {
    OwnedState owned;
    owned.add_sharded({"w", DType::f32, {4}},
                      Layout::from_boxes({4}, std::vector<Box>{{{0}, {3}}}, std::vector<int>{1}), 0);
    Saver saver(nullptr, dir_.path(), saver_options());
    const Error error = error_of([&] { saver.save(1, owned.state); });
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("1 of 4 elements to no rank"), std::string::npos) << error.what();
}

TEST_F(SaverTest, PrivateValuesBelongToTheirRank) {
    const auto body = [&](int64_t base) {
        return [this, base](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            owned.add_whole({"w", DType::f32, {10}});
            const std::string name = "rank/" + std::to_string(comm->rank()) + "/rng";
            owned.state.set_value(name, Json(base + comm->rank()));
            Saver saver(comm, dir_.path(), saver_options());
            if (base != 0) {
                saver.save(1, owned.state);
                return;
            }
            EXPECT_EQ(saver.resume(owned.state), 1);
            // Ranks that the save did not have keep what they have.
            EXPECT_EQ(owned.state.value(name), Json(comm->rank() < 3 ? 100 + comm->rank() : comm->rank()));
        };
    };
    expect_all_well(run_meeting(3, body(100)));
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().values.size(), 3u);
    expect_all_well(run_meeting(2, body(0)));
    expect_all_well(run_meeting(5, body(0)));
}

TEST_F(SaverTest, ReplicatedDataIsWrittenOnceAndSpread) {
    expect_all_well(run_meeting(4, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"large", DType::f32, {4000, 1000}});
        for (int i = 0; i < 40; ++i) owned.add_whole({"small." + std::to_string(i), DType::f32, {10000}});
        Saver saver(comm, dir_.path(), saver_options());
        saver.save(1, owned.state);
    }));
    const auto checkpoint = Checkpoint::open(dir_.path());
    ASSERT_EQ(checkpoint->manifest().files.size(), 4u);
    int64_t least = INT64_MAX;
    int64_t most = 0;
    for (const SavedFile& file : checkpoint->manifest().files) {
        least = std::min(least, file.size);
        most = std::max(most, file.size);
    }
    EXPECT_LT(checkpoint->manifest().size_bytes(), 17'600'000 + 4 * 16384);
    EXPECT_LT(most - least, 200'000);
    EXPECT_EQ(checkpoint->manifest().tensors.at("large")->split, 4);
}

TEST_F(SaverTest, ALostRankEndsTheSaveOnTheOthers) {
    auto meeting = std::make_shared<Meeting>(3);
    const Outcomes outcomes = run_threads(3, [&](int rank) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {10}});
        const auto comm = std::make_shared<MeetingComm>(meeting, rank, 3);
        Saver saver(comm, dir_.path(), saver_options());
        if (rank == 1) {
            meeting->leave(1);
            return;
        }
        saver.save(1, owned.state);
    });
    EXPECT_FALSE(outcomes[1]);
    EXPECT_EQ(outcomes[0]->code(), Code::peer_lost);
    EXPECT_EQ(outcomes[2]->code(), Code::peer_lost);
}

// Rank 0 vanishes after all ranks said yes, before the manifest: nobody else can know.
TEST_F(SaverTest, RankZeroLostAfterTheVotesIsCommitUnknown) {
    auto meeting = std::make_shared<Meeting>(2);
    const Outcomes outcomes = save_until_manifest(meeting, 2, [&] {
        meeting->leave(0);
        throw Error(Code::aborted, "rank 0 dies here");
    });
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::commit_unknown);
    EXPECT_NE(std::string(outcomes[1]->what()).find("manifest.json"), std::string::npos);
    EXPECT_EQ(outcomes[1]->record()->peer, 0);
    EXPECT_NE(std::string(outcomes[1]->what()).find("rank 0 was lost"), std::string::npos) << outcomes[1]->what();
}

// Rank 2 vanishes in the last vote, while rank 0 still writes the manifest: rank 1 cannot know, and names rank 2.
TEST_F(SaverTest, CommitUnknownNamesTheRankThatWasLost) {
    auto meeting = std::make_shared<Meeting>(3);
    std::promise<void> rank1_has_ended;
    const Outcomes outcomes = save_until_manifest(
        meeting, 3,
        [&] {
            meeting->leave(2);
            EXPECT_EQ(rank1_has_ended.get_future().wait_for(patience(std::chrono::seconds(30))),
                      std::future_status::ready);
        },
        [&](int rank) {
            if (rank == 1) rank1_has_ended.set_value();
        });
    EXPECT_FALSE(outcomes[0]) << "it committed";
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::commit_unknown);
    EXPECT_EQ(outcomes[1]->record()->peer, 2);
    EXPECT_NE(std::string(outcomes[1]->what()).find("rank 2 was lost"), std::string::npos) << outcomes[1]->what();
}

// --- background ---

TEST_F(SaverTest, ABackgroundSaveHoldsWhatTheStateWasWhenItWasCalled) {
    expect_all_well(run_meeting(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"large", DType::f32, {2000, 1000}});
        owned.add_whole({"small", DType::u8, {7}});
        owned.state.set_value("epoch", Json(int64_t{1}));
        Saver saver(comm, dir_.path(), saver_options());
        for (uint64_t round = 1; round <= 3; ++round) {
            owned.fill(round);
            const WorkPtr work = saver.save_async(static_cast<int64_t>(round), owned.state);
            owned.poison();
            saver.wait();
            EXPECT_TRUE(work->done());
            EXPECT_EQ(saver.resume(owned.state), static_cast<int64_t>(round));
            EXPECT_EQ(owned.differences(round), 0);
        }
    }));
}

TEST_F(SaverTest, ABackgroundErrorIsToldOnceByTheNextCall) {
    FaultyFiles files(Fault::none);
    SaverOptions options = saver_options();
    options.files = &files;
    Saver saver(nullptr, dir_.path(), options);
    saver.save(1, owned_.state);
    files.on_call = [](int64_t, const std::string& name) {
        if (name.starts_with("mkdir")) throw os_error("cannot create it", ENOSPC);
    };
    const WorkPtr work = saver.save_async(2, owned_.state);
    EXPECT_EQ(error_of([&] { work->wait(soon()); }).code(), Code::io);
    EXPECT_EQ(error_of([&] { saver.save(3, owned_.state); }).code(), Code::io);
    files.on_call = nullptr;
    EXPECT_NO_THROW(saver.save(4, owned_.state));
    EXPECT_EQ(saver.resume(owned_.state), 4);
}

TEST_F(SaverTest, DestroyWaitsForTheSaveInFlight) {
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        (void)saver.save_async(1, owned_.state);
    }
    EXPECT_EQ(committed(dir_.path()), (Steps{"1"}));
    EXPECT_FALSE(std::filesystem::exists(dir_ / ".owner"));
}

// --- one job a root ---

TEST_F(SaverTest, ASecondLiveJobIsRefusedByHostAndProcess) {
    Saver first(nullptr, dir_.path(), saver_options());
    const Error error = error_of([&] { Saver second(nullptr, dir_.path(), saver_options()); });
    EXPECT_EQ(error.code(), Code::invalid_state);
    EXPECT_NE(std::string(error.what()).find("process " + std::to_string(::getpid()) + " on "), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("which is this one: close the saver"), std::string::npos);
    first.save(1, owned_.state);
}

TEST_F(SaverTest, ADeadJobsRootIsTakenOver) {
    const pid_t child = ::fork();
    if (child == 0) {
        // Dies without giving the root back.
        const Holder holder = Holder::this_process("child");
        std::ofstream(dir_ / ".owner") << holder.dump();
        ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(std::filesystem::exists(dir_ / ".owner"));
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, owned_.state);
    EXPECT_EQ(Holder::parse(slurp(dir_ / ".owner")).pid, ::getpid());
}

TEST_F(SaverTest, AnotherHostsLeaseLivesAsLongAsItIsRenewed) {
    Holder elsewhere = Holder::this_process("elsewhere");
    elsewhere.host = "other-host";
    elsewhere.machine = "another boot";
    spill(dir_ / ".owner", elsewhere.dump());
    const Error error = error_of([&] { Saver second(nullptr, dir_.path(), saver_options()); });
    EXPECT_NE(std::string(error.what()).find("on other-host"), std::string::npos);
    // Not renewed for longer than its span.
    const auto past = std::filesystem::file_time_type::clock::now() - std::chrono::minutes(5);
    std::filesystem::last_write_time(dir_ / ".owner", past);
    EXPECT_NO_THROW(Saver third(nullptr, dir_.path(), saver_options()));
}

TEST_F(SaverTest, ALeaseIsRenewed) {
    SaverOptions options = saver_options();
    options.lease.renew = milliseconds{5};
    Saver saver(nullptr, dir_.path(), options);
    const auto past = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
    std::filesystem::last_write_time(dir_ / ".owner", past);
    wait_until(
        [&] {
            return std::filesystem::last_write_time(dir_ / ".owner") >
                   std::filesystem::file_time_type::clock::now() - std::chrono::minutes(1);
        },
        soon(), "the renewal");
}

TEST_F(SaverTest, ASaverWhoseRootWasTakenSavesNoMore) {
    Saver saver(nullptr, dir_.path(), saver_options());
    spill(dir_ / ".owner", Holder::this_process("thief").dump());
    const Error error = error_of([&] { saver.save(1, owned_.state); });
    EXPECT_EQ(error.code(), Code::invalid_state);
    EXPECT_TRUE(committed(dir_.path()).empty());
}

// What a manifest grows by, by `more` of something: bytes each, for what docs/FORMAT.md allows.
TEST_F(SaverTest, AManifestTakesAtMost80BytesATensorBeyondItsNameAnd64AFile) {
    const auto manifest_bytes = [&](int ranks, int tensors) {
        const TempDir dir;
        expect_all_well(run_meeting(ranks, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            const Placement rows = Placement::shard(0);
            const Dims shape{ranks * 16, 8};
            const Layout layout = Layout::placed(shape, std::span(&ranks, 1), std::span(&rows, 1));
            for (int i = 0; i < tensors; ++i) {
                owned.add_sharded({fmt::format("{:04}", i), DType::bf16, shape}, layout, comm->rank());
            }
            Saver saver(comm, dir.path(), saver_options());
            saver.save(1, owned.state);
        }));
        return static_cast<int64_t>(std::filesystem::file_size(only_save(dir.path()) + "/manifest.json"));
    };
    const int64_t few = manifest_bytes(2, 20);
    EXPECT_LE(manifest_bytes(2, 220) - few, 200 * (80 + 4));
    EXPECT_LE(manifest_bytes(4, 20) - few, 2 * 64 + 20 * 4) << "and of each tensor a digit or two of its shape";
}

// As on FAT, SMB and some file systems in user space.
TEST_F(SaverTest, WhereThereAreNoHardLinksOneJobOwnsARootAllTheSame) {
    for (const int refusal : {EPERM, ENOSYS, EOPNOTSUPP}) {
        FaultyFiles files(posix_file_system(), [refusal](const FaultyFiles::Call& call) -> Verdict {
            return call.name.starts_with("link ") ? Verdict{-refusal, 0} : Verdict{};
        });
        SaverOptions options = saver_options();
        options.files = &files;
        {
            Saver first(nullptr, dir_.path(), options);
            const Error error = error_of([&] { Saver second(nullptr, dir_.path(), options); });
            EXPECT_EQ(error.code(), Code::invalid_state);
            EXPECT_NE(std::string(error.what()).find(fmt::format("process {} on ", ::getpid())), std::string::npos);
            first.save(refusal, owned_.state);
        }
        EXPECT_FALSE(std::filesystem::exists(dir_ / ".owner"));
        expect_one_winner(options);
    }
}

// A job that died between making the mark of a takeover and writing it.
TEST_F(SaverTest, AnEmptyMarkOfATakeoverHoldsNobodyUpForEver) {
    Holder dead = Holder::this_process("dead");
    dead.start_time -= 1;
    spill(dir_ / ".owner", dead.dump());
    const std::string mark = dir_ / fmt::format(".owner.stale-{}", hex8(crc32c(dead.dump())));
    spill(mark, "");
    std::filesystem::last_write_time(mark, std::filesystem::file_time_type::clock::now() - std::chrono::minutes(5));
    EXPECT_NO_THROW(Saver(nullptr, dir_.path(), saver_options()));
}

// They belong to the program: a thread of the library must not take what the program's own threads wait for.
TEST_F(SaverTest, TheThreadsOfASaverTakeNoSignals) {
    const NewThreads threads;
    Saver saver(nullptr, dir_.path(), saver_options());
    threads.expect_no_signals_taken("tsr-lease");
    (void)saver.save_async(1, owned_.state);
    threads.expect_no_signals_taken("tsr-saver");
}

TEST_F(SaverTest, OneOfManySaversGetsADeadRoot) { expect_one_winner(saver_options()); }

// Whatever the clock of the file system did: who lives renews the lease by that clock.
TEST_F(SaverTest, ALeaseOfAnotherHostIsJudgedByItsDistanceFromNow) {
    using std::chrono::hours;
    using std::chrono::seconds;
    const auto now = std::filesystem::file_time_type::clock::now();
    const auto epoch = std::filesystem::file_time_type(
        std::chrono::file_clock::from_sys(std::chrono::sys_time<std::chrono::nanoseconds>{}).time_since_epoch());
    Holder elsewhere = Holder::this_process("elsewhere");
    elsewhere.machine = "another boot";
    const auto is_live_at = [&](std::filesystem::file_time_type modified) {
        spill(dir_ / ".owner", elsewhere.dump());
        std::filesystem::last_write_time(dir_ / ".owner", modified);
        return is_live(posix_file_system(), dir_ / ".owner", elsewhere, {});
    };
    EXPECT_TRUE(is_live_at(now));
    EXPECT_TRUE(is_live_at(now - seconds(30)));
    EXPECT_TRUE(is_live_at(now + seconds(30))) << "clocks are corrected a little";
    EXPECT_FALSE(is_live_at(now - hours(1)));
    EXPECT_FALSE(is_live_at(now + hours(1))) << "the clock was set back since it died";
    EXPECT_FALSE(is_live_at(epoch)) << "1970 is a time as any other";
    EXPECT_FALSE(is_live_at(epoch - hours(1)));
    EXPECT_FALSE(is_live_at(now + hours(24 * 365 * 230))) << "beyond what nanoseconds tell";
    is_live_at(epoch);
    EXPECT_NO_THROW(Saver taken(nullptr, dir_.path(), saver_options()));
}

TEST_F(SaverTest, AHostOfAnyNameHoldsALeaseThatAllCanRead) {
    for (const std::string host : {"a \"quoted\" host", "two\nlines", "back\\slash", "tab\there", ""}) {
        Holder holder = Holder::this_process("anyone");
        holder.host = host;
        EXPECT_EQ(Holder::parse(holder.dump()).host, host);
    }
    Holder elsewhere = Holder::this_process("elsewhere");
    elsewhere.host = "a\nb\x1b[31m";
    elsewhere.machine = "another boot";
    spill(dir_ / ".owner", elsewhere.dump());
    const Error error = error_of([&] { Saver second(nullptr, dir_.path(), saver_options()); });
    EXPECT_NE(std::string(error.what()).find("on a?b?[31m;"), std::string::npos) << error.what();
}

TEST_F(SaverTest, ARootMayBeALinkToADirectoryAndToNothingElse) {
    std::filesystem::create_directory(dir_ / "real");
    std::filesystem::create_directory_symlink("real", dir_ / "link");
    {
        Saver saver(nullptr, dir_ / "link/", saver_options());
        saver.save(1, owned_.state);
        EXPECT_EQ(error_of([&] { Saver second(nullptr, dir_ / "real", saver_options()); }).code(), Code::invalid_state);
    }
    EXPECT_EQ(committed(dir_ / "real"), Steps{"1"});
    std::filesystem::create_directory_symlink("nowhere", dir_ / "dangling");
    for (const char* root : {"dangling", "dangling/below"}) {
        const Error error = error_of([&] { Saver saver(nullptr, dir_ / root, saver_options()); });
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_NE(std::string(error.what()).find("/dangling is a symbolic link that leads nowhere"), std::string::npos)
            << error.what();
    }
    // So may the lease be, which nobody here made.
    std::filesystem::create_symlink("nowhere", dir_ / ".owner");
    const Error error = error_of([&] { Saver saver(nullptr, dir_.path(), saver_options()); });
    EXPECT_NE(std::string(error.what()).find("a link that leads nowhere"), std::string::npos) << error.what();
}

TEST_F(SaverTest, ARootThatVanishesIsToldAndItsSaverClosed) {
    Saver saver(nullptr, dir_ / "root", saver_options());
    saver.save(1, owned_.state);
    std::filesystem::remove_all(dir_ / "root");
    const Error error = error_of([&] { saver.save(2, owned_.state); });
    EXPECT_EQ(error.code(), Code::invalid_state);
    EXPECT_NE(std::string(error.what()).find("close this saver and open one anew"), std::string::npos);
    // Another one in this process has the root from the beginning.
    Saver next(nullptr, dir_ / "root", saver_options());
    next.save(3, owned_.state);
    EXPECT_EQ(error_of([&] { saver.save(4, owned_.state); }).code(), Code::invalid_state);
    EXPECT_EQ(committed(dir_ / "root"), Steps{"3"});
}

TEST_F(SaverTest, BadArgumentsAreTold) {
    EXPECT_EQ(error_of([&] { Saver saver(nullptr, "", saver_options()); }).code(), Code::invalid_argument);
    SaverOptions options = saver_options();
    options.retention.latest = -1;
    EXPECT_EQ(error_of([&] { Saver saver(nullptr, dir_.path(), options); }).code(), Code::invalid_argument);
    spill(dir_ / "file", "");
    EXPECT_EQ(error_of([&] { Saver saver(nullptr, dir_ / "file", saver_options()); }).code(), Code::invalid_argument);
    EXPECT_EQ(error_of([&] { Saver saver(nullptr, dir_ / "s3://bucket/run", saver_options()); }).code(),
              Code::invalid_argument);
    EXPECT_FALSE(std::filesystem::exists(dir_ / "s3:"));
    Saver saver(nullptr, dir_.path(), saver_options());
    EXPECT_EQ(error_of([&] { saver.save(-1, owned_.state); }).code(), Code::invalid_argument);
    // Saves below a save would never be found, and a job that resumed there would begin anew.
    saver.save(1, owned_.state);
    const std::string save = only_save(dir_.path());
    const Error error = error_of([&] { Saver(nullptr, save + "/", saver_options()); });
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("a root to save into, such as " + dir_.path()), std::string::npos)
        << error.what();
    EXPECT_FALSE(std::filesystem::exists(save + "/.owner"));
}

// What is no root is told with what to give in its place, and nothing is made there.
TEST_F(SaverTest, APlaceInACheckpointIsNoRoot) {
    SaverOptions options = saver_options();
    options.retention = {1, 1, BestRule{"loss", Better::lower}, 0};
    owned_.state.set_metric("loss", 1);
    {
        Saver saver(nullptr, dir_ / "ck", options);
        saver.save(1, owned_.state);
    }
    const std::string root = dir_ / "ck";
    const std::string save = only_save(root);
    std::filesystem::create_directory_symlink(save, dir_ / "link");
    const auto refused = [&](const std::string& place, const std::string& said) {
        const Error error = error_of([&] { Saver(nullptr, place, options); });
        EXPECT_EQ(error.code(), Code::invalid_argument) << place;
        EXPECT_NE(std::string(error.what()).find(said), std::string::npos) << error.what();
    };
    refused(root + "/latest", "/latest names a checkpoint of the root " + root + "; to save into that, give " + root);
    refused(root + "/best", "/best names a checkpoint of the root " + root + "; to save into that, give " + root);
    refused(save + "/more", "/more lies in the checkpoint " + save + "; name a directory outside of it, or the root");
    refused(save + "/more/and/more", " lies in the checkpoint " + save);
    refused(dir_ / "link", "is a checkpoint; name a new directory");
    refused(dir_ / "link/more", "lies in the checkpoint " + (dir_ / "link"));
    EXPECT_FALSE(std::filesystem::exists(save + "/more"));
    // A file of that name may be anything.
    spill(dir_ / "manifest.json", "{\"name\": \"a web page\"}");
    Saver beside(nullptr, dir_ / "other", options);
}

// Either layout where the other is would hide or remove what is there.
TEST_F(SaverTest, ARootIsEitherASaversOrOfTesseraTorchCheckpoint) {
    SaverOptions of_torch = saver_options();
    of_torch.writer.language = "pytorch";
    of_torch.retention.latest = 0;
    const auto refused = [&](const std::string& place, const SaverOptions& options, const std::string& said) {
        const Error error = error_of([&] { Saver(nullptr, place, options); });
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_NE(std::string(error.what()).find(said), std::string::npos) << error.what();
        EXPECT_FALSE(std::filesystem::exists(place + "/.owner"));
    };
    for (const int step : {1, 2}) {  // each in its own goes on
        Saver(nullptr, dir_ / "saver", saver_options()).save(step, owned_.state);
        Saver(nullptr, dir_ / "torch", of_torch).save(step, owned_.state);
    }
    refused(dir_ / "saver", of_torch, (dir_ / "saver") + " is the root of a saver (step-00000002-");
    refused(dir_ / "torch", saver_options(), (dir_ / "torch") + " is a directory of tessera.torch.checkpoint");
    std::filesystem::create_directory(dir_ / "dcp");
    spill(dir_ / "dcp/.metadata", "");
    refused(dir_ / "dcp", saver_options(), "is a checkpoint in PyTorch's format");
    Saver(nullptr, dir_ / "dcp", of_torch).save(1, owned_.state);
}

TEST_F(SaverTest, RootsThatDifferAreBothTold) {
    const auto meeting = std::make_shared<Meeting>(2);
    for (const auto& outcome : run_threads(2, [&](int rank) {
             Saver(std::make_shared<MeetingComm>(meeting, rank, 2), dir_ / (rank == 0 ? "a" : "b"), saver_options());
         })) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_NE(std::string(outcome->what())
                      .find("rank 1 saves into another root than rank 0: into " + (dir_ / "b") + ", rank 0 into " +
                            (dir_ / "a")),
                  std::string::npos)
            << outcome->what();
    }
}

}  // namespace
}  // namespace tsr::testing
