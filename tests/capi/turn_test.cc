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

}  // namespace
