// A late copy that another thread has begun and not ended. Writers and the end of the save wait for it, up to the
// timeout, and nothing torn is saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <vector>

#include "checkpoint/save/staging.hpp"
#include "fixture.hpp"
#include "patience.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr::testing {
namespace {

// One chunk whose copying stands still, in a handler of SIGSEGV, until it is let go on. One at a time.
class StuckMemory {
   public:
    StuckMemory() {
        memory_ =
            static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        closed = memory_;
        reached = false;
        opening = ::eventfd(0, EFD_CLOEXEC);
        limit_ms = patience_ms(60000);
        struct sigaction handler{};
        handler.sa_sigaction = [](int, siginfo_t* info, void*) {
            if (info->si_addr < closed || info->si_addr >= closed + size) ::abort();
            reached = true;
            pollfd entry{opening, POLLIN, 0};
            if (::poll(&entry, 1, limit_ms) != 1) ::abort();  // the test never opened it
            ::mprotect(closed, size, PROT_READ | PROT_WRITE);
        };
        handler.sa_flags = SA_SIGINFO;
        ::sigaction(SIGSEGV, &handler, &former_);
        ::mprotect(memory_, size, PROT_NONE);
    }
    ~StuckMemory() {
        ::sigaction(SIGSEGV, &former_, nullptr);
        ::munmap(memory_, size);
        ::close(opening);
    }
    StuckMemory(const StuckMemory&) = delete;
    StuckMemory& operator=(const StuckMemory&) = delete;
    [[nodiscard]] Memory memory() const { return {memory_, size}; }
    static void wait_until_reached() {
        wait_until([] { return reached.load(); }, Deadline::in(patience(milliseconds{60000})), "nobody copied");
    }
    static void open() { EXPECT_EQ(::eventfd_write(opening, 1), 0); }

   private:
    static constexpr size_t size = static_cast<size_t>(chunk_bytes);
    static inline std::byte* closed = nullptr;
    static inline std::atomic<bool> reached{false};
    static inline int opening = -1;  // an eventfd, which a signal handler may wait for
    static inline int limit_ms = 0;
    std::byte* memory_ = nullptr;
    struct sigaction former_{};
};

// A save whose one chunk another thread copies, and gets stuck.
class StuckCopyTest : public ::testing::Test {
   protected:
    void copy(milliseconds timeout) {
        const Piece piece{"w", DType::u8, std::make_shared<const Box>(Box::whole({chunk_bytes})),
                          const_cast<std::byte*>(stuck_.memory().data())};
        staging_ = std::make_shared<Staging>(std::make_shared<StagingPool>(0), 1,
                                             std::vector<ByteRuns>{ByteRuns(std::span(&piece, 1))}, timeout,
                                             Barriers{barrier_});
        staging_->stage(1, {});
        copying_ = std::async(std::launch::async, [this] { staging_->copy_late(1); });
        StuckMemory::wait_until_reached();
    }
    // Whether `body` returns only when the copy is made. A return that comes too early may be missed, but never made up.
    bool waits_for_the_copy(const std::function<void()>& body) {
        const auto done = std::async(std::launch::async, body);
        const bool waited = done.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout;
        StuckMemory::open();
        return waited && done.wait_for(patience(std::chrono::seconds(60))) == std::future_status::ready;
    }
    StuckMemory stuck_;
    std::shared_ptr<WriteBarrier> barrier_ = std::make_shared<WriteBarrier>(std::vector<Memory>{stuck_.memory()});
    std::shared_ptr<Staging> staging_;
    std::future<void> copying_;
};

TEST_F(StuckCopyTest, AWriteWaitsForACopyThatAnotherThreadHasBegun) {
    copy(patience(milliseconds{60000}));
    EXPECT_TRUE(waits_for_the_copy([&] { barrier_->before_write(stuck_.memory().subspan(4096, 1)); }));
    EXPECT_NE(staging_->source(0)->contiguous(0, chunk_bytes), nullptr);
}

TEST_F(StuckCopyTest, TheEndOfASaveWaitsForTheCopyAndThenAsksForNothing) {
    copy(patience(milliseconds{60000}));
    EXPECT_TRUE(waits_for_the_copy([&] { staging_->close(); }));
    copying_.get();
    EXPECT_EQ(staging_.use_count(), 1);
    EXPECT_EQ(barrier_.use_count(), 2);
}

TEST_F(StuckCopyTest, AWriterThatCannotWaitLongerGoesOnAndNothingTornIsSaved) {
    copy(milliseconds{20});
    barrier_->before_write(stuck_.memory());
    StuckMemory::open();
    copying_.get();
    const Error torn = error_of([&] { (void)staging_->source(0)->contiguous(0, chunk_bytes); });
    EXPECT_EQ(torn.code(), Code::timeout);
    EXPECT_THAT(torn.what(), ::testing::HasSubstr("chunk 0 of 1 was not copied within 20 ms"));
}

}  // namespace
}  // namespace tsr::testing
