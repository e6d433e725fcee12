/* A small network learns to read handwritten digits on any number of ranks: data-parallel, fully sharded, tensor-parallel,
 * a pipeline (digits_pipeline.c), or several of these. The contract that it keeps with its sisters in other languages (options,
 * initial values, what is printed) is in examples/README.md. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "digits.h"

enum { TRAIN = 1500 };
enum { W1, B1, W2, B2, PARAMS };
enum { FC1, FC2, UNITS }; /* parameters 2 u and 2 u + 1 are unit u's */
enum { DATA, CHECKPOINTS, LOG, FORMAT, PARALLEL, STEPS, SAVE_EVERY, BATCH, SEED, PACE, PROGRESS, OPTIONS };
static const char *const options[] = {"--data",       "--checkpoints", "--log",  "--format", "--parallel", "--steps",
                                      "--save-every", "--batch",       "--seed", "--pace",   "--progress"};
static const char *text[] = {
    "examples/data/digits.csv", "checkpoints", "", "tessera", "ddp", "600", "50", "32", "7", "0", "0"};
static const char *const ways[] = {"ddp", "fsdp", "tp", "dp+tp", "fsdp+tp", "pp", "dp+tp+pp"}; /* to be parallel */
static const int multiple_of[] = {1, 1, 1, 2, 2, 2, 4};                                        /* the number of ranks */
static size_t way;
static long number[OPTIONS]; /* from STEPS on */
static float train_x[TRAIN][PIXELS], test_x[HELD_OUT][PIXELS];
static int train_y[TRAIN], test_y[HELD_OUT];
static float w1[HIDDEN][PIXELS], b1[HIDDEN], w2[CLASSES][HIDDEN], b2[CLASSES];
static float *value[PARAMS] = {w1[0], b1, w2[0], b2}, *grad[PARAMS]; /* sharded: of a unit that is whole */
static float h[TRAIN][HIDDEN], p[TRAIN][CLASSES];                    /* of the samples of a batch */
static int width = HIDDEN;                                           /* this rank's hidden units */
static tsr_mesh *mesh;
static tsr_tp *tp; /* NULL: not tensor-parallel */
static tsr_ddp *ddp;
static tsr_fsdp *fsdp; /* one of these is NULL */
static int is_pipeline;
static int32_t rank, world, stop;

#define USAGE(...) (fprintf(stderr, "digits: " __VA_ARGS__), fputs("; see examples/README.md\n", stderr), exit(2))

void fail(const char *call) {
    const char *why = tsr_error_message(tsr_error_last());
    fprintf(stderr, "digits: %s: %s\n", call, why);
    if (tsr_record_error(why, NULL) != TSR_OK) fprintf(stderr, "digits: the launcher could not be told\n");
    exit(1);
}

static void read_arguments(int argc, char **argv) {
    for (int i = 1; i < argc; i += 2) {
        int k = 0;
        while (k < OPTIONS && strcmp(argv[i], options[k]) != 0) ++k;
        if (k == OPTIONS) USAGE("there is no option %s", argv[i]);
        if (i + 1 == argc) USAGE("%s needs a value", argv[i]);
        text[k] = argv[i + 1];
    }
    while (way < sizeof ways / sizeof *ways && strcmp(text[PARALLEL], ways[way]) != 0) ++way;
    if (way == sizeof ways / sizeof *ways)
        USAGE("--parallel cannot be \"%s\": ddp, fsdp, tp, dp+tp, fsdp+tp, pp or dp+tp+pp", text[PARALLEL]);
    for (int k = STEPS; k < OPTIONS; ++k) {
        const int digits = (int)strspn(text[k], "0123456789"), least = k == STEPS || k == BATCH;
        number[k] = strtol(text[k], NULL, 10);
        if (digits < 1 || digits > 9 || text[k][digits] != '\0' || number[k] < least)
            USAGE("%s cannot be \"%s\": a number from %d to 999999999", options[k], text[k], least);
    }
}

