// tessera/comm.h and tessera/memory.h through the C ABI: every function once with what it promises, and what it refuses.
// What collectives compute is tested in tests/comm.
#include <chrono>

#include "api.hpp"
#include "patience.hpp"

namespace {

using api::Array;
using api::Owned;

void expect_all(const Array<float>& array, float value) {
    for (const float got : array.values) ASSERT_EQ(got, value);
}

TEST(CommApi, GettersTellOfTheGroup) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        int32_t number = -1;
        EXPECT_OK(tsr_comm_rank(comm, &number));
        EXPECT_EQ(number, rank);
        EXPECT_OK(tsr_comm_world_size(comm, &number));
        EXPECT_EQ(number, 2);
        const char* transport = nullptr;
        EXPECT_OK(tsr_comm_transport(comm, &transport));
        EXPECT_STREQ(transport, "shm");
        tsr_error* error = reinterpret_cast<tsr_error*>(1);
        EXPECT_OK(tsr_comm_error(comm, &error));
        EXPECT_EQ(error, nullptr);
    });
}

TEST(CommApi, ATimeoutIsToldAndSet) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        EXPECT_OK(tsr_comm_set_timeout(comm, 12345));
        int32_t timeout_ms = 0;
        EXPECT_OK(tsr_comm_timeout(comm, &timeout_ms));
        EXPECT_EQ(timeout_ms, 12345);
        EXPECT_FAILS(tsr_comm_set_timeout(comm, 0), TSR_E_INVALID_ARGUMENT, "the timeout is 0 ms; it must be positive");
        EXPECT_FAILS(tsr_comm_set_timeout(comm, -1), TSR_E_INVALID_ARGUMENT, "the timeout is -1 ms");
        EXPECT_FAILS(tsr_comm_timeout(comm, nullptr), TSR_E_INVALID_ARGUMENT, "timeout_ms");
        EXPECT_OK(tsr_comm_timeout(comm, &timeout_ms));
        EXPECT_EQ(timeout_ms, 12345);
    });
}

