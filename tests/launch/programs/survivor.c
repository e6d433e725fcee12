/* A trainer that goes on without the ranks that die: it shrinks its communicator, makes everything anew in the same process,
 * and loads the last checkpoint. Rank 1 stays where it is at step 10, for the test to kill it. $D/w* is the final weight. */
#include <unistd.h>

#include "programs.h"

/* Trains to the end, or until a rank is lost: then the status of the step that failed. */
static tsr_status train(tsr_comm *comm, const char *root, int first_time) {
    int32_t rank = 0;
    CHECK(tsr_comm_rank(comm, &rank));
    float weight[64] = {0};
    const tsr_param param = {"weight", tsr_f32_1d(weight, 64)};
    tsr_ddp *ddp;
    tsr_optimizer *optimizer;
    tsr_state *state;
    tsr_saver *saver;
    CHECK(tsr_ddp_create(comm, &param, 1, NULL, &ddp));
    tsr_sgd_options sgd;
    CHECK(tsr_sgd_options_init(&sgd, sizeof sgd));
    sgd.lr = 0.1;
    CHECK(tsr_ddp_sgd(ddp, &sgd, &optimizer));
    CHECK(tsr_state_create(&state));
    CHECK(tsr_state_add_ddp(state, "model", ddp));
    CHECK(tsr_state_add_optimizer(state, "optim", optimizer));
    CHECK(tsr_saver_create(comm, root, NULL, &saver));
    int64_t step = 0;
    CHECK(tsr_saver_resume(saver, state, &step));
    leave("resumed", rank, (double)step);
    tsr_tensor grad;
    CHECK(tsr_ddp_grad(ddp, 0, &grad));
    tsr_status status = TSR_OK;
    while (status == TSR_OK && step < 30) {
        if (first_time && step == 10) {
            leave("r", rank, (double)getpid());
            if (rank == 1) {
                for (;;) pause();
            }
        }
        for (int i = 0; i < 64; ++i) ((float *)grad.data)[i] = weight[i] - 1; /* towards 1 */
        CHECK(tsr_ddp_ready(ddp, 0));
        status = tsr_ddp_wait(ddp);
        if (status != TSR_OK) break;
        CHECK(tsr_optimizer_step(optimizer));
        CHECK(tsr_ddp_zero_grad(ddp));
        CHECK(tsr_saver_save(saver, ++step, state));
    }
    if (status == TSR_OK) leave("w", rank, weight[63]);
    tsr_saver_destroy(saver), tsr_state_destroy(state);
    tsr_optimizer_destroy(optimizer), tsr_ddp_destroy(ddp);
    return status;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    tsr_comm *comm;
    CHECK(tsr_comm_from_env(NULL, &comm));
    for (int first_time = 1; train(comm, argv[1], first_time) != TSR_OK; first_time = 0) {
        tsr_comm *rest;
        CHECK(tsr_comm_shrink(comm, NULL, &rest));
        tsr_comm_destroy(comm);
        comm = rest;
    }
    CHECK(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);
    return 0;
}
