/* A job that hangs: after some sums rank 0 waits for the others, of whom the last never comes. $D/r* tells that they are
 * there. */
#include <unistd.h>

#include "programs.h"

int main(void) {
    float value = 1;
    const tsr_tensor tensor = tsr_f32_1d(&value, 1);
    tsr_comm *comm;
    int32_t rank = 0;
    int32_t world_size = 0;
    CHECK(tsr_comm_from_env(NULL, &comm));
    CHECK(tsr_comm_rank(comm, &rank));
    CHECK(tsr_comm_world_size(comm, &world_size));
    for (int i = 0; i < 3; ++i) CHECK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, NULL, NULL));
    leave("r", rank, (double)getpid());
    if (rank == world_size - 1) {
        for (;;) pause(); /* in the trainer's own code, for ever */
    }
    CHECK(tsr_comm_barrier(comm, NULL));
    return 0;
}