TEST(CommApi, EveryCollectiveWorks) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        const bool root = rank == 0;
        Array<float> one({4}, static_cast<float>(rank + 1));
        Array<float> two({8}, static_cast<float>(rank + 1));
        Array<float> out({4}, 0.0F);
        Array<float> out_two({8}, 0.0F);
        const tsr_tensor part = one.tensor();
        const tsr_tensor whole = two.tensor();
        const tsr_tensor part_out = out.tensor();
        const tsr_tensor whole_out = out_two.tensor();
        const tsr_tensor list[] = {part_out, whole_out};

        EXPECT_OK(tsr_comm_reduce_scatter(comm, &whole, &part_out, TSR_REDUCE_SUM, nullptr, nullptr));
        expect_all(out, 3);
        EXPECT_OK(tsr_comm_all_gather(comm, &part, &whole_out, nullptr, nullptr));
        EXPECT_EQ(out_two.values, (std::vector<float>{1, 1, 1, 1, 2, 2, 2, 2}));
        EXPECT_OK(tsr_comm_gather(comm, &part, root ? &whole_out : nullptr, 0, nullptr, nullptr));
        EXPECT_OK(tsr_comm_scatter(comm, root ? &whole : nullptr, &part_out, 0, nullptr, nullptr));
        expect_all(out, 1);
        EXPECT_OK(tsr_comm_reduce(comm, &part, root ? &part_out : nullptr, TSR_REDUCE_MAX, 0, nullptr, nullptr));
        if (root) expect_all(out, 2);
        EXPECT_OK(tsr_comm_all_to_all(comm, &whole, &whole_out, nullptr, nullptr));
        EXPECT_EQ(out_two.values, (std::vector<float>{1, 1, 1, 1, 2, 2, 2, 2}));
        EXPECT_OK(tsr_comm_broadcast(comm, list, 2, 1, nullptr, nullptr));
        EXPECT_OK(tsr_comm_all_reduce(comm, list, 2, TSR_REDUCE_AVG, nullptr, nullptr));
        {
            Array<float> first({2}, static_cast<float>(rank));
            Array<float> second({2}, static_cast<float>(rank + 10));
            Array<float> firsts({4}, 0.0F);
            Array<float> seconds({4}, 0.0F);
            const tsr_tensor parts[] = {first.tensor(), second.tensor()};
            const tsr_tensor wholes[] = {firsts.tensor(), seconds.tensor()};
            EXPECT_OK(tsr_comm_all_gather_coalesced(comm, parts, wholes, 2, nullptr, nullptr));
            EXPECT_EQ(firsts.values, (std::vector<float>{0, 0, 1, 1}));
            EXPECT_EQ(seconds.values, (std::vector<float>{10, 10, 11, 11}));
            EXPECT_OK(tsr_comm_reduce_scatter_coalesced(comm, wholes, parts, 2, TSR_REDUCE_SUM, nullptr, nullptr));
            EXPECT_EQ(first.values, (std::vector<float>{2.0F * rank, 2.0F * rank}));
            EXPECT_EQ(second.values, (std::vector<float>{20.0F + 2 * rank, 20.0F + 2 * rank}));
            EXPECT_FAILS(tsr_comm_all_gather_coalesced(comm, parts, wholes, 0, nullptr, nullptr),
                         TSR_E_INVALID_ARGUMENT, "at least one");
            const tsr_tensor twice[] = {wholes[0], wholes[0]};
            EXPECT_FAILS(tsr_comm_all_gather_coalesced(comm, parts, twice, 2, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                         "[0] and [1] overlap");
            EXPECT_FAILS(tsr_comm_broadcast(comm, twice, 2, 0, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                         "[0] and [1] overlap");
        }
        const tsr_tensor gathered[] = {part_out, whole_out};
        EXPECT_OK(tsr_comm_all_gather_v(comm, root ? &part : &whole, gathered, nullptr, nullptr));
        expect_all(out, 1);
        expect_all(out_two, 2);
        if (root) {
            EXPECT_OK(tsr_comm_send(comm, &part, 1, 7, nullptr, nullptr));
        } else {
            EXPECT_OK(tsr_comm_recv(comm, &part_out, 0, 7, nullptr, nullptr));
        }
        expect_all(out, 1);
        EXPECT_OK(tsr_comm_barrier(comm, nullptr));
        EXPECT_OK(tsr_comm_finalize(comm));
        EXPECT_FAILS(tsr_comm_barrier(comm, nullptr), TSR_E_INVALID_STATE, "finalized");
    });
}

TEST(CommApi, WorkIsWaitedForTestedAndCalledBack) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Array<float> values({1000}, static_cast<float>(rank + 1));
        const tsr_tensor tensor = values.tensor();
        struct Seen {
            std::atomic<int> calls{0}, destroyed{0};
            std::atomic<tsr_status> status{-1};
        } seen;
        Owned<tsr_work> work;
        EXPECT_OK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, work.out()));
        EXPECT_OK(tsr_work_on_done(
            work,
            [](tsr_status status, void* data) {
                static_cast<Seen*>(data)->status = status;
                ++static_cast<Seen*>(data)->calls;
            },
            &seen, [](void* data) { ++static_cast<Seen*>(data)->destroyed; }));
        EXPECT_OK(tsr_work_wait(work, -1));
        expect_all(values, 3);
        int32_t done = 0;
        EXPECT_OK(tsr_work_test(work, &done));
        EXPECT_EQ(done, 1);
        tsr_error* error = reinterpret_cast<tsr_error*>(1);
        EXPECT_OK(tsr_work_error(work, &error));
        EXPECT_EQ(error, nullptr);
        EXPECT_FAILS(
            tsr_work_on_done(work, [](tsr_status, void*) {}, nullptr, nullptr), TSR_E_INVALID_STATE, "already");
        EXPECT_FAILS(tsr_work_on_done(work, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "fn is NULL");
        // The callback may still run when the wait has returned.
        EXPECT_TRUE(api::becomes_true([&] { return seen.destroyed != 0; }));
        EXPECT_EQ(seen.calls, 1);
        EXPECT_EQ(seen.destroyed, 1);
        EXPECT_EQ(seen.status, TSR_OK);
    });
}

