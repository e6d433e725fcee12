// A check of every byte reads from several threads at once, whatever the format.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "checkpoint/export/export.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "patience.hpp"

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
        if (!changed_.wait_for(lock, patience(std::chrono::seconds(20)), met)) has_given_up_ = true;
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

class VerifyOf : public ::testing::TestWithParam<std::optional<ExportFormat>> {
   protected:
    // The path of a checkpoint of the format.
    static std::string checkpoint_in(const TempDir& dir, State& state) {
        Saver(nullptr, dir / "root", saver_options()).save(1, state);
        if (!GetParam()) return dir / "root";
        ExportOptions options;
        options.format = *GetParam();
        Peers alone(nullptr);
        (void)export_checkpoint(*Checkpoint::open(dir / "root"), alone, dir / "out", options);
        return dir / "out";
    }
};

TEST_P(VerifyOf, ReadsOnSeveralThreadsAtOnce) {
    const TempDir dir;
    OwnedState owned;
    for (const char* name : {"a", "b", "c"}) owned.add_whole({name, DType::f32, {3, 1 << 20}});
    owned.fill(1);
    const std::string path = checkpoint_in(dir, owned.state);
    MeetingReads reads(at_once);
    FaultyFiles files(posix_file_system(), std::ref(reads));
    EXPECT_TRUE(Checkpoint::open(path, files)->verify(Depth::everything).empty());
    EXPECT_EQ(reads.most(), at_once);
}

// Runs `body` on a thread of its own, and says whether it ended in time.
bool ends(std::function<void()> body) {
    auto done = std::make_shared<std::promise<void>>();
    auto ended = done->get_future();
    std::thread([done, body = std::move(body)] {
        body();
        done->set_value();
    }).detach();
    return ended.wait_for(patience(std::chrono::seconds(60))) == std::future_status::ready;
}

// As a handler of signals is, in Python say, and what shows progress: either may look into what is being read.
TEST_P(VerifyOf, WhatIsCalledMeanwhileMayReadTheCheckpoint) {
    const TempDir dir;
    OwnedState owned;
    owned.add_whole({"a", DType::f32, {100}});  // alone, so that it is read by the thread that calls
    owned.fill(1);
    const std::string path = checkpoint_in(dir, owned.state);
    struct Reader {
        std::shared_ptr<const Checkpoint> checkpoint;
        std::vector<float> into = std::vector<float>(100);
        int reads = 0;
        bool is_reading = false;
        void read() {
            if (std::exchange(is_reading, true)) return;
            checkpoint->read("a", tensor_of(std::span(into), DType::f32));
            ++reads;
            is_reading = false;
        }
    };
    const auto reader = std::make_shared<Reader>();
    reader->checkpoint = Checkpoint::open(path);
    ASSERT_TRUE(ends([reader] { (void)reader->checkpoint->verify(Depth::everything, {}, [&] { reader->read(); }); }))
        << "what is called in a check";
    EXPECT_GT(std::exchange(reader->reads, 0), 0);
    reader->checkpoint = Checkpoint::open(path);  // nothing of it is known yet
    ASSERT_TRUE(ends([reader] {
        const auto look = [](void* given) {
            static_cast<Reader*>(given)->read();
            return int32_t{0};
        };
        set_interrupt(look, reader.get());
        std::vector<float> a(100);
        LoadOptions options;
        options.threads = 1;
        reader->checkpoint->read("a", tensor_of(std::span(a), DType::f32), options);
    })) << "an interrupt callback of a read";
    EXPECT_GT(reader->reads, 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, VerifyOf,
                         ::testing::Values(std::nullopt, ExportFormat::safetensors, ExportFormat::torch_dcp,
                                           ExportFormat::torch_save),
                         [](const auto& format) {
                             return format.param ? std::string(name_of(*format.param)) : std::string("native");
                         });

}  // namespace
}  // namespace tsr::testing
