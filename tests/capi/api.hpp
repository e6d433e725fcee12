// What the tests of the C API share. They see the public headers alone and link the shared library.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "patience.hpp"
#include "temporary_directory.hpp"
#include "tessera/tessera.h"

namespace api {

inline std::string message() { return tsr_error_message(tsr_error_last()); }

#define EXPECT_OK(call) EXPECT_EQ(call, TSR_OK) << api::message()
#define ASSERT_OK(call) ASSERT_EQ(call, TSR_OK) << api::message()

// The call fails with `status`, and its message says `what`.
#define EXPECT_FAILS(call, status, what)                                        \
    do {                                                                        \
        EXPECT_EQ(call, status);                                                \
        EXPECT_THAT(api::message(), ::testing::HasSubstr(what)) << "of " #call; \
    } while (0)

// An owned handle: api::Owned<tsr_state> state; tsr_state_create(state.out()).
template <class T>
struct Destroyer;
// NOLINTBEGIN(bugprone-macro-parentheses): a type cannot stand in parentheses here
#define TSR_TEST_HANDLE(type)                                           \
    template <>                                                         \
    struct Destroyer<type> {                                            \
        void operator()(type* handle) const { type##_destroy(handle); } \
    }
// NOLINTEND(bugprone-macro-parentheses)
TSR_TEST_HANDLE(tsr_error);
TSR_TEST_HANDLE(tsr_store);
TSR_TEST_HANDLE(tsr_store_server);
TSR_TEST_HANDLE(tsr_comm);
TSR_TEST_HANDLE(tsr_work);
TSR_TEST_HANDLE(tsr_buffer);
TSR_TEST_HANDLE(tsr_mesh);
TSR_TEST_HANDLE(tsr_plan);
TSR_TEST_HANDLE(tsr_turn);
TSR_TEST_HANDLE(tsr_layout);
TSR_TEST_HANDLE(tsr_ddp);
TSR_TEST_HANDLE(tsr_fsdp);
TSR_TEST_HANDLE(tsr_tp);
TSR_TEST_HANDLE(tsr_pipeline);
TSR_TEST_HANDLE(tsr_engine);
TSR_TEST_HANDLE(tsr_optimizer);
TSR_TEST_HANDLE(tsr_grad_scaler);
TSR_TEST_HANDLE(tsr_loss_scale);
TSR_TEST_HANDLE(tsr_lr_schedule);
TSR_TEST_HANDLE(tsr_sampler);
TSR_TEST_HANDLE(tsr_metric);
TSR_TEST_HANDLE(tsr_state);
TSR_TEST_HANDLE(tsr_saver);
TSR_TEST_HANDLE(tsr_checkpoint);
TSR_TEST_HANDLE(tsr_storage);
#undef TSR_TEST_HANDLE

template <class T>
class Owned {
   public:
    Owned() = default;
    Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Owned& operator=(Owned&&) = delete;
    ~Owned() { reset(); }

    operator T*() const { return handle_; }  // NOLINT(google-explicit-constructor): the point of it
    T** out() {
        reset();
        return &handle_;
    }
    void reset() { Destroyer<T>()(std::exchange(handle_, nullptr)); }

   private:
    T* handle_ = nullptr;
};

// A contiguous CPU tensor over a vector; owns its shape.
template <class T>
constexpr tsr_dtype dtype_of() {
    if constexpr (std::is_same_v<T, float>) return TSR_DTYPE_F32;
    if constexpr (std::is_same_v<T, double>) return TSR_DTYPE_F64;
    if constexpr (std::is_same_v<T, int8_t>) return TSR_DTYPE_I8;
    if constexpr (std::is_same_v<T, uint8_t>) return TSR_DTYPE_U8;
    if constexpr (std::is_same_v<T, int32_t>) return TSR_DTYPE_I32;
    if constexpr (std::is_same_v<T, int64_t>) return TSR_DTYPE_I64;
    return 0;
}

template <class T>
struct Array {
    std::vector<T> values;
    std::vector<int64_t> shape;

    explicit Array(std::vector<T> data) : values(std::move(data)), shape{static_cast<int64_t>(values.size())} {}
    Array(std::vector<int64_t> dims, T value) : shape(std::move(dims)) {
        int64_t count = 1;
        for (const int64_t size : shape) count *= size;
        values.assign(static_cast<size_t>(count), value);
    }
    tsr_tensor tensor() {
        tsr_tensor t{};
        t.data = values.data();
        t.shape = shape.data();
        t.ndim = static_cast<int32_t>(shape.size());
        t.dtype = dtype_of<T>();
        t.device_type = TSR_DEVICE_CPU;
        return t;
    }
};

// A state of this array alone.
template <class T>
Owned<tsr_state> state_of(const char* name, Array<T>& array) {
    const tsr_tensor tensor = array.tensor();
    Owned<tsr_state> state;
    if (tsr_state_create(state.out()) != TSR_OK || tsr_state_add_tensor(state, name, &tensor) != TSR_OK) {
        throw std::runtime_error(message());
    }
    return state;
}

// What `get(text, capacity, size)` gives.
template <class Get>
std::string text_of(Get&& get) {
    size_t size = 0;
    EXPECT_OK(get(nullptr, 0, &size));
    std::string text(size, '\0');
    EXPECT_OK(get(text.data(), text.size(), &size));
    text.resize(size - 1);  // without the final 0
    return text;
}

inline std::string value_of(const tsr_state* state, const char* name) {
    return text_of([&](auto... to) { return tsr_state_get_value(state, name, to...); });
}

// Asks until it is so; false if it never is. For what ends a moment after the call that began it, and tells nobody.
inline bool becomes_true(const std::function<bool()>& is_so) {
    const auto end = std::chrono::steady_clock::now() + tsr::testing::patience(std::chrono::seconds(20));
    while (!is_so()) {
        if (std::chrono::steady_clock::now() >= end) return false;
        std::this_thread::yield();
    }
    return true;
}

inline Owned<tsr_comm> alone() {
    Owned<tsr_comm> comm;
    if (tsr_comm_from_env(nullptr, comm.out()) != TSR_OK) throw std::runtime_error(message());
    return comm;
}

// Runs `body` on `world_size` threads, each a rank with a communicator over one TCP store.
inline void run_ranks(int32_t world_size, const std::function<void(tsr_comm* comm, int32_t rank)>& body) {
    tsr_store_options options;
    ASSERT_OK(tsr_store_options_init(&options, sizeof options));
    const std::string token(64, '5');
    options.token = token.c_str();
    options.job_id = "capi";
    options.timeout_ms = tsr::testing::patience_ms(30000);
    Owned<tsr_store_server> server;
    ASSERT_OK(tsr_store_serve("127.0.0.1", 0, &options, server.out()));
    uint16_t port = 0;
    ASSERT_OK(tsr_store_server_port(server, &port));
    const std::string uri = "tcp://127.0.0.1:" + std::to_string(port);

    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < world_size; ++rank) {
        threads.emplace_back([&, rank] {
            Owned<tsr_store> store;
            ASSERT_OK(tsr_store_open(uri.c_str(), &options, store.out()));
            tsr_comm_options comm_options;
            ASSERT_OK(tsr_comm_options_init(&comm_options, sizeof comm_options));
            comm_options.timeout_ms = tsr::testing::patience_ms(30000);
            Owned<tsr_comm> comm;
            ASSERT_OK(tsr_comm_create(store, rank, world_size, &comm_options, comm.out()));
            body(comm, rank);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

using tsr::testing::TemporaryDirectory;

}  // namespace api
