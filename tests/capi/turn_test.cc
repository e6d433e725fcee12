// tessera/turn.h through the C ABI.
#include "api.hpp"

namespace {

TEST(TurnApi, TheOthersWaitAndHearOfAFailure) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        for (const char* failure : {static_cast<const char*>(nullptr), "no data"}) {
            api::Owned<tsr_turn> turn;
            ASSERT_OK(tsr_turn_create(comm, 1, tsr::testing::patience_ms(20000), turn.out()));
            if (rank == 1) {
                EXPECT_OK(tsr_turn_progress(turn, 1, 2));
            }
            if (rank == 0 && failure != nullptr) {
                EXPECT_FAILS(tsr_turn_end(turn, nullptr), TSR_E_USER, "rank 1 failed in its turn: no data");
            } else {
                EXPECT_OK(tsr_turn_end(turn, failure));
            }
            EXPECT_FAILS(tsr_turn_end(turn, nullptr), TSR_E_INVALID_STATE, "has ended already");
        }
        const std::string cut = std::string(486, 'x') + "\u00e4";  // of whose last character one byte is left
        api::Owned<tsr_turn> turn;
        ASSERT_OK(tsr_turn_create(comm, 0, tsr::testing::patience_ms(20000), turn.out()));
        if (rank == 0) {
            EXPECT_OK(tsr_turn_end(turn, cut.c_str()));
        } else {
            EXPECT_FAILS(tsr_turn_end(turn, nullptr), TSR_E_USER, "x?");
        }
    });
}

TEST(TurnApi, RefusesWhatItCannotDo) {
    const api::Owned<tsr_comm> comm = api::alone();
    api::Owned<tsr_turn> turn;
    EXPECT_FAILS(tsr_turn_create(comm, 1, 1000, turn.out()), TSR_E_INVALID_ARGUMENT, "ranks are 0 to 0");
    EXPECT_FAILS(tsr_turn_create(comm, 0, 0, turn.out()), TSR_E_INVALID_ARGUMENT, "must be positive");
    ASSERT_OK(tsr_turn_create(comm, 0, 1000, turn.out()));
    EXPECT_FAILS(tsr_turn_progress(turn, 3, 2), TSR_E_INVALID_ARGUMENT, "3 of 2");
    api::Owned<tsr_turn> inner;
    EXPECT_FAILS(tsr_turn_create(comm, 0, 1000, inner.out()), TSR_E_INVALID_STATE,
                 "a turn of rank 0 begins inside the turn of rank 0");
    EXPECT_FAILS(tsr_comm_barrier(comm, nullptr), TSR_E_INVALID_STATE, "is used inside the turn of rank 0");
    EXPECT_OK(tsr_turn_end(turn, nullptr));
    EXPECT_OK(tsr_turn_create(comm, 0, 1000, inner.out()));
}

