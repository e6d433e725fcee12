// What torchrun's options about output mean, without a process.
#include "launch/rank_output.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"

namespace tsr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string refusal(const std::function<void()>& act) {
    try {
        act();
        return "none";
    } catch (const Error& error) {
        return error.what();
    }
}

TEST(StreamChoice, HoldsForAllRanksOrForThoseNamed) {
    for (int all = 0; all <= 3; ++all) {
        const StreamChoice choice = StreamChoice::parse(std::to_string(all));
        for (const int rank : {0, 12}) {
            EXPECT_EQ(choice.includes(rank, Stream::out), all == 1 || all == 3);
            EXPECT_EQ(choice.includes(rank, Stream::err), all == 2 || all == 3);
        }
        EXPECT_EQ(choice.any(), all != 0);
        EXPECT_EQ(choice.greatest_rank(), -1);
    }
    const StreamChoice some = StreamChoice::parse("0:1,12:3,3:0");
    EXPECT_TRUE(some.includes(0, Stream::out));
    EXPECT_FALSE(some.includes(0, Stream::err));
    EXPECT_TRUE(some.includes(12, Stream::err));
    EXPECT_FALSE(some.includes(1, Stream::out)) << "not named";
    EXPECT_TRUE(some.any());
    EXPECT_FALSE(StreamChoice::parse("1:0").any());
    EXPECT_EQ(some.greatest_rank(), 12);
}

TEST(StreamChoice, OtherTextIsRefusedWithThePartThatIsWrong) {
    for (const auto& [text, part] : {std::pair{"", "'' is not valid"},
                                     {"4", "'4' is not valid"},
                                     {"33", "'33' is not valid"},
                                     {"0:4", "'0:4' is not valid"},
                                     {"0:1,", "'' is not valid"},
                                     {"-1:1", "'-1:1' is not valid"},
                                     {"0:1,0:2", "rank 0 occurs twice"},
                                     {"99999999999:1", "'99999999999:1' is not valid"}}) {
        EXPECT_THAT(refusal([&] { (void)StreamChoice::parse(text); }), HasSubstr(part)) << text;
    }
}

TEST(OutputOptions, ARedirectedStreamIsPrintedOnlyIfTeeNamesItToo) {
    OutputOptions options;
    options.redirects = StreamChoice::parse("3");
    options.tee = StreamChoice::parse("1:1");
    EXPECT_FALSE(options.shows(0, Stream::out));
    EXPECT_TRUE(options.shows(1, Stream::out));
    EXPECT_FALSE(options.shows(1, Stream::err));
    EXPECT_TRUE(options.has_file(1, Stream::out));
    options.shown = {0};
    EXPECT_FALSE(options.shows(1, Stream::out));
}

TEST(OutputOptions, RanksThatNoHostHasAreRefused) {
    OutputOptions options;
    options.tee = StreamChoice::parse("3:1");
    EXPECT_NO_THROW(options.check(4));
    EXPECT_THAT(refusal([&] { options.check(3); }),
                HasSubstr("--tee names local rank 3, but the local ranks are 0 to 2"));
    options.tee = {};
    options.shown = {1, 4};
    EXPECT_THAT(refusal([&] { options.check(4); }), HasSubstr("--local-ranks-filter names local rank 4"));
}

TEST(RankOutput, PrefixHasTheRanksNames) {
    const RankNames names{12, 3, "trainer", "node-a"};
    EXPECT_EQ(expand_prefix("[${role_name}${local_rank}]:", names), "[trainer3]:");
    EXPECT_EQ(expand_prefix("${hostname}:${rank}: $rank ${other} $", names), "node-a:12: $rank ${other} $");
}

TEST(RankOutput, ADoubleCommaStandsForAComma) {
    EXPECT_THAT(comma_separated(""), IsEmpty());
    EXPECT_THAT(comma_separated("a"), ElementsAre("a"));
    EXPECT_THAT(comma_separated("a,b c,,d,"), ElementsAre("a", "b c,d", ""));
}

}  // namespace
}  // namespace tsr
