// tessera/error.h, log.h and version.h through the C ABI.
#include "api.hpp"

namespace {

using ::testing::HasSubstr;

void fail_with_invalid_argument() { EXPECT_EQ(tsr_state_create(nullptr), TSR_E_INVALID_ARGUMENT); }

TEST(ErrorApi, StatusesHaveNames) {
    EXPECT_STREQ(tsr_status_name(TSR_OK), "OK");
    EXPECT_STREQ(tsr_status_name(TSR_E_TIMEOUT), "TIMEOUT");
    EXPECT_STREQ(tsr_status_name(TSR_E_INTERNAL), "INTERNAL");
    EXPECT_STREQ(tsr_status_name(12345), "UNKNOWN");
    EXPECT_STREQ(tsr_status_name(-1), "UNKNOWN");
}

TEST(ErrorApi, LastErrorBelongsToTheThread) {
    fail_with_invalid_argument();
    ASSERT_NE(tsr_error_last(), nullptr);
    EXPECT_EQ(tsr_error_code(tsr_error_last()), TSR_E_INVALID_ARGUMENT);
    EXPECT_THAT(api::message(), HasSubstr("out is NULL"));
    std::thread([] { EXPECT_EQ(tsr_error_last(), nullptr); }).join();
}

TEST(ErrorApi, SuccessLeavesTheLastErrorAlone) {
    fail_with_invalid_argument();
    api::Owned<tsr_state> state;
    EXPECT_OK(tsr_state_create(state.out()));
    EXPECT_THAT(api::message(), HasSubstr("out is NULL"));
}

TEST(ErrorApi, TakenErrorOutlivesLaterOnes) {
    fail_with_invalid_argument();
    api::Owned<tsr_error> error;
    ASSERT_OK(tsr_error_take(error.out()));
    EXPECT_EQ(tsr_error_last(), nullptr);
    EXPECT_EQ(tsr_log_set_level(77), TSR_E_INVALID_ARGUMENT);
    EXPECT_THAT(api::message(), HasSubstr("77"));
    EXPECT_THAT(tsr_error_message(error), HasSubstr("out is NULL"));
    std::string elsewhere;
    std::thread([&] { elsewhere = tsr_error_message(error); }).join();
    EXPECT_THAT(elsewhere, HasSubstr("out is NULL"));
}

TEST(ErrorApi, TakingWithoutAnErrorGivesNull) {
    std::thread([] {
        auto* error = reinterpret_cast<tsr_error*>(1);
        EXPECT_OK(tsr_error_take(&error));
        EXPECT_EQ(error, nullptr);
    }).join();
    EXPECT_EQ(tsr_error_take(nullptr), TSR_E_INVALID_ARGUMENT);
    EXPECT_NE(tsr_error_last(), nullptr) << "nothing was taken";
}

TEST(ErrorApi, NullIsAnErrorWithoutContent) {
    EXPECT_EQ(tsr_error_code(nullptr), TSR_OK);
    EXPECT_STREQ(tsr_error_message(nullptr), "");
    EXPECT_EQ(tsr_error_cause(nullptr), nullptr);
    EXPECT_EQ(tsr_error_rank(nullptr), -1);
    EXPECT_EQ(tsr_error_peer(nullptr), -1);
    EXPECT_STREQ(tsr_error_operation(nullptr), "");
    EXPECT_EQ(tsr_error_sequence(nullptr), -1);
    int32_t domain = 9;
    EXPECT_EQ(tsr_error_native(nullptr, &domain), 0);
    EXPECT_EQ(domain, TSR_NATIVE_NONE);
    EXPECT_EQ(tsr_error_retriable(nullptr), 0);
    tsr_error_destroy(nullptr);
}

TEST(ErrorApi, CausesAndOriginAreTold) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        if (rank == 1) {
            EXPECT_OK(tsr_comm_abort(comm, "seen enough"));
            return;
        }
        api::Array<float> array({1, 2, 3});
        const tsr_tensor tensor = array.tensor();
        tsr_status status = TSR_OK;
        for (int i = 0; i < 2; ++i) {
            status = tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr);
            EXPECT_EQ(status, TSR_E_ABORTED);
        }
        api::Owned<tsr_error> error;
        ASSERT_OK(tsr_error_take(error.out()));
        std::string chain;
        for (const tsr_error* e = error; e != nullptr; e = tsr_error_cause(e))
            chain += tsr_error_message(e) + std::string("\n");
        EXPECT_THAT(chain, HasSubstr("seen enough"));
        EXPECT_NE(tsr_error_cause(error), nullptr) << "the second failure tells the first as its cause";
        api::Owned<tsr_error> poison;
        ASSERT_OK(tsr_comm_error(comm, poison.out()));
        ASSERT_NE(poison, nullptr);
        EXPECT_EQ(tsr_error_code(poison), TSR_E_ABORTED);
    });
}

