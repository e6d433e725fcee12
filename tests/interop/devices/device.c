/* A rank on a simulated CUDA device, for test_devices.py: collectives over memory of the device, a checkpoint
 * of it, what is refused, and steps of DDP and of an optimizer. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tessera/tessera.h>

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, tsr_error_message(tsr_error_last()));
    exit(1);
}
#define CHECK(call) ((call) == TSR_OK ? (void)0 : fail(#call))
#define EXPECT(condition) ((condition) ? (void)0 : fail(#condition))

static void *function(const char *name) {
    static void *library;
    if (library == NULL) library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) fail("dlopen");
    return dlsym(library, name);
}

int main(void) {
    tsr_comm_options options;
    tsr_comm *comm = NULL;
    tsr_work *work = NULL;
    int32_t rank = 0, ranks = 0;
    CHECK(tsr_comm_options_init(&options, sizeof options));
    options.backend = "cpu:auto,cuda:nccl";
    CHECK(tsr_comm_from_env(&options, &comm));
    CHECK(tsr_comm_rank(comm, &rank));
    CHECK(tsr_comm_world_size(comm, &ranks));

    void *(*allocate)(int, size_t) = NULL;
    void (*store)(void *, float) = NULL;
    float (*load)(const void *) = NULL;
    void *symbol = function("simulated_cuda_allocate");
    memcpy(&allocate, &symbol, sizeof symbol);
    symbol = function("simulated_cuda_store");
    memcpy(&store, &symbol, sizeof symbol);
    symbol = function("simulated_cuda_load");
    memcpy(&load, &symbol, sizeof symbol);

    float *memory = allocate(rank, 2 * sizeof(float));
    const int64_t shape[] = {2};
    tsr_tensor tensor = {.data = memory,
                         .shape = shape,
                         .ndim = 1,
                         .dtype = TSR_DTYPE_F32,
                         .device_type = TSR_DEVICE_CUDA,
                         .device_index = rank};
    store(memory, (float)(rank + 1));
    store(memory + 1, 10.0F);
    CHECK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, NULL, NULL));
    EXPECT(load(memory) == (float)(ranks * (ranks + 1)) / 2);
    EXPECT(load(memory + 1) == 10.0F * (float)ranks);
    CHECK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_MAX, NULL, &work));
    CHECK(tsr_work_order(work, NULL, -1));
    EXPECT(load(memory + 1) == 10.0F * (float)ranks);
    CHECK(tsr_work_wait(work, -1));
    tsr_work_destroy(work);

    /* What is wrong is refused, and the communicator goes on. */
    float host[2] = {1, 2};
    tsr_tensor wrong = tensor;
    wrong.data = host;
    EXPECT(tsr_comm_all_reduce(comm, &wrong, 1, TSR_REDUCE_SUM, NULL, NULL) == TSR_E_INVALID_ARGUMENT);
    EXPECT(strstr(tsr_error_message(tsr_error_last()), "memory of the host") != NULL);
    wrong.device_index = rank + 1;
    EXPECT(tsr_comm_all_reduce(comm, &wrong, 1, TSR_REDUCE_SUM, NULL, NULL) == TSR_E_INVALID_ARGUMENT);
    EXPECT(strstr(tsr_error_message(tsr_error_last()), "communicates from CUDA device") != NULL);

    /* A checkpoint of all ranks: saved from the devices, loaded to them. */
    tsr_state *state = NULL;
    tsr_saver *saver = NULL;
    int64_t step = 0;
    CHECK(tsr_state_create(&state));
    EXPECT(tsr_state_add_tensor(state, "wrong", &wrong) == TSR_E_INVALID_ARGUMENT);
    CHECK(tsr_state_add_tensor(state, "x", &tensor));
    CHECK(tsr_state_set_stream(state, rank, NULL));
    CHECK(tsr_saver_create(comm, getenv("CHECKPOINTS"), NULL, &saver));
    CHECK(tsr_saver_save(saver, 1, state));
    store(memory + 1, 0.0F);
    CHECK(tsr_saver_resume(saver, state, &step));
    EXPECT(step == 1 && load(memory + 1) == 10.0F * (float)ranks);
    tsr_saver_destroy(saver);
    tsr_state_destroy(state);
    CHECK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, NULL, NULL));
    EXPECT(load(memory + 1) == 10.0F * (float)(ranks * ranks));

    /* A step of data-parallel training. */
    const tsr_param param = {"w", tensor};
    tsr_ddp *ddp = NULL;
    tsr_tensor grad;
    store(memory, (float)(5 + rank));
    CHECK(tsr_ddp_create(comm, &param, 1, NULL, &ddp));
    EXPECT(load(memory) == 5.0F);
    CHECK(tsr_ddp_set_stream(ddp, NULL));
    CHECK(tsr_ddp_grad(ddp, 0, &grad));
    EXPECT(grad.device_type == TSR_DEVICE_CUDA && grad.device_index == rank);
    store(grad.data, (float)(rank + 1));
    CHECK(tsr_ddp_ready(ddp, 0));
    CHECK(tsr_ddp_wait(ddp));
    EXPECT(load(grad.data) == (float)(ranks + 1) / 2);
    tsr_ddp_destroy(ddp);
    CHECK(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);

    /* An optimizer on the device: 1 - 0.5 * 2, and a gradient of norm 2 clipped to 1. */
    float *grad_memory = allocate(rank, 2 * sizeof(float));
    tsr_param param = {"x", tensor};
    tsr_tensor grad = tensor;
    grad.data = grad_memory;
    tsr_sgd_options sgd;
    tsr_optimizer *optimizer = NULL;
    double norm = 0;
    CHECK(tsr_sgd_options_init(&sgd, sizeof sgd));
    sgd.lr = 0.5;
    CHECK(tsr_sgd_create(&param, &grad, 1, &sgd, &optimizer));
    store(memory, 1.0F);
    store(grad_memory, 2.0F);
    store(grad_memory + 1, 0.0F);
    CHECK(tsr_optimizer_set_stream(optimizer, NULL));
    CHECK(tsr_optimizer_step(optimizer));
    EXPECT(load(memory) == 0.0F);
    CHECK(tsr_optimizer_clip_grad_norm(optimizer, 1, 2, &norm));
    EXPECT(norm == 2 && load(grad_memory) < 1.0F && load(grad_memory) > 0.999F);
    CHECK(tsr_optimizer_zero_grad(optimizer));
    EXPECT(load(grad_memory) == 0.0F);
    tsr_optimizer_destroy(optimizer);
    grad.data = host;
    EXPECT(tsr_sgd_create(&param, &grad, 1, &sgd, &optimizer) == TSR_E_INVALID_ARGUMENT);
    EXPECT(strstr(tsr_error_message(tsr_error_last()), "is memory of the host") != NULL);
    printf("rank %d: c is well\n", rank);
    return 0;
}