/* 64 pixels and the label a line. Every sixth row is held out, as long as there are 297 of them. */
static void read_data(void) {
    FILE *file = fopen(text[DATA], "r");
    if (file == NULL)
        USAGE("cannot read %s (%s): start in the clone's root or name the file by --data", text[DATA], strerror(errno));
    for (int row = 0, train = 0, test = 0; row < TRAIN + HELD_OUT; ++row) {
        const int is_test = row % 6 == 5 && test < HELD_OUT;
        float *x = is_test ? test_x[test] : train_x[train];
        int *y = is_test ? &test_y[test++] : &train_y[train++], k = 0;
        while (k < PIXELS && fscanf(file, "%f,", &x[k]) == 1) x[k++] /= 16;
        if (k < PIXELS || fscanf(file, "%d", y) != 1 || *y < 0 || *y >= CLASSES)
            USAGE("%s is not the digits: row %d is not 64 pixels and a label", text[DATA], row + 1);
    }
    fclose(file);
}

static void initialize(float *values, int n, int fan_in, uint64_t *state) {
    for (int i = 0; i < n; ++i) { /* SplitMix64 */
        uint64_t z = *state += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        values[i] = (float)((2 * ((double)((z ^ (z >> 31)) >> 40) / 16777216) - 1) / sqrt(fan_in));
    }
}

/* Gives this rank its slices of fc1's rows and fc2's columns. Returns the ranks with the same slices and other samples. */
static tsr_comm *slice(tsr_comm *comm, tsr_param *params) {
    const int32_t ranks = strcmp(text[PARALLEL], "tp") == 0 ? world : 2, sizes[] = {world / ranks, ranks};
    const char *const dims[] = {"dp", "tp"};
    const tsr_tp_rule plan[] = {{.pattern = "fc1", .style = TSR_TP_COLUMN}, {.pattern = "fc2", .style = TSR_TP_ROW}};
    tsr_comm *others;
    tsr_mesh *group;
    CHECK(tsr_mesh_create(comm, dims, sizes, 2, &mesh));
    CHECK(tsr_mesh_comm(mesh, "dp", &others));
    CHECK(tsr_mesh_slice(mesh, &dims[1], 1, &group));
    CHECK(tsr_tp_create(group, params, PARAMS, plan, 2, NULL, &tp));
    tsr_mesh_destroy(group); /* the model keeps its communicator */
    for (size_t i = 0; i < PARAMS; ++i) {
        CHECK(tsr_tp_slice(tp, i, &params[i]));
        value[i] = params[i].tensor.data;
    }
    width = (int)params[B1].tensor.shape[0];
    return others;
}

/* A pass over a unit begins: sharded parameters are whole until its end, and gradients are there in the backward pass. */
static void begin(size_t unit, int is_backward) {
    if (fsdp != NULL) CHECK(is_backward ? tsr_fsdp_backward(fsdp, unit) : tsr_fsdp_forward(fsdp, unit));
    for (size_t i = 2 * unit; i < 2 * unit + 2; ++i) {
        tsr_tensor tensor;
        if (fsdp != NULL) CHECK(tsr_fsdp_whole(fsdp, i, &tensor)), value[i] = tensor.data;
        if (!is_backward) continue;
        CHECK(fsdp != NULL ? tsr_fsdp_grad(fsdp, i, &tensor) : tsr_ddp_grad(ddp, i, &tensor));
        grad[i] = tensor.data;
        memset(grad[i], 0, sizeof(float) * (size_t)(tensor.shape[0] * (tensor.ndim > 1 ? tensor.shape[1] : 1)));
    }
}

/* It ends: gradients are on their way to the other ranks. */
static void end(size_t unit, int is_backward) {
    if (fsdp != NULL) CHECK(is_backward ? tsr_fsdp_grads_ready(fsdp, unit) : tsr_fsdp_forward_done(fsdp, unit));
    for (size_t i = 2 * unit; ddp != NULL && is_backward && i < 2 * unit + 2; ++i) CHECK(tsr_ddp_ready(ddp, i));
}