TEST(ErrorApi, NativeCodesAreTold) {
    api::Owned<tsr_checkpoint> checkpoint;
    const tsr_status status = tsr_checkpoint_open("/proc/self/mem/nothing", checkpoint.out());
    EXPECT_NE(status, TSR_OK);
    EXPECT_EQ(tsr_error_code(tsr_error_last()), status);
}

TEST(LogApi, LinesGoToTheCallback) {
    struct Sink {
        std::vector<std::string> lines;
        bool destroyed = false;
    } sink;
    EXPECT_OK(tsr_log_set_callback(
        [](int32_t, const char* line, void* s) { static_cast<Sink*>(s)->lines.emplace_back(line); }, &sink,
        [](void* s) { static_cast<Sink*>(s)->destroyed = true; }));
    EXPECT_OK(tsr_log_set_level(TSR_LOG_OFF));
    EXPECT_EQ(tsr_log_set_level(0), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_log_set_level(6), TSR_E_INVALID_ARGUMENT);
    EXPECT_OK(tsr_log_set_level(TSR_LOG_WARNING));
    EXPECT_FALSE(sink.destroyed);
    EXPECT_OK(tsr_log_set_callback(nullptr, nullptr, nullptr));
    EXPECT_TRUE(sink.destroyed);
}

TEST(LogApi, InterruptEndsABlockingCall) {
    const std::string token(64, '5');
    tsr_store_options options;
    ASSERT_OK(tsr_store_options_init(&options, sizeof options));
    options.token = token.c_str();
    options.job_id = "capi";
    api::Owned<tsr_store_server> server;
    ASSERT_OK(tsr_store_serve("127.0.0.1", 0, &options, server.out()));
    uint16_t port = 0;
    ASSERT_OK(tsr_store_server_port(server, &port));
    api::Owned<tsr_store> store;
    ASSERT_OK(tsr_store_open(("tcp://127.0.0.1:" + std::to_string(port)).c_str(), &options, store.out()));
    int polls = 0;
    EXPECT_OK(
        tsr_interrupt_set([](void* count) { return static_cast<int32_t>(++*static_cast<int*>(count) >= 2); }, &polls));
    EXPECT_EQ(tsr_store_wait(store, "never", 30000), TSR_E_INTERRUPTED);
    EXPECT_OK(tsr_interrupt_set(nullptr, nullptr));
    EXPECT_EQ(polls, 2);
}

TEST(VersionApi, LibraryIsTheOneOfTheHeaders) {
    EXPECT_EQ(tsr_abi_version(), static_cast<uint32_t>(TSR_ABI_VERSION));
    EXPECT_EQ(std::string(tsr_version()), std::to_string(TSR_VERSION_MAJOR) + "." + std::to_string(TSR_VERSION_MINOR) +
                                              "." + std::to_string(TSR_VERSION_PATCH));
    EXPECT_THAT(tsr_library_path(), HasSubstr("libtessera.so"));
    EXPECT_STRNE(tsr_library_path(), "");
}

TEST(LaunchApi, OutsideALauncherNothingIsAsked) {
    EXPECT_EQ(tsr_preempt_requested(), 0);
    EXPECT_EQ(tsr_record_error(nullptr, nullptr), TSR_E_INVALID_ARGUMENT);
}

}  // namespace
