// What docs/SCALING.md tells of the memory of a communicator is what the code takes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "comm/gloo/wire.hpp"
#include "comm/rendezvous.hpp"
#include "comm/shm/layout.hpp"
#include "places.hpp"

namespace tsr {
namespace {

std::string page() {
    std::ifstream file(testing::source_dir() + "/docs/SCALING.md");
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

std::string in_mib(size_t bytes) {
    const double mib = static_cast<double>(bytes) / (1 << 20);
    return mib < 9.95 ? fmt::format("{:.1f} MiB", mib) : fmt::format("{:.0f} MiB", mib);
}

constexpr size_t host_sizes[] = {2, 4, 8, 16, 32, 64, 128};

template <class Figure>
std::string row(const std::string& head, Figure&& figure) {
    std::string line = "| " + head + " |";
    for (const size_t ranks : host_sizes) line += " " + figure(ranks) + " |";
    return line + "\n";
}

TEST(ScalingPage, TellsTheSharedMemoryOfAHost) {
    using shm::SegmentPlan;
    const std::string text = page();
    for (const std::string& line :
         {row("ranks of the host", [](size_t p) { return std::to_string(p); }),
          row("slots of a staging area", [](size_t p) { return std::to_string(SegmentPlan(p).slots); }),
          row("staging and pages of the ranks",
              [](size_t p) { return in_mib(SegmentPlan(p).channel(0, 0) - SegmentPlan(p).rank_page(0)); }),
          row("channels", [](size_t p) { return in_mib(SegmentPlan(p).total() - SegmentPlan(p).channel(0, 0)); }),
          row("together", [](size_t p) { return in_mib(SegmentPlan(p).total()); })}) {
        EXPECT_NE(text.find(line), std::string::npos) << "docs/SCALING.md should have this line:\n" << line;
    }
}

TEST(ScalingPage, TellsWhatARankKeeps) {
    const std::string text = page();
    const std::string shared = in_mib(shm::SegmentPlan(8).total());
    const auto notices = [](size_t ranks) { return in_mib(3 * sizeof(gloo_transport::Notice) * (ranks - 1)); };
    for (const std::string& line : {fmt::format("| p^2 | {} | {} |\n", shared, shared),
                                    fmt::format("| notices, three of {} bytes for each peer | N | {} | {} |\n",
                                                sizeof(gloo_transport::Notice), notices(1024), notices(4096)),
                                    fmt::format("a record of {} bytes per rank,", sizeof(Peer))}) {
        EXPECT_NE(text.find(line), std::string::npos) << "docs/SCALING.md should have this:\n" << line;
    }
}

}  // namespace
}  // namespace tsr
