/* A trainer that takes steps until it is asked to stop, and saves every 50th. Argument: the root of its checkpoints. $D/steps* is
 * the number of its steps. */
#include "programs.h"

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    tsr_comm *comm;
    tsr_ddp *ddp;
    tsr_optimizer *optimizer;
    tsr_state *state;
    tsr_saver *saver;
    int32_t rank;
    CHECK(tsr_comm_from_env(NULL, &comm));
    CHECK(tsr_comm_rank(comm, &rank));
    float weight[64] = {0};
    const tsr_param param = {"weight", tsr_f32_1d(weight, 64)};
    CHECK(tsr_ddp_create(comm, &param, 1, NULL, &ddp));
    tsr_sgd_options sgd;
    CHECK(tsr_sgd_options_init(&sgd, sizeof sgd));
    CHECK(tsr_ddp_sgd(ddp, &sgd, &optimizer));
    CHECK(tsr_state_create(&state));
    CHECK(tsr_state_add_ddp(state, "model", ddp));
    CHECK(tsr_state_add_optimizer(state, "optim", optimizer));
    CHECK(tsr_saver_create(comm, argv[1], NULL, &saver));
    tsr_tensor grad;
    CHECK(tsr_ddp_grad(ddp, 0, &grad));
    tsr_flag stop = 0;
    int64_t step = 0;
    while (!stop) {
        ++step;
        for (int i = 0; i < 64; ++i) ((float *)grad.data)[i] = weight[i] - 1;
        CHECK(tsr_ddp_ready(ddp, 0));
        CHECK(tsr_ddp_wait(ddp));
        CHECK(tsr_optimizer_step(optimizer));
        CHECK(tsr_ddp_zero_grad(ddp));
        if (step % 50 == 0) CHECK(tsr_saver_save(saver, step, state));
        CHECK(tsr_saver_should_stop(saver, step, 0, &stop));
    }
    leave("steps", rank, (double)step);
    tsr_saver_destroy(saver), tsr_state_destroy(state);
    tsr_optimizer_destroy(optimizer), tsr_ddp_destroy(ddp);
    CHECK(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);
    return 0;
}