TEST(CommApi, WaitThatExpiresLeavesTheWork) {
    std::atomic<bool> go{false};
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        Owned<tsr_work> work;
        if (rank == 0) {
            EXPECT_OK(tsr_comm_barrier(comm, work.out()));
            EXPECT_FAILS(tsr_work_wait(work, 10), TSR_E_NOT_READY, "not done");
            tsr_error* error = nullptr;
            EXPECT_FAILS(tsr_work_error(work, &error), TSR_E_NOT_READY, "not done");
            go = true;
            EXPECT_OK(tsr_work_wait(work, -1));
            return;
        }
        while (!go) std::this_thread::yield();
        EXPECT_OK(tsr_comm_barrier(comm, nullptr));
    });
}

TEST(CommApi, SplitsAndLeavesOut) {
    api::run_ranks(3, [](tsr_comm* comm, int32_t rank) {
        Owned<tsr_comm> group;
        EXPECT_OK(tsr_comm_split(comm, rank == 1 ? -1 : 0, 0, nullptr, group.out()));
        EXPECT_EQ(static_cast<tsr_comm*>(group) == nullptr, rank == 1);
        if (rank == 1) return;
        int32_t size = 0;
        EXPECT_OK(tsr_comm_world_size(group, &size));
        EXPECT_EQ(size, 2);
    });
}

// On one rank alone it is told to all, at once, whether they are of its group or not, and the communicator is as it was.
TEST(CommApi, ASplitThatOneRankAsksForBadlyIsRefusedOnAll) {
    static const std::string long_name(129, 'x');
    struct Bad {
        std::function<void(tsr_comm_options&)> change;
        const char* said;
    };
    const std::vector<Bad> cases{
        {[](auto& options) { options.timeout_ms = 0; }, "the timeout is 0 ms"},
        {[](auto& options) { options.heartbeat_timeout_ms = -1; }, "the heartbeat timeout is -1 ms"},
        {[](auto& options) { options.name = long_name.c_str(); }, "a communicator name must have 1 to 128 bytes"},
        {[](auto& options) { options.backend = long_name.c_str(); }, "backend name has 129 bytes"},
        {[](auto& options) { options.struct_size = 0; }, "struct_size"}};
    for (const Bad& bad : cases) {
        for (const int32_t bad_rank : {0, 2}) {
            api::run_ranks(4, [&](tsr_comm* comm, int32_t rank) {
                tsr_comm_options options;
                ASSERT_OK(tsr_comm_options_init(&options, sizeof options));
                if (rank == bad_rank) bad.change(options);
                Owned<tsr_comm> group;
                const int32_t color = rank == 3 ? -1 : rank % 2;
                EXPECT_FAILS(tsr_comm_split(comm, color, 0, &options, group.out()), TSR_E_INVALID_ARGUMENT, bad.said);
                EXPECT_EQ(static_cast<tsr_comm*>(group), nullptr);
                if (rank != bad_rank) {
                    EXPECT_THAT(api::message(), ::testing::StartsWith("rank " + std::to_string(bad_rank) + ": "));
                    EXPECT_EQ(tsr_error_peer(tsr_error_last()), bad_rank);
                }
                ASSERT_OK(tsr_comm_split(comm, 0, 0, nullptr, group.out()));
                EXPECT_OK(tsr_comm_barrier(group, nullptr));
            });
        }
    }
}

