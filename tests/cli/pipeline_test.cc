// `tessera pipeline show`.
#include <gmock/gmock.h>

#include "cli/command.hpp"
#include "temporary_directory.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Result show(const std::string& arguments) { return tessera("show " + arguments, "2>&1", "pipeline"); }

TEST(Pipeline, IsDrawnToScale) {
    const Result result = show("--schedule 1f1b --ranks 2 --microbatches 3");
    EXPECT_EQ(result.code, 0);
    EXPECT_EQ(result.output,
              "1f1b: 2 ranks, 2 stages, 3 micro-batches\n"
              "rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -\n"
              "rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .\n"
              "makespan 12, idle 3 (25.0 %), peak 2 activations\n");
}

TEST(Pipeline, LongRowsContinueBelow) {
    const std::string text = show("--schedule zbv --ranks 4 --microbatches 8").output;
    EXPECT_THAT(
        text, AllOf(StartsWith("zbv: 4 ranks, 8 stages, 8 micro-batches\nrank 0  0F0 0F1 "),
                    HasSubstr("\n\nrank 0  7I5 7W5 "), EndsWith("makespan 51, idle 3 (5.9 %), peak 8 activations\n")));
}

TEST(Pipeline, TimesAreTheUsers) {
    const std::string two = "--schedule gpipe --ranks 2 --microbatches 1 ";
    EXPECT_THAT(show(two + "--forward 2 --input 3 --weight 1").output, HasSubstr("makespan 12,"));
    EXPECT_THAT(show(two + "--latency 0.5 --transfer 0.25").output, HasSubstr("makespan 7.5,"));
    EXPECT_THAT(show(two + "--forward 0 --input 0 --weight 0").output, HasSubstr("makespan 0, idle 0 (0.0 %)"));
}

TEST(Pipeline, OtherFormats) {
    const std::string one = "--schedule dualpipev --ranks 2 --microbatches 4 ";
    EXPECT_THAT(show(one + "--csv").output, HasSubstr("1F2,2B0,(2F2;1B0)OVERLAP_F_B,"));
    EXPECT_THAT(show(one + "--csv-comms").output, StartsWith("0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,"));
    const Json json = Json::parse(show(one + "--json").output, "json");
    EXPECT_EQ(json.at("makespan").as_double(), json.at("ranks").as_array()[0].at("busy").as_double() + 1);
    EXPECT_EQ(json.at("rank_of_stage").as_array().size(), 4U);
    EXPECT_EQ(Json::parse(show(one + "--trace").output, "trace").at("traceEvents").as_array().size(), 2U + 37U);
    EXPECT_THAT(show(one + "--svg").output,
                AllOf(StartsWith("<svg "), HasSubstr("<title>2F2: "), EndsWith("</svg>\n")));
}

TEST(Pipeline, AFileIsReadAndValidated) {
    const TemporaryDirectory directory;
    const std::string path = (directory.path() / "schedule.csv").string();
    std::ofstream(path) << "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
    EXPECT_THAT(show("--file " + path).output, HasSubstr("2 ranks, 2 stages, 2 micro-batches"));
    std::ofstream(path) << "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n";
    const Result circle = show("--file " + path);
    EXPECT_EQ(circle.code, 2);
    EXPECT_THAT(circle.output, AllOf(StartsWith("tessera"), HasSubstr(path + ": the ranks of this schedule wait")));
    EXPECT_THAT(show("--file " + directory.path().string()).output, HasSubstr("cannot read"));
    const std::string odd = (directory.path() / "a<b&c\xff.csv").string();
    std::ofstream(odd) << "0F0,0B0\n";
    EXPECT_THAT(show("--svg --file '" + odd + "'").output, HasSubstr("a&lt;b&amp;c"));
    EXPECT_EQ(show("--json --file '" + odd + "'").code, 0);
    EXPECT_THAT(show("--file /nonexistent").output, HasSubstr("cannot open /nonexistent: No such file"));
}

TEST(Pipeline, AFileThatIsTooLargeIsRefused) {
    const TemporaryDirectory directory;
    const std::string path = (directory.path() / "large.csv").string();
    std::ofstream{path};
    std::filesystem::resize_file(path, (uintmax_t{256} << 20) + 1);
    const Result result = show("--file " + path);
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.output, HasSubstr(path + ": a schedule may have at most 268435456 bytes"));
}

TEST(Pipeline, WrongUsage) {
    for (const auto& [arguments, why] : std::initializer_list<std::pair<const char*, const char*>>{
             {"--schedule 1f1b --ranks 8 --microbatches 4", "the next number that works is 8"},
             {"--schedule none", "known are gpipe, 1f1b"},
             {"--csv --json", "exclude each other"},
             {"--forward nan", "number"},
             {"--forward -1", "--forward"},
             {"--ranks 0", "0 ranks"},
             {"--forward 1e308 --svg", "not a finite number"},
             {"--latency 1e300 --schedule gpipe", "too long to draw"},
             {"--schedule gpipe --ranks 512 --microbatches 4096", "too many to draw"}}) {
        const Result result = show(arguments);
        EXPECT_EQ(result.code, 2) << arguments << result.output;
        EXPECT_THAT(result.output, HasSubstr(why)) << arguments;
    }
}

}  // namespace
}  // namespace tsr::testing
