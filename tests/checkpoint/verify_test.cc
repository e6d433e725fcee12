// A check of every byte reads from several threads at once, whatever the format.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "checkpoint/export.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"

namespace tsr::testing {
namespace {

constexpr int at_once = 4;
constexpr int64_t least_data_bytes = int64_t{1} << 20;  // headers are read in less

// Holds each read of data until so many are in flight at once.
class MeetingReads {
   public:
    explicit MeetingReads(int wanted) : wanted_(wanted) {}

    Verdict operator()(const FaultyFiles::Call& call) {
        if (!call.name.starts_with("read ") || static_cast<int64_t>(call.bytes) < least_data_bytes) return {};
        std::unique_lock lock(mutex_);
        most_ = std::max(most_, ++in_flight_);
        changed_.notify_all();
        const auto met = [&] { return most_ >= wanted_ || has_given_up_; };
        if (!changed_.wait_for(lock, std::chrono::seconds(20), met)) has_given_up_ = true;
        --in_flight_;
        return {};
    }
    [[nodiscard]] int most() const { return most_; }

   private:
    const int wanted_;
    std::mutex mutex_;  // guards all below
    std::condition_variable changed_;
    int in_flight_ = 0;
    int most_ = 0;
    bool has_given_up_ = false;
};

class VerifyOf : public ::testing::TestWithParam<std::optional<ExportFormat>> {};

TEST_P(VerifyOf, ReadsOnSeveralThreadsAtOnce) {
    const TempDir dir;
    OwnedState owned;
    for (const char* name : {"a", "b", "c"}) owned.add_whole({name, DType::f32, {3, 1 << 20}});
    owned.fill(1);
    Saver(nullptr, dir / "root", saver_options()).save(1, owned.state);
    std::string path = dir / "root";
    if (GetParam()) {
        ExportOptions options;
        options.format = *GetParam();
        Peers alone(nullptr);
        (void)export_checkpoint(*Checkpoint::open(path), alone, dir / "out", options);
        path = dir / "out";
    }
    MeetingReads reads(at_once);
    FaultyFiles files(posix_file_system(), std::ref(reads));
    EXPECT_TRUE(Checkpoint::open(path, files)->verify(Depth::everything).empty());
    EXPECT_EQ(reads.most(), at_once);
}

INSTANTIATE_TEST_SUITE_P(Formats, VerifyOf,
                         ::testing::Values(std::nullopt, ExportFormat::safetensors, ExportFormat::torch_dcp,
                                           ExportFormat::torch_save),
                         [](const auto& format) {
                             return format.param ? std::string(name_of(*format.param)) : std::string("native");
                         });

}  // namespace
}  // namespace tsr::testing