// What a binding calls whose own checks refuse the arguments.
TEST(CommApi, ARankThatRefusesACreationIsNamedOnAll) {
    const api::TemporaryDirectory dir;
    api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
        api::Array<float> w({3}, 1.0F);
        const tsr_param param{"w", w.tensor()};
        const tsr_engine_unit unit{"line", &param, 1, 0};
        tsr_fsdp_unit sharded;
        ASSERT_OK(tsr_fsdp_unit_init(&sharded, sizeof sharded));
        sharded.name = "line";
        sharded.params = &param;
        sharded.n = 1;
        const char* dim = "dp";
        const int32_t size = 3;
        api::Owned<tsr_mesh> mesh;
        ASSERT_OK(tsr_mesh_create(comm, &dim, &size, 1, mesh.out()));
        const tsr_tp_rule rule{"w", TSR_TP_COLUMN, 0, nullptr, 0, 0};
        const auto never = [](const tsr_stage_call*, char*, void*) -> int32_t { return 1; };
        tsr_pipeline_callbacks callbacks{};
        callbacks.struct_size = sizeof callbacks;
        callbacks.forward = never;
        callbacks.backward = never;
        tsr_pipeline_options stages;
        ASSERT_OK(tsr_pipeline_options_init(&stages, sizeof stages));
        stages.microbatches = 3;
        const char* config = R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})";

        api::Owned<tsr_ddp> ddp;
        api::Owned<tsr_fsdp> fsdp;
        api::Owned<tsr_tp> tp;
        api::Owned<tsr_engine> engine;
        api::Owned<tsr_pipeline> pipeline;
        api::Owned<tsr_mesh> other;
        api::Owned<tsr_comm> group;
        api::Owned<tsr_saver> saver;
        struct Creation {
            const char* name;
            tsr_creation kind;
            std::function<tsr_status()> call;
        };
        const std::vector<Creation> creations{
            {"ddp", TSR_CREATES_MODEL, [&] { return tsr_ddp_create(comm, &param, 1, nullptr, ddp.out()); }},
            {"fsdp", TSR_CREATES_MODEL, [&] { return tsr_fsdp_create(comm, &sharded, 1, nullptr, fsdp.out()); }},
            {"engine", TSR_CREATES_MODEL,
             [&] { return tsr_engine_create(comm, &unit, 1, config, nullptr, engine.out()); }},
            {"pipeline", TSR_CREATES_PIPELINE,
             [&] { return tsr_pipeline_create(comm, &rank, 1, &callbacks, &stages, pipeline.out()); }},
            {"mesh", TSR_CREATES_MESH, [&] { return tsr_mesh_create(comm, &dim, &size, 1, other.out()); }},
            {"split", TSR_CREATES_COMM, [&] { return tsr_comm_split(comm, 0, 0, nullptr, group.out()); }},
            {"saver", TSR_CREATES_COMM,
             [&] { return tsr_saver_create(comm, dir.path().c_str(), nullptr, saver.out()); }},
        };
        const auto refuses = [&](tsr_comm* ranks, const Creation& creation) {
            SCOPED_TRACE(creation.name);
            const std::string reason = std::string("no file for the ") + creation.name;
            if (rank == 1) {
                EXPECT_FAILS(tsr_comm_refuse(ranks, creation.kind, TSR_E_NOT_FOUND, reason.c_str()), TSR_E_NOT_FOUND,
                             reason.c_str());
                EXPECT_EQ(tsr_error_rank(tsr_error_last()), 1);
                return;
            }
            EXPECT_FAILS(creation.call(), TSR_E_NOT_FOUND, ("rank 1: " + reason).c_str());
            EXPECT_EQ(tsr_error_peer(tsr_error_last()), 1);
        };
        for (const Creation& creation : creations) refuses(comm, creation);
        tsr_comm* of_mesh = nullptr;
        ASSERT_OK(tsr_mesh_comm(mesh, dim, &of_mesh));
        refuses(of_mesh,
                {"tp", TSR_CREATES_MODEL, [&] { return tsr_tp_create(mesh, &param, 1, &rule, 1, nullptr, tp.out()); }});

        EXPECT_FAILS(tsr_comm_refuse(comm, 5, TSR_E_IO, "nothing is sent"), TSR_E_INVALID_ARGUMENT, "creation is 5");
        EXPECT_FAILS(tsr_comm_refuse(comm, TSR_CREATES_MESH, TSR_OK, nullptr), TSR_E_INVALID_ARGUMENT,
                     "it gives no reason");
        ASSERT_OK(tsr_comm_split(comm, 0, 0, nullptr, group.out()));
    });
}

