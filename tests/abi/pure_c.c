/* A program that knows nothing but C99 and the public headers: one rank trains two parameters, saves, and loads. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/tessera.h"

#define CHECK(call)                                                                                     \
    do {                                                                                                \
        if ((call) != TSR_OK) {                                                                         \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, tsr_error_message(tsr_error_last())); \
            exit(1);                                                                                    \
        }                                                                                               \
    } while (0)
#define EXPECT(condition)                                                   \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

static void train(tsr_comm *comm, const char *root) {
    float weight[6] = {1, 2, 3, 4, 5, 6};
    float bias[2] = {0, 0};
    tsr_param params[2];
    tsr_ddp *ddp;
    tsr_optimizer *optimizer;
    tsr_adamw_options options;
    tsr_sampler *sampler;
    tsr_state *state;
    tsr_saver *saver;
    tsr_tensor grad;
    int64_t indices[4];
    int64_t step;
    size_t count;

    params[0].name = "weight";
    params[0].tensor = tsr_f32_2d(weight, 2, 3);
    params[1].name = "bias";
    params[1].tensor = tsr_f32_1d(bias, 2);
    CHECK(tsr_ddp_create(comm, params, 2, NULL, &ddp));
    CHECK(tsr_adamw_options_init(&options, sizeof options));
    options.lr = 0.5;
    options.weight_decay = 0;
    CHECK(tsr_ddp_adamw(ddp, &options, &optimizer));
    CHECK(tsr_sampler_create(comm, 10, NULL, &sampler));
    CHECK(tsr_state_create(&state));
    CHECK(tsr_state_add_ddp(state, "model", ddp));
    CHECK(tsr_state_add_optimizer(state, "optim", optimizer));
    CHECK(tsr_state_add_sampler(state, "data", sampler));
    CHECK(tsr_saver_create(comm, root, NULL, &saver));

    CHECK(tsr_ddp_grad(ddp, 1, &grad));
    EXPECT(grad.dtype == TSR_DTYPE_F32 && grad.ndim == 1 && grad.shape[0] == 2);
    CHECK(tsr_sampler_next(sampler, indices, 4, &count));
    EXPECT(count == 4);
    ((float *)grad.data)[0] = 2;
    CHECK(tsr_ddp_ready(ddp, 1));
    EXPECT(tsr_optimizer_step(optimizer) == TSR_E_INVALID_STATE);
    EXPECT(strstr(tsr_error_message(tsr_error_last()), "end the step first") != NULL);
    CHECK(tsr_ddp_ready(ddp, 0));
    CHECK(tsr_ddp_wait(ddp));
    CHECK(tsr_optimizer_step(optimizer));
    EXPECT(fabsf(bias[0] + 0.5F) < 1e-5F && bias[1] == 0);
    CHECK(tsr_saver_save(saver, 1, state));

    bias[0] = 7;
    CHECK(tsr_sampler_set_epoch(sampler, 5));
    CHECK(tsr_saver_resume(saver, state, &step));
    EXPECT(step == 1 && fabsf(bias[0] + 0.5F) < 1e-5F);
    CHECK(tsr_sampler_position(sampler, &step, NULL));
    EXPECT(step == 0);

    tsr_saver_destroy(saver);
    tsr_state_destroy(state);
    tsr_sampler_destroy(sampler);
    tsr_optimizer_destroy(optimizer);
    tsr_ddp_destroy(ddp);
}

int main(int argc, char **argv) {
    tsr_comm *comm;
    EXPECT(argc == 2);
    CHECK(tsr_comm_from_env(NULL, &comm));
    train(comm, argv[1]);
    CHECK(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);
    return 0;
}
