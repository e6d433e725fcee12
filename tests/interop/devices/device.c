/* A rank on a simulated CUDA device, for test_devices.py: collectives over memory of the device, a checkpoint
 * of it, what is refused, and steps of DDP, of FSDP, of tensor-parallel models, of a pipeline and of optimizers. */
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

static void *(*allocate)(int, size_t);
static void (*store)(void *, float);
static float (*load)(const void *);

static void find_functions(void) {
    void *symbol = function("simulated_cuda_allocate");
    memcpy(&allocate, &symbol, sizeof symbol);
    symbol = function("simulated_cuda_store");
    memcpy(&store, &symbol, sizeof symbol);
    symbol = function("simulated_cuda_load");
    memcpy(&load, &symbol, sizeof symbol);
}

/* Sets n floats to from + i * by, and whether they are that. */
static void fill(const tsr_tensor *tensor, int64_t n, float from, float by) {
    for (int64_t i = 0; i < n; ++i) store((float *)tensor->data + i, from + (float)i * by);
}
static int is(const tsr_tensor *tensor, int64_t n, float from, float by) {
    for (int64_t i = 0; i < n; ++i)
        if (load((float *)tensor->data + i) != from + (float)i * by) return 0;
    return 1;
}

enum { W, V, LATE };

/* Three steps of SGD, in which rank r's gradient is (r + 1) times the parameter; all ranks make these calls. Element i of
 * w is scale * 8 * (i + 1), of v scale * -4 * (i + 1). */
