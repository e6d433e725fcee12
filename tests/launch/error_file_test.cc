#include "launch/error_file.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "base/json.hpp"
#include "processes.hpp"

namespace tsr {
namespace {

class ErrorFile : public ::testing::Test {
   protected:
    void write(const std::string& text) const { std::ofstream(path_) << text; }
    testing::TemporaryDirectory directory_;
    std::string path_ = (directory_.path() / "error.json").string();
};

TEST_F(ErrorFile, FirstErrorOfAProcessIsReadBack) {
    testing::Child child = testing::in_child({{"TESSERA_ERROR_FILE", path_}}, [] {
        record_error("ValueError: loss is \"nan\"", "  File train.py, line 3\n  in step");
        record_error("a later one", "");
    });
    ASSERT_EQ(child.wait(), 0);
    const auto error = read_error_file(path_);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->message, "ValueError: loss is \"nan\"");
    EXPECT_EQ(error->traceback, "  File train.py, line 3\n  in step");
    EXPECT_GT(error->timestamp, 1.7e9);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 1) << "no draft is left";
}

// torchrun's agent ends with an exception when it reads a fraction; one second would not tell ranks apart.
TEST_F(ErrorFile, TimeIsWholeForTorchrunAndExactForTheReport) {
    testing::Child child = testing::in_child({{"TORCHELASTIC_ERROR_FILE", path_}}, [] { record_error("x", ""); });
    ASSERT_EQ(child.wait(), 0);
    std::stringstream text;
    text << std::ifstream(path_).rdbuf();
    const Json document = Json::parse(text.str(), path_);
    const Json& extra = document.at("message").at("extraInfo");
    const std::string whole = extra.at("timestamp").as_string();
    EXPECT_EQ(whole.find_first_not_of("0123456789"), std::string::npos) << whole;
    const std::string exact = extra.at("tessera_timestamp").as_string();
    EXPECT_EQ(exact.substr(0, exact.find('.')), whole);
    EXPECT_EQ(read_error_file(path_)->timestamp, std::stod(exact));
}

TEST_F(ErrorFile, FactsOfTheErrorAreReadBack) {
    testing::Child child = testing::in_child({{"TESSERA_ERROR_FILE", path_}}, [] {
        const Error error(Code::timeout, "late");
        record_error("late", "",
                     error.with_rank(1)
                         .with_launcher_rank(5)
                         .with_peer(0)
                         .with_launcher_peer(3)
                         .with_operation("barrier", 7)
                         .record()
                         .get());
    });
    const pid_t pid = child.pid();
    ASSERT_EQ(child.wait(), 0);
    const auto error = read_error_file(path_);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, "TIMEOUT");
    EXPECT_EQ(error->peer, 3);
    EXPECT_EQ(error->rank, 1);
    EXPECT_EQ(error->job_rank, 5);
    std::stringstream text;
    text << std::ifstream(path_).rdbuf();
    const Json document = Json::parse(text.str(), path_);
    const Json& facts = document.at("message").at("extraInfo").at("tessera");
    EXPECT_EQ(facts.at("rank").as_int(), 1);
    EXPECT_EQ(facts.at("pid").as_int(), pid);
    EXPECT_EQ(facts.at("operation").as_string(), "barrier");
    EXPECT_EQ(facts.at("sequence").as_int(), 7);
}

TEST_F(ErrorFile, FirstFailureOfACommunicatorIsRecordedUntilItIsOver) {
    const auto failure = [](const char* words) { return Error(Code::peer_lost, words).with_launcher_peer(2).record(); };
    testing::Child child = testing::in_child({{"TESSERA_FAILURE_FILE", path_}}, [&] {
        record_failure(nullptr);
        record_failure(failure("first").get());
        record_failure(failure("second").get());
    });
    ASSERT_EQ(child.wait(), 0);
    EXPECT_EQ(read_error_file(path_).value().message, "first");
    EXPECT_EQ(read_error_file(path_).value().peer, 2);
    testing::Child survivor = testing::in_child({{"TESSERA_FAILURE_FILE", path_}}, [&] {
        record_failure(failure("outlived").get());
        record_failure(nullptr);
    });
    ASSERT_EQ(survivor.wait(), 0);
    EXPECT_FALSE(read_error_file(path_));
    const std::string nowhere = (directory_.path() / "no" / "directory").string();
    testing::Child silenced = testing::in_child({{"TESSERA_FAILURE_FILE", nowhere}},
                                                [&] { record_failure(failure("cannot be told").get()); });
    EXPECT_EQ(silenced.wait(), 0);
}

TEST_F(ErrorFile, TorchelasticsVariableServesToo) {
    testing::Child child = testing::in_child({{"TORCHELASTIC_ERROR_FILE", path_}}, [] { record_error("boom", ""); });
    ASSERT_EQ(child.wait(), 0);
    EXPECT_EQ(read_error_file(path_).value().message, "boom");
}

TEST_F(ErrorFile, WithoutALauncherNothingHappens) {
    testing::Child child = testing::in_child({}, [] { record_error("boom", ""); });
    EXPECT_EQ(child.wait(), 0);
}

TEST_F(ErrorFile, TextThatIsNotUtf8StaysReadable) {
    testing::Child child =
        testing::in_child({{"TESSERA_ERROR_FILE", path_}}, [] { record_error("bad \xff byte", "\xc3"); });
    ASSERT_EQ(child.wait(), 0);
    EXPECT_EQ(read_error_file(path_).value().message, "bad ? byte");
}

TEST_F(ErrorFile, OtherWritersFormsAreUnderstood) {
    write(R"({"message": "plain"})");
    EXPECT_EQ(read_error_file(path_).value().message, "plain");
    write(R"({"message": {"message": "m", "extraInfo": {"py_callstack": "s", "timestamp": 12}}})");
    EXPECT_EQ(read_error_file(path_).value().timestamp, 12.0);
}

TEST_F(ErrorFile, BrokenFilesAreNoError) {
    EXPECT_FALSE(read_error_file(path_));
    for (const char* text : {"", "{", "[]", "{\"message\": 3}", "{\"message\": {\"message\": \"half"}) {
        write(text);
        EXPECT_FALSE(read_error_file(path_)) << text;
    }
}

}  // namespace
}  // namespace tsr