static void hidden_layer(const float *x, float *out) {
    for (int j = 0; j < width; ++j) {
        out[j] = value[B1][j];
        for (int k = 0; k < PIXELS; ++k) out[j] += value[W1][j * PIXELS + k] * x[k];
        if (out[j] < 0) out[j] = 0;
    }
}

/* Writes the logits of n samples to p. Of slices they are a sum over the ranks, to which the bias is added once. */
static void logits(size_t n) {
    for (size_t i = 0; i < n; ++i) {
        for (int c = 0; c < CLASSES; ++c) {
            p[i][c] = tp != NULL ? 0 : value[B2][c];
            for (int j = 0; j < width; ++j) p[i][c] += value[W2][c * width + j] * h[i][j];
        }
    }
    const tsr_tensor all = tsr_f32_2d(p[0], (int64_t)n, CLASSES), bias = tsr_f32_1d(value[B2], CLASSES);
    if (tp != NULL) CHECK(tsr_tp_leave(tp, &all, -1, &bias, &all, NULL, NULL));
}

int likeliest(const float *of) {
    int best = 0;
    for (int c = 1; c < CLASSES; ++c) best = of[c] > of[best] ? c : best;
    return best;
}

void softmax(float *of) {
    const float top = of[likeliest(of)];
    float sum = 0;
    for (int c = 0; c < CLASSES; ++c) sum += of[c] = expf(of[c] - top);
    for (int c = 0; c < CLASSES; ++c) of[c] /= sum;
}

/* The mean loss over the batch; its gradients are averaged over the ranks in the background. */
static double forward_backward(const int64_t *batch, size_t n) {
    double loss = 0;
    begin(FC1, 0);
    for (size_t i = 0; i < n; ++i) hidden_layer(train_x[batch[i]], h[i]);
    end(FC1, 0), begin(FC2, 0);
    logits(n);
    for (size_t i = 0; i < n; ++i) {
        softmax(p[i]);
        loss -= log(fmax(p[i][train_y[batch[i]]], 1e-30)) / (double)n;
    }
    end(FC2, 0), begin(FC2, 1);
    for (size_t i = 0; i < n; ++i) {
        float dh[HIDDEN] = {0};
        for (int c = 0; c < CLASSES; ++c) {
            const float d = (p[i][c] - (c == train_y[batch[i]] ? 1.F : 0.F)) / (float)n;
            grad[B2][c] += d;
            for (int j = 0; j < width; ++j) {
                grad[W2][c * width + j] += d * h[i][j];
                dh[j] += d * value[W2][c * width + j];
            }
        }
        for (int j = 0; j < width; ++j) h[i][j] = h[i][j] > 0 ? dh[j] : 0; /* from here on its gradient */
    }
    end(FC2, 1), begin(FC1, 1);
    for (size_t i = 0; i < n; ++i) {
        for (int j = 0; j < width; ++j) {
            if (h[i][j] == 0) continue;
            grad[B1][j] += h[i][j];
            for (int k = 0; k < PIXELS; ++k) grad[W1][j * PIXELS + k] += h[i][j] * train_x[batch[i]][k];
        }
    }
    end(FC1, 1);
    CHECK(ddp != NULL ? tsr_ddp_wait(ddp) : tsr_fsdp_wait(fsdp)); /* the average of all ranks now */
    return loss;
}

static double pipelined(const int64_t *batch, size_t n) {
    static float x[TRAIN][PIXELS];
    static int64_t y[TRAIN];
    for (size_t i = 0; i < n; ++i) memcpy(x[i], train_x[batch[i]], sizeof x[i]), y[i] = train_y[batch[i]];
    return pipeline_step(x[0], y, n);
}