static void fsdp_trains(tsr_comm *comm, int rank, int ranks) {
    const int64_t counts[] = {8, 4, 3};
    const float by[] = {8, -4, 0};
    const char *names[] = {"w", "v", "late"};
    tsr_param params[3];
    for (int p = 0; p < 3; ++p) {
        params[p].name = names[p];
        params[p].tensor = (tsr_tensor){.shape = &counts[p],
                                        .ndim = 1,
                                        .dtype = TSR_DTYPE_F32,
                                        .device_type = TSR_DEVICE_CUDA,
                                        .device_index = rank};
        if (p == LATE) continue;
        params[p].tensor.data = allocate(rank, sizeof(float) * (size_t)counts[p]);
        fill(&params[p].tensor, counts[p], rank == 0 ? by[p] : (float)rank, rank == 0 ? by[p] : 0);
    }
    const tsr_flag trained[] = {1, 1, 0};
    tsr_fsdp_unit units[2];
    for (int u = 0; u < 2; ++u) CHECK(tsr_fsdp_unit_init(&units[u], sizeof units[u]));
    units[0].name = "first";
    units[0].params = params;
    units[0].n = 1;
    units[1].name = "second";
    units[1].params = &params[V];
    units[1].n = 2;
    units[1].trained = &trained[V];
    tsr_fsdp *fsdp = NULL;
    CHECK(tsr_fsdp_create(comm, units, 2, NULL, &fsdp));
    CHECK(tsr_fsdp_set_stream(fsdp, NULL));
    tsr_sgd_options sgd;
    tsr_optimizer *optimizer = NULL;
    CHECK(tsr_sgd_options_init(&sgd, sizeof sgd));
    sgd.lr = 0.25;
    CHECK(tsr_fsdp_sgd(fsdp, &sgd, &optimizer));
    CHECK(tsr_optimizer_set_stream(optimizer, NULL));

    float scale = 1;
    const float average = (float)(ranks + 1) / 2;
    tsr_tensor whole, grad;
    tsr_param shard;
    for (int step = 0; step < 3; ++step) {
        CHECK(tsr_fsdp_forward(fsdp, 0));
        CHECK(tsr_fsdp_whole(fsdp, W, &whole));
        EXPECT(whole.device_type == TSR_DEVICE_CUDA && whole.device_index == rank);
        EXPECT(is(&whole, counts[W], scale * by[W], scale * by[W]));
        EXPECT(tsr_fsdp_set_stream(fsdp, NULL) == TSR_E_INVALID_STATE);
        CHECK(tsr_fsdp_forward_done(fsdp, 0));
        CHECK(tsr_fsdp_forward(fsdp, 1));
        CHECK(tsr_fsdp_whole(fsdp, LATE, &whole));
        EXPECT(is(&whole, counts[LATE], 0, 0));
        CHECK(tsr_fsdp_forward_done(fsdp, 1));
        for (int p = V; p >= W; --p) {
            CHECK(tsr_fsdp_backward(fsdp, (size_t)p));
            CHECK(tsr_fsdp_whole(fsdp, (size_t)p, &whole));
            EXPECT(is(&whole, counts[p], scale * by[p], scale * by[p]));
            CHECK(tsr_fsdp_grad(fsdp, (size_t)p, &grad));
            fill(&grad, counts[p], (float)(rank + 1) * scale * by[p], (float)(rank + 1) * scale * by[p]);
            CHECK(tsr_fsdp_grads_ready(fsdp, (size_t)p));
        }
        CHECK(tsr_fsdp_wait(fsdp));
        double squares = 0, norm = 0;
        for (int p = W; p <= V; ++p) {
            const int64_t first = (counts[p] + ranks - 1) / ranks * rank;
            const float each = average * scale * by[p];
            CHECK(tsr_fsdp_shard_grad(fsdp, (size_t)p, &grad));
            EXPECT(is(&grad, grad.shape[0], each * (float)(first + 1), each));
            for (int64_t i = 1; i <= counts[p]; ++i) squares += (double)each * each * (double)(i * i);
        }
        CHECK(tsr_optimizer_clip_grad_norm(optimizer, 1e6, 2, &norm));
        EXPECT(norm * norm > squares * 0.99999 && norm * norm < squares * 1.00001);
        CHECK(tsr_optimizer_step(optimizer));
        scale -= 0.25F * average * scale;
    }

    char folder[4096];
    snprintf(folder, sizeof folder, "%s/fsdp", getenv("CHECKPOINTS"));
    tsr_state *state = NULL;
    tsr_saver *saver = NULL;
    int64_t step = 0;
    CHECK(tsr_state_create(&state));
    CHECK(tsr_state_add_fsdp(state, "model", fsdp));
    CHECK(tsr_state_add_optimizer(state, "optim", optimizer));
    CHECK(tsr_state_set_stream(state, rank, NULL));
    CHECK(tsr_saver_create(comm, folder, NULL, &saver));
    CHECK(tsr_saver_save(saver, 3, state));
    for (size_t p = W; p <= LATE; ++p) {
        CHECK(tsr_fsdp_shard(fsdp, p, &shard));
        fill(&shard.tensor, shard.tensor.shape[0], 7, 0);
    }
    CHECK(tsr_saver_resume(saver, state, &step));
    EXPECT(step == 3);
    for (int p = W; p <= V; ++p) {
        CHECK(tsr_fsdp_shard(fsdp, (size_t)p, &shard));
        const int64_t first = (counts[p] + ranks - 1) / ranks * rank;
        EXPECT(is(&shard.tensor, shard.tensor.shape[0], scale * by[p] * (float)(first + 1), scale * by[p]));
    }
    tsr_saver_destroy(saver);
    tsr_state_destroy(state);
    for (size_t u = 0; u < 2; ++u) CHECK(tsr_fsdp_unshard(fsdp, u));
    for (size_t u = 0; u < 2; ++u) {
        CHECK(tsr_fsdp_await(fsdp, u));
        CHECK(tsr_fsdp_whole(fsdp, u, &whole));
        EXPECT(is(&whole, counts[u], scale * by[u], scale * by[u]));
    }
    for (size_t u = 0; u < 2; ++u) CHECK(tsr_fsdp_reshard(fsdp, u));
    CHECK(tsr_fsdp_forward(fsdp, 0));
    CHECK(tsr_fsdp_forward_done(fsdp, 0));
    CHECK(tsr_fsdp_abandon(fsdp));
    tsr_optimizer_destroy(optimizer);
    tsr_fsdp_destroy(fsdp);
}

static tsr_tensor at(int rank, const int64_t *shape, int ndim, float from, float by) {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= shape[d];
    const tsr_tensor tensor = {.data = allocate(rank, sizeof(float) * (size_t)(n + 1)),
                               .shape = shape,
                               .ndim = ndim,
                               .dtype = TSR_DTYPE_F32,
                               .device_type = TSR_DEVICE_CUDA,
                               .device_index = rank};
    fill(&tensor, n, from, by);
    return tensor;
}

static float bits_of(int32_t number) {
    float value;
    memcpy(&value, &number, sizeof value);
    return value;
}

/* Where a part of the call below comes from, and its stream's memory. */
static int32_t see_part(int64_t begin, const tsr_tensor *part, char *message, void *seen) {
    (void)message;
    *(float *)seen += (float)begin + load(part->data);
    return 0;
}
static int32_t write_part(int64_t begin, const tsr_tensor *part, char *message, void *unused) {
    (void)message, (void)unused;
    fill(part, 2, (float)begin, 0);
    return 0;
}

