#include "base/error.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <new>
#include <system_error>

namespace tsr {
namespace {

TEST(Error, CopiesChangeWithoutTouchingTheOriginal) {
    const Error plain(Code::timeout, "too late");
    const Error named = plain.with_rank(2).with_peer(3).with_operation("all_reduce", 412);
    EXPECT_EQ(plain.record()->rank, -1);
    EXPECT_EQ(named.record()->rank, 2);
    EXPECT_EQ(named.record()->peer, 3);
    EXPECT_EQ(named.record()->operation, "all_reduce");
    EXPECT_EQ(named.record()->sequence, 412);
    EXPECT_STREQ(named.what(), "too late");
}

TEST(Error, CausesAreChained) {
    const Error cause = os_error("write of 5 bytes", ENOSPC);
    const Error error = Error(Code::aborted, "save failed").caused_by(cause);
    ASSERT_NE(error.record()->cause, nullptr);
    EXPECT_EQ(error.record()->cause->native_code, ENOSPC);
    EXPECT_EQ(error.record()->cause->code, Code::io);
}

TEST(Error, ErrnoDecidesTheCode) {
    EXPECT_EQ(os_error("x", EACCES).code(), Code::permission);
    EXPECT_EQ(os_error("x", ENOMEM).code(), Code::no_memory);
    EXPECT_EQ(os_error("x", EIO).code(), Code::io);
}

TEST(Error, ForeignExceptionsBecomeErrors) {
    const auto caught = [](auto thrown) {
        try {
            throw thrown;
        } catch (...) {
            return current_error();
        }
    };
    EXPECT_EQ(caught(std::bad_alloc()).code(), Code::no_memory);
    EXPECT_EQ(caught(std::runtime_error("odd")).code(), Code::internal);
    EXPECT_EQ(caught(7).code(), Code::internal);
    const Error no_thread = caught(std::system_error(EAGAIN, std::generic_category()));  // as std::thread throws it
    EXPECT_EQ(no_thread.code(), Code::no_memory);
    EXPECT_NE(std::string(no_thread.what()).find("cannot start a thread"), std::string::npos);
    EXPECT_EQ(caught(std::system_error(EPERM, std::generic_category())).code(), Code::internal);
    EXPECT_EQ(caught(Error(Code::mismatch, "m")).code(), Code::mismatch);
}

}  // namespace
}  // namespace tsr
