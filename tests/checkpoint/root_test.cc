// Which directories a saver takes as its root. It refuses the others with a message that says what to give instead.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "fixture.hpp"
#include "saver_fixture.hpp"

namespace tsr::testing {
namespace {

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
        EXPECT_NE(std::string(error.what()).find("/dangling is a dangling symbolic link"), std::string::npos)
            << error.what();
    }
    // So may the lease be, which nobody here made.
    std::filesystem::create_symlink("nowhere", dir_ / ".owner");
    const Error error = error_of([&] { Saver saver(nullptr, dir_.path(), saver_options()); });
    EXPECT_NE(std::string(error.what()).find("a dangling symbolic link"), std::string::npos) << error.what();
}

TEST_F(SaverTest, ARootThatVanishesIsToldAndItsSaverClosed) {
    Saver saver(nullptr, dir_ / "root", saver_options());
    saver.save(1, owned_.state);
    std::filesystem::remove_all(dir_ / "root");
    const Error error = error_of([&] { saver.save(2, owned_.state); });
    EXPECT_EQ(error.code(), Code::invalid_state);
    EXPECT_NE(std::string(error.what()).find("close this saver and open a new one"), std::string::npos);
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
    EXPECT_NE(std::string(error.what()).find("a new directory or a root such as " + dir_.path()), std::string::npos)
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
    refused(root + "/latest",
            "/latest names a checkpoint of the root " + root + "; to save into that root, pass " + root);
    refused(root + "/best", "/best names a checkpoint of the root " + root + "; to save into that root, pass " + root);
    refused(save + "/more", "/more is inside the checkpoint " + save + "; pass a directory outside of it, or the root");
    refused(save + "/more/and/more", " is inside the checkpoint " + save);
    refused(dir_ / "link", "is a checkpoint, not a root; pass a new directory");
    refused(dir_ / "link/more", "is inside the checkpoint " + (dir_ / "link"));
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

}  // namespace
}  // namespace tsr::testing