/* An embedding of 5 words over the ranks, and a norm's weight; all ranks make these calls. */
static void tensor_parallel_trains(tsr_comm *comm, int rank, int ranks) {
    const int64_t each = (5 + ranks - 1) / ranks;
    const int64_t first = each * rank < 5 ? each * rank : 5, own = 5 - first < each ? 5 - first : each;
    const int64_t words[] = {5, 2}, one[] = {1, 2}, all[] = {ranks, 2}, two[] = {2, 2}, classes[] = {2, own};
    const tsr_param params[] = {{"tok", at(rank, words, 2, rank == 0 ? 0 : -1.0F, rank == 0 ? 1.0F : 0)},
                                {"norm", at(rank, two, 1, 1, 0)}};
    const tsr_tp_rule rules[] = {{.pattern = "tok", .style = TSR_TP_VOCABULARY},
                                 {.pattern = "norm", .style = TSR_TP_SEQUENCE}};
    const char *dim = "tp";
    const int32_t size = ranks;
    tsr_mesh *mesh = NULL;
    tsr_tp *tp = NULL;
    tsr_optimizer *optimizer = NULL;
    tsr_sgd_options sgd;
    CHECK(tsr_mesh_create(comm, &dim, &size, 1, &mesh));
    CHECK(tsr_tp_create(mesh, params, 2, rules, 2, NULL, &tp));
    CHECK(tsr_tp_set_stream(tp, NULL));
    CHECK(tsr_sgd_options_init(&sgd, sizeof sgd));
    sgd.lr = 0.5;
    CHECK(tsr_tp_sgd(tp, &sgd, &optimizer));
    tsr_param tok, norm;
    tsr_tensor tok_grad, norm_grad;
    CHECK(tsr_tp_slice(tp, 0, &tok));
    CHECK(tsr_tp_slice(tp, 1, &norm));
    CHECK(tsr_tp_grad(tp, 0, &tok_grad));
    CHECK(tsr_tp_grad(tp, 1, &norm_grad));
    EXPECT(tok.tensor.device_type == TSR_DEVICE_CUDA && tok.tensor.shape[0] == own);
    EXPECT(is(&tok.tensor, 2 * own, 2 * (float)first, 1));

    const float total = (float)(ranks * (ranks + 1)) / 2;
    const tsr_tensor x = at(rank, one, 2, (float)(rank + 1), 0), part = at(rank, one, 2, 0, 0);
    const tsr_tensor whole = at(rank, all, 2, 0, 0);
    CHECK(tsr_tp_enter(tp, &x, 0, &whole, NULL, NULL));
    for (int r = 0; r < ranks; ++r) EXPECT(load((float *)whole.data + 2 * r) == (float)(r + 1));
    CHECK(tsr_tp_leave(tp, &whole, 0, &norm.tensor, &part, NULL, NULL));
    EXPECT(is(&part, 2, (float)(ranks * (rank + 1) + 1), 0));
    tsr_work *work = NULL;
    CHECK(tsr_tp_enter_backward(tp, &part, -1, &part, NULL, &work));
    CHECK(tsr_work_order(work, NULL, -1));
    EXPECT(is(&part, 2, (float)ranks * total + (float)ranks, 0));
    CHECK(tsr_work_wait(work, -1));
    tsr_work_destroy(work);
    float seen = 0;
    CHECK(tsr_tp_enter_parts(tp, &x, 0, &whole, NULL, see_part, &seen));
    EXPECT(seen == (float)(ranks * ranks));
    CHECK(tsr_tp_leave_parts(tp, ranks, 0, NULL, &part, NULL, write_part, NULL));
    EXPECT(is(&part, 2, (float)(ranks * rank), 0));

    tsr_tensor ids = at(rank, two, 1, bits_of(4), 0);
    ids.dtype = TSR_DTYPE_I32;
    store((float *)ids.data + 1, bits_of(0));
    const tsr_tensor rows = at(rank, two, 2, 7, 0);
    CHECK(tsr_tp_embed(tp, 0, &ids, -1, &rows, NULL, NULL));
    EXPECT(load(rows.data) == 8 && load((float *)rows.data + 3) == 1);
    CHECK(tsr_tp_embed_backward(tp, 0, &ids, &rows, -1, &tok_grad, NULL, NULL));
    for (int64_t i = first; i < first + own; ++i)
        EXPECT(load((float *)tok_grad.data + 2 * (i - first) + 1) == (i == 0 || i == 4 ? (float)(2 * i + 1) : 0));
    const tsr_tensor logits = at(rank, classes, 2, 0, 0), loss = at(rank, NULL, 0, 0, 0);
    CHECK(tsr_tp_cross_entropy(tp, &logits, 5, &ids, NULL, &loss, &logits, NULL, NULL));
    EXPECT(load(loss.data) > 1.60943F && load(loss.data) < 1.60945F);

    fill(&norm_grad, 2, (float)(rank + 1), 0);
    EXPECT(tsr_optimizer_step(optimizer) == TSR_E_INVALID_STATE);
    CHECK(tsr_tp_sum_grads(tp, NULL));
    EXPECT(is(&norm_grad, 2, total, 0));
    CHECK(tsr_optimizer_step(optimizer));
    EXPECT(is(&norm.tensor, 2, 1 - 0.5F * total, 0));
    CHECK(tsr_tp_zero_grad(tp));
    EXPECT(is(&norm_grad, 2, 0, 0));
    tsr_optimizer_destroy(optimizer);
    tsr_tp_destroy(tp);
    tsr_mesh_destroy(mesh);
}

