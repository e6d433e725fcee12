/* A trainer that is told to stop: all ranks save at the step on which they agree. The files in $D say how far it came. */
#include "programs.h"

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    float weight[64] = {0};
    const int64_t shape[] = {64};
    const tsr_tensor tensor = {
        .data = weight, .shape = shape, .ndim = 1, .dtype = TSR_DTYPE_F32, .device_type = TSR_DEVICE_CPU};
    tsr_comm *comm;
    CHECK(tsr_comm_from_env(NULL, &comm));
    tsr_state *state;
    CHECK(tsr_state_create(&state));
    CHECK(tsr_state_add_tensor(state, "weight", &tensor));
    tsr_saver *saver;
    CHECK(tsr_saver_create(comm, argv[1], NULL, &saver));
    int32_t rank = 0;
    CHECK(tsr_comm_rank(comm, &rank));
    int64_t step = 0;
    for (int32_t stop = 0; !stop;) {
        weight[0] = (float)++step;
        CHECK(tsr_saver_should_stop(saver, step, 0, &stop));
        if (stop) CHECK(tsr_saver_save_async(saver, step, state, NULL));
        if (step == 10) leave("r", rank, (double)step);
    }
    CHECK(tsr_saver_wait(saver));
    leave("stopped", rank, (double)step);
    tsr_saver_destroy(saver);
    tsr_state_destroy(state);
    tsr_comm_destroy(comm);
    return 0;
}