// A model's units, a pipeline and a saver have communicators of their own, but need the ranks that wait.
TEST(TurnApi, RefusesWhatNeedsTheOthersElsewhere) {
    const api::TemporaryDirectory dir;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t) {
        api::Array<float> w({3, 2}, 1.0F);
        const tsr_param param{"w", w.tensor()};
        const tsr_engine_unit unit{"line", &param, 1, 0};
        const auto config = [](const char* more) {
            return std::string(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, )") + more + "}";
        };
        api::Owned<tsr_engine> sharded;
        api::Owned<tsr_engine> replicated;
        ASSERT_OK(tsr_engine_create(comm, &unit, 1, config(R"("zero_optimization": {"stage": 3})").c_str(), nullptr,
                                    sharded.out()));
        ASSERT_OK(tsr_engine_create(comm, &unit, 1, config(R"("bf16": {"enabled": true})").c_str(), nullptr,
                                    replicated.out()));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, dir.path().c_str(), nullptr, saver.out()));
        const auto state = api::state_of("w", w);

        api::Owned<tsr_turn> turn;
        ASSERT_OK(tsr_turn_create(comm, 1, tsr::testing::patience_ms(20000), turn.out()));
        const char* const advice = "which wait in the turn of rank 1; call it on all ranks, before or after the turn";
        EXPECT_FAILS(tsr_engine_forward(sharded, 0), TSR_E_INVALID_STATE,
                     "a call for the units of an FSDP model needs the ranks of communicator 'world'");
        EXPECT_FAILS(tsr_engine_forward(sharded, 0), TSR_E_INVALID_STATE, advice);
        EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_STATE, advice);
        tsr_flag stop = 0;
        EXPECT_FAILS(tsr_saver_should_stop(saver, 1, 0, &stop), TSR_E_INVALID_STATE, advice);
        int64_t resumed = 0;
        EXPECT_FAILS(tsr_saver_resume(saver, state, &resumed), TSR_E_INVALID_STATE, advice);
        EXPECT_OK(tsr_engine_forward(replicated, 0)) << "it has all parameters";
        EXPECT_OK(tsr_engine_forward_done(replicated, 0));
        EXPECT_FAILS(tsr_engine_backward(replicated, 0), TSR_E_INVALID_STATE,
                     "a backward pass of an engine needs the ranks");
        EXPECT_OK(tsr_turn_end(turn, nullptr));

        ASSERT_OK(tsr_engine_forward(sharded, 0));
        EXPECT_OK(tsr_engine_forward_done(sharded, 0));
        EXPECT_OK(tsr_saver_save(saver, 1, state));
    });
}

// Two rows of two: rank 0 has a turn of all four, of a row with rank 1, and of a column with rank 2.
TEST(TurnApi, RefusesAModelOverADimensionOfWhatWaits) {
    api::run_ranks(4, [](tsr_comm* comm, int32_t rank) {
        const std::array<const char*, 2> names{"row", "column"};
        const std::array<int32_t, 2> sizes{2, 2};
        api::Owned<tsr_mesh> mesh;
        ASSERT_OK(tsr_mesh_create(comm, names.data(), sizes.data(), 2, mesh.out()));
        tsr_comm* column = nullptr;  // of ranks 0 and 1, and of 2 and 3
        ASSERT_OK(tsr_mesh_comm(mesh, "column", &column));
        tsr_comm* row = nullptr;  // of ranks 0 and 2, and of 1 and 3
        ASSERT_OK(tsr_mesh_comm(mesh, "row", &row));
        api::Array<float> w({4}, 1.0F);
        const tsr_param param{"w", w.tensor()};
        tsr_fsdp_unit unit;
        ASSERT_OK(tsr_fsdp_unit_init(&unit, sizeof unit));
        unit.name = "line";
        unit.params = &param;
        unit.n = 1;
        api::Owned<tsr_fsdp> model;
        ASSERT_OK(tsr_fsdp_create(column, &unit, 1, nullptr, model.out()));
        const auto expect_refused = [&](const std::string& whose) {
            const std::string advice = "which wait in the turn of rank 0 of communicator '" + whose + "'";
            EXPECT_FAILS(tsr_fsdp_forward(model, 0), TSR_E_INVALID_STATE, advice.c_str());
        };
        const auto expect_works = [&] {
            ASSERT_OK(tsr_fsdp_forward(model, 0));
            EXPECT_OK(tsr_fsdp_forward_done(model, 0));
        };
        const auto in_turn = [&](tsr_comm* waiting, const std::function<void()>& body) {
            api::Owned<tsr_turn> turn;
            ASSERT_OK(tsr_turn_create(waiting, 0, tsr::testing::patience_ms(20000), turn.out()));
            body();
            EXPECT_OK(tsr_turn_end(turn, nullptr));
        };
        in_turn(comm, [&] {
            if (rank < 2) return expect_refused("world");
            expect_works();  // the rank whose turn it is has no part in it
        });
        in_turn(row, expect_works);  // no rank of the model waits for another of it
        expect_works();
    });
}

}  // namespace