/* A stage of the pipeline: y = (stage + 2) * x, element by element. The loss is the sum of the last y. */
static struct {
    tsr_pipeline *pipeline;
    int32_t last;
    float grad;
} stage;

static int32_t forward(const tsr_stage_call *call, char *message, void *user_data) {
    (void)message, (void)user_data;
    const int64_t rows = call->inputs->shape[0];
    tsr_tensor made;
    CHECK(tsr_pipeline_output(stage.pipeline, TSR_DTYPE_F32, &rows, 1, &made));
    EXPECT(made.device_type == TSR_DEVICE_CUDA && call->inputs->device_type == TSR_DEVICE_CUDA);
    float sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
        const float y = (float)(call->stage + 2) * load((float *)call->inputs->data + i);
        store((float *)made.data + i, y);
        sum += y;
    }
    if (call->stage == stage.last) CHECK(tsr_pipeline_loss(stage.pipeline, sum));
    return TSR_OK;
}

static int32_t backward(const tsr_stage_call *call, char *message, void *user_data) {
    (void)message, (void)user_data;
    for (int64_t i = 0; i < call->inputs->shape[0]; ++i) {
        const float dy = call->stage == stage.last ? (float)call->weight : load((float *)call->output_grads->data + i);
        stage.grad += load((float *)call->inputs->data + i) * dy;
        if (call->stage > 0) store((float *)call->input_grads->data + i, (float)(call->stage + 2) * dy);
    }
    return TSR_OK;
}

/* Two steps, after which each stage's gradient is added to the others'; all ranks make these calls. */
static void pipeline_trains(tsr_comm *comm, int rank, int ranks) {
    tsr_pipeline_options options;
    CHECK(tsr_pipeline_options_init(&options, sizeof options));
    options.microbatches = 4;
    options.on_device = 1;
    const tsr_pipeline_callbacks callbacks = {
        .struct_size = sizeof callbacks, .forward = forward, .backward = backward};
    const int32_t own = rank;
    stage.last = ranks - 1;
    CHECK(tsr_pipeline_create(comm, &own, 1, &callbacks, &options, &stage.pipeline));
    CHECK(tsr_pipeline_set_stream(stage.pipeline, NULL));
    const int64_t rows = 6, one = 1;
    tsr_tensor batch = {.data = allocate(rank, 6 * sizeof(float)),
                        .shape = &rows,
                        .ndim = 1,
                        .dtype = TSR_DTYPE_F32,
                        .device_type = TSR_DEVICE_CUDA,
                        .device_index = rank};
    fill(&batch, rows, 1, 1); /* in micro-batches of 2, 2, 1 and 1 */
    float product = 1, all = 0;
    for (int i = 0; i < ranks; ++i) product *= (float)(i + 2);
    const float sums[] = {3, 7, 5, 6};
    for (int step = 1; step <= 2; ++step) {
        double losses[4];
        CHECK(tsr_pipeline_step(stage.pipeline, &batch, 1, NULL, 0, NULL, 0, losses, 4));
        for (int i = 0; i < 4; ++i) EXPECT(losses[i] == (double)(product * sums[i]));
        EXPECT(stage.grad == 21 * product / (float)(rank + 2) / 4 * (float)step);
    }
    int32_t stages[16];
    for (int i = 0; i < ranks; ++i) {
        stages[i] = i;
        all += 21 * product / (float)(i + 2) / 2;
    }
    batch.shape = &one;
    fill(&batch, 1, stage.grad, 0);
    CHECK(tsr_pipeline_sum_tied(stage.pipeline, &batch, stages, (size_t)ranks));
    EXPECT(is(&batch, 1, all, 0));
    tsr_pipeline_destroy(stage.pipeline);
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

    find_functions();
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
    tsr_param param = {"w", tensor};
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
    fsdp_trains(comm, rank, ranks);
    tensor_parallel_trains(comm, rank, ranks);
    pipeline_trains(comm, rank, ranks);
    CHECK(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);

    /* An optimizer on the device: 1 - 0.5 * 2, and a gradient of norm 2 clipped to 1. */
    float *grad_memory = allocate(rank, 2 * sizeof(float));
    param.name = "x";
    grad = tensor;
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