TEST(CommApi, ASaverWhoseOptionsOneRankHasWrongIsRefusedOnAll) {
    const api::TemporaryDirectory dir;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        tsr_saver_options options;
        ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
        if (rank == 1) options.struct_size = 0;
        api::Owned<tsr_saver> saver;
        EXPECT_FAILS(tsr_saver_create(comm, dir.path().c_str(), &options, saver.out()), TSR_E_INVALID_ARGUMENT,
                     rank == 0 ? "rank 1: " : "struct_size");
        EXPECT_OK(tsr_saver_create(comm, dir.path().c_str(), nullptr, saver.out()));
    });
}

TEST(CommApi, BuffersAreSharedMemoryOfTheGroup) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Owned<tsr_buffer> buffer;
        ASSERT_OK(tsr_buffer_create(comm, 400000, buffer.out()));
        void* data = nullptr;
        size_t size = 0;
        ASSERT_OK(tsr_buffer_data(buffer, &data, &size));
        EXPECT_EQ(size, 400000U);
        auto* values = static_cast<float*>(data);
        std::fill(values, values + 100000, static_cast<float>(rank));
        const int64_t shape = 100000;
        const tsr_tensor tensor = {data, &shape, nullptr, 1, TSR_DTYPE_F32, TSR_DEVICE_CPU, 0, 0, {}};
        EXPECT_OK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_MAX, nullptr, nullptr));
        EXPECT_EQ(values[99999], 1);
        EXPECT_FAILS(tsr_buffer_create(comm, SIZE_MAX, buffer.out()), TSR_E_NO_MEMORY, "memory");
        EXPECT_FAILS(tsr_buffer_data(nullptr, &data, &size), TSR_E_INVALID_ARGUMENT, "buffer is NULL");
    });
}

TEST(CommApi, AbortReachesThePeersAsAnError) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        if (rank == 0) {
            EXPECT_OK(tsr_comm_abort(comm, "out of patience"));
            EXPECT_OK(tsr_comm_abort(comm, nullptr));
        }
        EXPECT_FAILS(tsr_comm_barrier(comm, nullptr), TSR_E_ABORTED, "out of patience");
        Owned<tsr_error> error;
        EXPECT_OK(tsr_comm_error(comm, error.out()));
        EXPECT_EQ(tsr_error_code(error), TSR_E_ABORTED);
        EXPECT_EQ(tsr_error_rank(error), rank);
    });
}

TEST(CommApi, MismatchNamesBothSides) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Array<float> values({rank == 0 ? 10 : 20}, 1.0F);
        const tsr_tensor tensor = values.tensor();
        EXPECT_FAILS(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr), TSR_E_MISMATCH,
                     "rank 0 called all_reduce of 10 f32 (sum), rank 1 all_reduce of 20 f32 (sum)");
        const tsr_error* error = tsr_error_last();
        EXPECT_EQ(tsr_error_peer(error), 1 - rank);
        EXPECT_STREQ(tsr_error_operation(error), "all_reduce");
        EXPECT_EQ(tsr_error_sequence(error), 1);
    });
}