/* The held-out rows are distributed over the ranks with other samples. Returns the part that is recognised. */
static double evaluate_held_out(tsr_comm *comm, tsr_comm *others, FILE *log) {
    static float x[HELD_OUT][PIXELS];
    int64_t share[HELD_OUT], y[HELD_OUT];
    uint8_t valid[HELD_OUT];
    const size_t n = held_out_share(others, share, valid);
    int32_t slice = 0; /* ranks of "tp" have the same rows: the first one counts them */
    for (size_t i = 0; i < n; ++i) memcpy(x[i], test_x[share[i]], sizeof x[i]), y[i] = test_y[share[i]];
    if (is_pipeline) {
        slice = !pipeline_logits(x[0], y, n, p[0]);
    } else {
        if (tp != NULL) CHECK(tsr_mesh_dim(mesh, "tp", NULL, &slice));
        begin(FC1, 0);
        for (size_t i = 0; i < n; ++i) hidden_layer(x[i], h[i]);
        end(FC1, 0), begin(FC2, 0);
        logits(n);
        end(FC2, 0);
    }
    return evaluate(comm, p[0], y, valid, slice == 0 ? n : 0, log);
}

/* A bar on standard error: how far a save or a load is. Saves in the background call it on the saver's thread. */
static void show_bar(int32_t phase, int64_t done, int64_t total, void *unused) {
    (void)unused;
    if (total == 0 || (phase != TSR_PHASE_WRITE && phase != TSR_PHASE_READ)) return;
    fprintf(stderr, "\r%s [%-20.*s]%s", phase == TSR_PHASE_READ ? "loading" : "saving", (int)(20 * done / total),
            "####################", done == total ? "\n" : "");
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    read_data();
    uint64_t random = (uint64_t)number[SEED];
    initialize(w1[0], HIDDEN * PIXELS, PIXELS, &random), initialize(b1, HIDDEN, PIXELS, &random);
    initialize(w2[0], CLASSES * HIDDEN, HIDDEN, &random), initialize(b2, CLASSES, HIDDEN, &random);
    tsr_comm *comm;
    CHECK(tsr_comm_from_env(NULL, &comm)); /* tessera run, torchrun, mpirun, srun, or alone */
    CHECK(tsr_comm_rank(comm, &rank));
    CHECK(tsr_comm_world_size(comm, &world));
    tsr_param params[PARAMS] = {{"fc1.weight", tsr_f32_2d(w1, HIDDEN, PIXELS)},
                                {"fc1.bias", tsr_f32_1d(b1, HIDDEN)},
                                {"fc2.weight", tsr_f32_2d(w2, CLASSES, HIDDEN)},
                                {"fc2.bias", tsr_f32_1d(b2, CLASSES)}};
    const int multiple = multiple_of[way];
    if (multiple == 2 && world % 2 != 0)
        USAGE("--parallel %s needs an even number of ranks, not %d", text[PARALLEL], (int)world);
    if (world % multiple != 0)
        USAGE("--parallel %s needs a multiple of %d ranks, not %d", text[PARALLEL], multiple, (int)world);
    is_pipeline = strstr(text[PARALLEL], "pp") != NULL;
    const int is_cut = strstr(text[PARALLEL], "tp") != NULL;
    tsr_comm *others = is_pipeline ? pipeline_create(comm, params, is_cut ? 2 : 1, &ddp) /* those with other samples */
                       : is_cut    ? slice(comm, params)
                                   : comm;
    const tsr_fsdp_unit units[UNITS] = {{.name = "fc1", .params = params, .n = 2, .reshard_after_forward = 1},
                                        {.name = "fc2", .params = params + 2, .n = 2, .reshard_after_forward = 1}};
    const int sharded = strncmp(text[PARALLEL], "fsdp", 4) == 0;
    tsr_ddp_options ddp_options;
    tsr_fsdp_options fsdp_options;
    CHECK(tsr_ddp_options_init(&ddp_options, sizeof ddp_options));
    CHECK(tsr_fsdp_options_init(&fsdp_options, sizeof fsdp_options));
    ddp_options.tp = fsdp_options.tp = tp;
    /* every rank has its rows of rank 0's values, or all of them */
    if (!is_pipeline)
        CHECK(sharded ? tsr_fsdp_create(others, units, UNITS, &fsdp_options, &fsdp)
                      : tsr_ddp_create(others, params, PARAMS, &ddp_options, &ddp));
    tsr_adamw_options adamw;
    CHECK(tsr_adamw_options_init(&adamw, sizeof adamw));
    adamw.lr = 0.003;
    tsr_optimizer *optimizer;
    CHECK(sharded ? tsr_fsdp_adamw(fsdp, &adamw, &optimizer) : tsr_ddp_adamw(ddp, &adamw, &optimizer));
    const tsr_sampler_options order = {.struct_size = sizeof order, .seed = (uint64_t)number[SEED], .shuffle = 1};
    tsr_sampler *sampler;
    CHECK(tsr_sampler_create(others, TRAIN, &order, &sampler));
    tsr_state *state;
    CHECK(tsr_state_create(&state));
    CHECK(sharded ? tsr_state_add_fsdp(state, "model", fsdp) : tsr_state_add_ddp(state, "model", ddp));
    CHECK(tsr_state_add_optimizer(state, "optim", optimizer));
    CHECK(tsr_state_add_sampler(state, "data", sampler));
    tsr_saver_options saving;
    CHECK(tsr_saver_options_init(&saving, sizeof saving));
    saving.keep_latest = 3;
    saving.format = text[FORMAT];
    if (number[PROGRESS] > 0 && rank == 0) saving.progress = show_bar;
    tsr_saver *saver;
    CHECK(tsr_saver_create(comm, text[CHECKPOINTS], &saving, &saver));
    if (is_pipeline) CHECK(tsr_state_join(state, comm)); /* each rank has some of the parameters */
    int64_t step, batch[TRAIN];
    CHECK(tsr_saver_resume(saver, state, &step)); /* 0 when there is nothing yet */
    if (rank == 0 && step == 0) printf("digits: %d ranks, from the beginning\n", (int)world);
    if (rank == 0 && step > 0) printf("digits: %d ranks, resumed after step %lld\n", (int)world, (long long)step);
    if (rank == 0 && step >= number[STEPS]) printf("digits: nothing left to do: --steps is %ld\n", number[STEPS]);
    while (step < number[STEPS] && !stop) {
        size_t n;
        CHECK(tsr_sampler_next(sampler, batch, (size_t)(number[BATCH] < TRAIN ? number[BATCH] : TRAIN), &n));
        const double loss = is_pipeline ? pipelined(batch, n) : forward_backward(batch, n);
        CHECK(tsr_optimizer_step(optimizer));
        if (++step % 10 == 0 || step == number[STEPS]) {
            if (rank == 0) printf("step %lld/%ld loss %.4f\n", (long long)step, number[STEPS], loss), fflush(stdout);
            FILE *log = log_begin(text[LOG], rank, world, step);
            if (log != NULL) fprintf(log, ",\"loss\":%.6f", loss);
            log_end(log);
        }
        CHECK(tsr_saver_should_stop(saver, step, 0, &stop)); /* the same answer on all ranks */
        if (stop || (number[SAVE_EVERY] > 0 && step % number[SAVE_EVERY] == 0)) {
            CHECK(tsr_state_set_metric(state, "loss", loss));
            CHECK(tsr_saver_save_async(saver, step, state, NULL));
        }
        nanosleep(&(struct timespec){number[PACE] / 1000, number[PACE] % 1000 * 1000000}, NULL);
    }
    CHECK(tsr_saver_wait(saver));
    if (rank == 0 && stop) printf("digits: stopped after step %lld\n", (long long)step);
    if (!stop) {
        FILE *log = log_begin(text[LOG], rank, world, step);
        const double accuracy = evaluate_held_out(comm, others, log);
        log_end(log);
        if (rank == 0) printf("held-out accuracy %.4f\n", accuracy);
    }
    CHECK(tsr_comm_finalize(comm));
    tsr_saver_destroy(saver), tsr_state_destroy(state), tsr_sampler_destroy(sampler);
    tsr_optimizer_destroy(optimizer), tsr_ddp_destroy(ddp), tsr_fsdp_destroy(fsdp);
    if (is_pipeline) pipeline_destroy();
    tsr_tp_destroy(tp), tsr_mesh_destroy(mesh), tsr_comm_destroy(comm);
}
