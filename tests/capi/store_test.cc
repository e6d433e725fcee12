// tessera/store.h through the C ABI.
#include "tessera/store.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>

#include "patience.hpp"
#include "tessera/error.h"

namespace {

class StoreApi : public ::testing::Test {
   protected:
    void SetUp() override {
        ASSERT_EQ(tsr_store_options_init(&options_, sizeof options_), TSR_OK);
        options_.token = token_.c_str();
        options_.job_id = "api";
        options_.timeout_ms = tsr::testing::patience_ms(20000);
        ASSERT_EQ(tsr_store_serve("127.0.0.1", 0, &options_, &server_), TSR_OK) << message();
        uint16_t port = 0;
        ASSERT_EQ(tsr_store_server_port(server_, &port), TSR_OK);
        uri_ = "tcp://127.0.0.1:" + std::to_string(port);
        ASSERT_EQ(tsr_store_open(uri_.c_str(), &options_, &store_), TSR_OK) << message();
    }
    void TearDown() override {
        tsr_store_destroy(store_);
        tsr_store_server_destroy(server_);
    }
    static std::string message() { return tsr_error_message(tsr_error_last()); }

    std::string token_ = std::string(64, '7');
    tsr_store_options options_{};
    tsr_store_server* server_ = nullptr;
    tsr_store* store_ = nullptr;
    std::string uri_;
};

TEST_F(StoreApi, SetsAndGets) {
    std::array<char, 8> buffer{};
    size_t size = 0;
    EXPECT_EQ(tsr_store_get(store_, "k", buffer.data(), buffer.size(), &size), TSR_E_NOT_FOUND);
    ASSERT_EQ(tsr_store_set(store_, "k", "value", 5), TSR_OK);
    ASSERT_EQ(tsr_store_get(store_, "k", buffer.data(), buffer.size(), &size), TSR_OK);
    EXPECT_EQ(std::string(buffer.data(), size), "value");
    buffer.fill('x');
    ASSERT_EQ(tsr_store_get(store_, "k", buffer.data(), 4, &size), TSR_OK);
    EXPECT_EQ(size, 5U);
    EXPECT_EQ(buffer[0], 'x') << "a value that does not fit is not written at all";
    ASSERT_EQ(tsr_store_get(store_, "k", nullptr, 0, &size), TSR_OK);
    EXPECT_EQ(size, 5U);
    ASSERT_EQ(tsr_store_set(store_, "empty", nullptr, 0), TSR_OK);
    ASSERT_EQ(tsr_store_get(store_, "empty", nullptr, 0, &size), TSR_OK);
    EXPECT_EQ(size, 0U);
}

TEST_F(StoreApi, WaitsAddsSwapsAndDeletes) {
    EXPECT_EQ(tsr_store_wait(store_, "n", 10), TSR_E_TIMEOUT);
    int64_t number = 0;
    ASSERT_EQ(tsr_store_add(store_, "n", 7, &number), TSR_OK);
    EXPECT_EQ(number, 7);
    ASSERT_EQ(tsr_store_add(store_, "n", 1, nullptr), TSR_OK);
    EXPECT_EQ(tsr_store_wait(store_, "n", -1), TSR_OK);
    int32_t flag = -1;
    ASSERT_EQ(tsr_store_compare_set(store_, "n", "7", 1, "9", 1, &flag), TSR_OK);
    EXPECT_EQ(flag, 0);
    ASSERT_EQ(tsr_store_compare_set(store_, "n", "8", 1, "9", 1, &flag), TSR_OK);
    EXPECT_EQ(flag, 1);
    ASSERT_EQ(tsr_store_compare_set(store_, "new", nullptr, 0, "x", 1, &flag), TSR_OK);
    EXPECT_EQ(flag, 1);
    ASSERT_EQ(tsr_store_delete(store_, "n", &flag), TSR_OK);
    EXPECT_EQ(flag, 1);
    ASSERT_EQ(tsr_store_delete(store_, "n", nullptr), TSR_OK);
}

TEST_F(StoreApi, BadArgumentsAreRefused) {
    size_t size = 0;
    EXPECT_EQ(tsr_store_set(nullptr, "k", "v", 1), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_store_set(store_, nullptr, "v", 1), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_store_set(store_, "", "v", 1), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_store_set(store_, "k", nullptr, 1), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_store_get(store_, "k", nullptr, 0, nullptr), TSR_E_NOT_FOUND);
    ASSERT_EQ(tsr_store_set(store_, "k", "v", 1), TSR_OK);
    EXPECT_EQ(tsr_store_get(store_, "k", nullptr, 0, nullptr), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_store_get(store_, "k", nullptr, 4, &size), TSR_E_INVALID_ARGUMENT);
    tsr_store* other = nullptr;
    EXPECT_EQ(tsr_store_open("nonsense", &options_, &other), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(other, nullptr);
    EXPECT_EQ(tsr_store_open(nullptr, &options_, &other), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_store_open(uri_.c_str(), &options_, nullptr), TSR_E_INVALID_ARGUMENT);
    options_.timeout_ms = 0;
    EXPECT_EQ(tsr_store_open(uri_.c_str(), &options_, &other), TSR_E_INVALID_ARGUMENT);
    // A handle of another type is told apart by its magic word.
    EXPECT_EQ(tsr_store_set(reinterpret_cast<const tsr_store*>(server_), "k", "v", 1), TSR_E_INVALID_ARGUMENT);
}

TEST_F(StoreApi, DestroyedHandleIsInvalidState) {
    tsr_store* other = nullptr;
    ASSERT_EQ(tsr_store_open(uri_.c_str(), &options_, &other), TSR_OK);
    tsr_store_destroy(other);
    EXPECT_EQ(tsr_store_set(other, "k", "v", 1), TSR_E_INVALID_STATE);
    tsr_store_destroy(nullptr);
    tsr_store_server_destroy(nullptr);
}

TEST_F(StoreApi, WrongTokenIsPermission) {
    const std::string wrong(64, '8');
    options_.token = wrong.c_str();
    tsr_store* other = nullptr;
    EXPECT_EQ(tsr_store_open(uri_.c_str(), &options_, &other), TSR_E_PERMISSION);
    EXPECT_NE(message().find("token"), std::string::npos) << message();
}

}  // namespace