TEST(CommApi, ABackendForGpusIsUnsupportedWithoutADriver) {
    tsr_comm_options options;
    ASSERT_OK(tsr_comm_options_init(&options, sizeof options));
    auto parent = api::alone();
    Owned<tsr_comm> comm;
    for (const char* backend : {"nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"}) {
        options.backend = backend;
        EXPECT_FAILS(tsr_comm_from_env(&options, comm.out()), TSR_E_UNSUPPORTED, "there is no NVIDIA driver");
        EXPECT_FAILS(tsr_comm_split(parent, 0, 0, &options, comm.out()), TSR_E_UNSUPPORTED,
                     "there is no NVIDIA driver");
    }
    options.backend = "carrier pigeon";
    EXPECT_FAILS(tsr_comm_from_env(&options, comm.out()), TSR_E_INVALID_ARGUMENT, "carrier pigeon");
    options.backend = "cuda:gloo";
    EXPECT_FAILS(tsr_comm_from_env(&options, comm.out()), TSR_E_INVALID_ARGUMENT, "auto, shm and gloo");
}

TEST(CommApi, BadArgumentsAreRefused) {
    auto comm = api::alone();
    Array<float> values({4}, 1.0F);
    const tsr_tensor tensor = values.tensor();
    int stream = 0;
    int32_t number = 0;
    EXPECT_FAILS(tsr_comm_rank(nullptr, &number), TSR_E_INVALID_ARGUMENT, "comm is NULL");
    EXPECT_FAILS(tsr_comm_rank(comm, nullptr), TSR_E_INVALID_ARGUMENT, "rank is NULL");
    EXPECT_FAILS(tsr_comm_all_reduce(comm, nullptr, 1, TSR_REDUCE_SUM, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                 "NULL");
    EXPECT_FAILS(tsr_comm_all_reduce(comm, &tensor, 1, 99, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "reduction 99");
    tsr_tensor unknown = tensor;
    unknown.dtype = 99;
    EXPECT_FAILS(tsr_comm_all_reduce(comm, &unknown, 1, TSR_REDUCE_SUM, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                 "unknown dtype 99");
    tsr_tensor moved_only = tensor;
    moved_only.dtype = TSR_DTYPE_BOOL;
    EXPECT_FAILS(tsr_comm_all_reduce(comm, &moved_only, 1, TSR_REDUCE_SUM, nullptr, nullptr), TSR_E_UNSUPPORTED,
                 "bool cannot be reduced");
    ASSERT_OK(tsr_comm_broadcast(comm, &moved_only, 1, 0, nullptr, nullptr));
    EXPECT_FAILS(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, &stream, nullptr), TSR_E_UNSUPPORTED, "CUDA");
    EXPECT_FAILS(tsr_comm_broadcast(comm, &tensor, 1, 3, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "root 3");
    EXPECT_FAILS(tsr_comm_all_gather(comm, &tensor, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "output");
    EXPECT_FAILS(tsr_comm_send(comm, &tensor, 0, 0, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "own peer");
    Owned<tsr_comm> other;
    EXPECT_FAILS(tsr_comm_create(nullptr, 0, 1, nullptr, other.out()), TSR_E_INVALID_ARGUMENT, "store is NULL");
    EXPECT_FAILS(
        tsr_comm_create(reinterpret_cast<tsr_store*>(static_cast<tsr_comm*>(comm)), 0, 1, nullptr, other.out()),
        TSR_E_INVALID_ARGUMENT, "not a handle of the expected type");
    tsr_comm_options options;
    ASSERT_OK(tsr_comm_options_init(&options, sizeof options));
    options.timeout_ms = -5;
    EXPECT_FAILS(tsr_comm_split(comm, 0, 0, &options, other.out()), TSR_E_INVALID_ARGUMENT, "the timeout is");
    tsr_comm* destroyed = comm;
    tsr_comm_destroy(destroyed);
    EXPECT_FAILS(tsr_comm_rank(destroyed, &number), TSR_E_INVALID_STATE, "destroyed");
    tsr_comm_destroy(nullptr);
    tsr_work_destroy(nullptr);
    tsr_buffer_destroy(nullptr);
}

}  // namespace
