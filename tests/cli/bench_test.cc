// `tessera bench`: every operation gives what it must, in ranks that it starts itself and in those of a job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "command.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Json bench(const std::string& arguments) {
    const Result result = tessera(arguments + " --json", "2>&1 < /dev/null", "bench");
    EXPECT_EQ(result.code, 0) << arguments << ": " << result.output;
    return Json::parse(result.output, arguments);
}

std::vector<std::string> keys_of(const Json& object) {
    std::vector<std::string> keys;
    for (const Json::Member& member : object.as_object()) keys.push_back(member.key);
    return keys;
}

void expect_sound(const Json& document, size_t rows) {
    EXPECT_EQ(document.at("rows").as_array().size(), rows) << document.dump();
    for (const Json& row : document.at("rows").as_array()) {
        EXPECT_EQ(row.at("wrong").as_int(), 0) << document.dump();
        EXPECT_GT(row.at("time_us").as_double(), 0);
    }
}

TEST(Bench, EveryOperationGivesWhatItMust) {
    for (const char* operation : {"all_reduce", "reduce_scatter", "all_gather", "all_gather_v", "broadcast", "reduce",
                                  "gather", "scatter", "all_to_all", "send_recv"}) {
        for (const char* memory : {"", " --foreign"}) {
            // In a rank's line, in one shot, and in several segments; rounded to what three ranks can share.
            const Json document = bench(std::string(operation) + " -n 3 -b 8 -e 512K -f 256 -i 2 -w 1" + memory);
            expect_sound(document, 3);
            EXPECT_EQ(document.at("transport").as_string(), "shm");
            EXPECT_GE(document.at("rows").as_array()[0].at("bytes").as_int(), 8);
        }
    }
}

TEST(Bench, ReductionsOfEveryDtypeAndOp) {
    for (const char* dtype : {"f16", "bf16", "f32", "f64", "i8", "u8", "i32", "i64"}) {
        for (const char* op : {"sum", "avg", "min", "max", "prod"}) {
            const Json document =
                bench(std::string("all_reduce -n 2 -b 40K -e 40K -i 1 -w 0 -d ") + dtype + " -o " + op);
            expect_sound(document, 1);
            EXPECT_EQ(document.at("dtype").as_string(), dtype);
            EXPECT_EQ(document.at("op").as_string(), op);
        }
    }
}

// Scripts read it: docs/COMMAND.md names these fields.
TEST(Bench, DocumentHasTheseFields) {
    const Json document = bench("reduce -n 2 -b 64 -e 128 -r 1 -i 1");
    EXPECT_THAT(keys_of(document),
                ElementsAre("operation", "dtype", "op", "root", "ranks", "transport", "memory", "rounds", "rows"));
    EXPECT_EQ(document.at("operation").as_string(), "reduce");
    EXPECT_EQ(document.at("root").as_int(), 1);
    EXPECT_EQ(document.at("ranks").as_int(), 2);
    EXPECT_EQ(document.at("memory").as_string(), "library");
    const Json& row = document.at("rows").as_array()[1];
    EXPECT_THAT(keys_of(row),
                ElementsAre("bytes", "count", "iterations", "time_us", "algbw_gb_s", "busbw_gb_s", "wrong"));
    EXPECT_EQ(row.at("bytes").as_int(), 128);
    EXPECT_EQ(row.at("count").as_int(), 32);
    EXPECT_EQ(row.at("iterations").as_int(), 1);
    EXPECT_TRUE(bench("all_gather -n 2 -e 8 -i 1").at("op").is(Json::Kind::null));
}

// Bytes by time, and what of it crosses a link.
TEST(Bench, BandwidthsFollowFromTheTime) {
    const Json row = bench("all_reduce -n 4 -b 1M -e 1M -i 1").at("rows").as_array()[0];
    const double algbw = row.at("bytes").as_double() / row.at("time_us").as_double() / 1000;
    EXPECT_NEAR(row.at("algbw_gb_s").as_double(), algbw, 1e-9 * algbw);
    EXPECT_NEAR(row.at("busbw_gb_s").as_double(), 1.5 * algbw, 1e-9 * algbw);
}

TEST(Bench, OneRankAndBarriersHaveATable) {
    expect_sound(bench("barrier -n 2 -i 3"), 1);
    const Result result = tessera("all_reduce -n 1 -b 4 -e 4 -i 1", "2>&1", "bench");
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.output,
                AllOf(StartsWith("all_reduce (sum) of f32 over 1 rank via self, library memory; median of 7"),
                      ContainsRegex("\n +4 +1 +1 +[0-9.]+ +[0-9.]+ +0.000 +0\n$")));
}

TEST(Bench, InsideAJobItsRanksAreMeasured) {
    const std::string command = binary_dir() + "/tessera bench broadcast -b 1K -e 1K -i 2 --json";
    const Result result = tessera("--no-prefix -n 3 " + command, "2>&1", "run");
    EXPECT_EQ(result.code, 0) << result.output;
    EXPECT_EQ(Json::parse(result.output, command).at("ranks").as_int(), 3);
    const Result other = tessera("-n 3 " + command + " -n 2", "2>&1", "run");
    EXPECT_NE(other.code, 0);
    EXPECT_THAT(other.output, HasSubstr("-n 2 does not match the 3 ranks of the job"));
}

TEST(Bench, OverAnotherTransport) {
    const Result result = tessera("-n 2 --no-prefix --env TESSERA_BACKEND=gloo " + binary_dir() +
                                      "/tessera bench reduce_scatter -d bf16 -b 64K -e 64K -i 1 --json",
                                  "2>&1", "run");
    EXPECT_EQ(result.code, 0) << result.output;
    const Json document = Json::parse(result.output, "gloo");
    EXPECT_EQ(document.at("transport").as_string(), "gloo");
    expect_sound(document, 1);
}

TEST(Bench, WrongUsageIsToldBeforeAnyRankStarts) {
    const auto refused = [](const std::string& arguments) {
        const Result result = tessera(arguments, "2>&1", "bench");
        EXPECT_EQ(result.code, 2) << arguments;
        return result.output;
    };
    EXPECT_THAT(refused("all_reuce"),
                StartsWith("tessera bench: unknown operation 'all_reuce'; available: all_reduce, reduce_"));
    EXPECT_THAT(refused("all_reduce -d c64"), HasSubstr("--dtype c64: expected one of f16, bf16"));
    EXPECT_THAT(refused("all_reduce -o mean"), HasSubstr("--op mean: expected one of sum, avg"));
    EXPECT_THAT(refused("all_reduce -b 2K -e 1K"), HasSubstr("--max-bytes 1024 is less than --min-bytes 2048"));
    EXPECT_THAT(refused("broadcast -n 2 -r 2"), HasSubstr("--root 2 is not a rank; there are 2 ranks"));
    EXPECT_THAT(refused("send_recv -n 1"), HasSubstr("send_recv needs at least 2 ranks"));
}

}  // namespace
}  // namespace tsr::testing
