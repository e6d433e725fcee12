/* The digits network as a pipeline: four stages with one parameter each, on four ranks or on two. A rank of two has the weights
 * or the biases. Further ranks are replicas of the pipeline with other samples, or share each stage's parameter. */
#include "digits.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { W1, B1, W2, B2, STAGES, MICROBATCHES = 4 };
static tsr_mesh *mesh, *same_stage;
static tsr_tp *tp; /* NULL: each stage is on one rank */
static tsr_ddp *model;
static tsr_pipeline *pipeline;
static const float *value[STAGES]; /* of this rank's stages */
static float *grad[STAGES];
static size_t index_of[STAGES], size_of[STAGES];
static float *evaluated; /* where the last stage writes the logits of an evaluation's next micro-batch */

#define TRY(call)                                                                        \
    do {                                                                                 \
        const int32_t code = (call);                                                     \
        if (code == TSR_OK) break;                                                       \
        snprintf(message, TSR_MESSAGE_BYTES, "%s", tsr_error_message(tsr_error_last())); \
        return code;                                                                     \
    } while (0)

static int32_t forward(const tsr_stage_call *call, char *message, void *unused) {
    (void)unused;
    const int64_t rows = call->inputs->shape[0], in = call->inputs->shape[1];
    const int64_t out = call->stage == W1 ? (int64_t)size_of[W1] / PIXELS : call->stage == B1 ? in : CLASSES;
    const float *x = call->inputs->data, *param = value[call->stage];
    const int64_t shape[] = {rows, out};
    tsr_tensor made;
    TRY(tsr_pipeline_output(pipeline, TSR_DTYPE_F32, shape, 2, &made));
    float *y = made.data;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < out; ++j) {
            float sum = 0;
            if (call->stage == W1 || call->stage == W2) {
                for (int64_t k = 0; k < in; ++k) sum += param[j * in + k] * x[r * in + k];
            } else {
                sum = x[r * in + j] + param[j];
            }
            y[r * out + j] = call->stage == B1 && sum < 0 ? 0 : sum;
        }
    }
    if (call->stage == W2 && tp != NULL)
        TRY(tsr_tp_leave(tp, &made, -1, NULL, &made, NULL, NULL)); /* the sum of all ranks' */
    if (call->stage != B2) return TSR_OK;
    if (!call->training) {
        memcpy(evaluated, y, (size_t)(rows * CLASSES) * sizeof *y);
        evaluated += rows * CLASSES;
        return TSR_OK;
    }
    double loss = 0;
    for (int64_t r = 0; r < rows; ++r) {
        float *p = y + r * CLASSES;
        const int64_t label = ((const int64_t *)call->targets->data)[r];
        softmax(p);
        loss -= log(fmax(p[label], 1e-30));
        p[label] -= 1;
        for (int c = 0; c < CLASSES; ++c)
            p[c] *= (float)call->weight / (float)rows; /* the gradient, for the backward */
    }
    return tsr_pipeline_loss(pipeline, loss / (double)rows);
}

static int32_t backward(const tsr_stage_call *call, char *message, void *unused) {
    (void)unused;
    const tsr_tensor *of_outputs = call->stage == B2 ? call->outputs : call->output_grads;
    const int64_t rows = of_outputs->shape[0], out = of_outputs->shape[1], in = call->inputs->shape[1];
    const float *x = call->inputs->data, *y = call->outputs->data, *dy = of_outputs->data, *param = value[call->stage];
    float *dx = call->n_input_grads > 0 ? call->input_grads->data : NULL, *sum = grad[call->stage];
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < out; ++j) {
            const float d = call->stage == B1 && y[r * out + j] <= 0 ? 0 : dy[r * out + j];
            if (call->stage == B1 || call->stage == B2) {
                sum[j] += d;
                dx[r * in + j] = d;
                continue;
            }
            for (int64_t k = 0; k < in; ++k) {
                sum[j * in + k] += d * x[r * in + k];
                if (dx != NULL) dx[r * in + k] += d * param[j * in + k];
            }
        }
    }
    if (call->is_last_backward) TRY(tsr_ddp_ready(model, index_of[call->stage])); /* while other stages still compute */
    return TSR_OK;
}

tsr_comm *pipeline_create(tsr_comm *comm, const tsr_param *params, int32_t tp_ranks, tsr_ddp **ddp) {
    int32_t world, first;
    CHECK(tsr_comm_world_size(comm, &world));
    const int32_t ranks = tp_ranks == 1 && world % 4 == 0 ? 4 : 2;
    const char *const dims[] = {"pp", "same"}, *const dims_same[] = {"dp", "tp"};
    const int32_t sizes[] = {ranks, world / ranks}, sizes_same[] = {world / ranks / tp_ranks, tp_ranks};
    tsr_comm *line, *same, *others;
    CHECK(tsr_mesh_create(comm, dims, sizes, 2, &mesh));
    CHECK(tsr_mesh_comm(mesh, "pp", &line));
    CHECK(tsr_mesh_comm(mesh, "same", &same));
    CHECK(tsr_mesh_create(same, dims_same, sizes_same, 2, &same_stage));
    CHECK(tsr_mesh_comm(same_stage, "dp", &others));

    CHECK(tsr_comm_rank(line, &first));
    int32_t stages[STAGES];
    tsr_param own[STAGES];
    size_t n = 0;
    for (int32_t stage = first; stage < STAGES; stage += ranks, ++n) stages[n] = stage, own[n] = params[stage];
    if (tp_ranks > 1) {
        const tsr_tp_rule plan[] = {{.pattern = "fc1", .style = TSR_TP_COLUMN},
                                    {.pattern = "fc2", .style = TSR_TP_ROW}};
        tsr_mesh *group;
        CHECK(tsr_mesh_slice(same_stage, &dims_same[1], 1, &group));
        CHECK(tsr_tp_create(group, own, n, plan, 2, NULL, &tp));
        tsr_mesh_destroy(group); /* the slices keep its communicator */
        for (size_t i = 0; i < n; ++i) CHECK(tsr_tp_slice(tp, i, &own[i]));
    }
    tsr_ddp_options options;
    CHECK(tsr_ddp_options_init(&options, sizeof options));
    options.tp = tp;
    CHECK(tsr_ddp_create(others, own, n, &options, &model));
    for (size_t i = 0; i < n; ++i) {
        const int32_t stage = stages[i];
        tsr_tensor tensor;
        CHECK(tsr_ddp_grad(model, i, &tensor));
        value[stage] = own[i].tensor.data;
        grad[stage] = tensor.data;
        index_of[stage] = i;
        size_of[stage] = (size_t)(tensor.shape[0] * (tensor.ndim > 1 ? tensor.shape[1] : 1));
    }

    const tsr_pipeline_callbacks callbacks = {
        .struct_size = sizeof callbacks, .forward = forward, .backward = backward};
    tsr_pipeline_options settings;
    CHECK(tsr_pipeline_options_init(&settings, sizeof settings));
    settings.microbatches = MICROBATCHES;
    settings.schedule = ranks == STAGES ? TSR_SCHEDULE_1F1B : TSR_SCHEDULE_INTERLEAVED_1F1B;
    CHECK(tsr_pipeline_create(line, stages, n, &callbacks, &settings, &pipeline));
    *ddp = model;
    return others;
}

/* Of values that are means over a micro-batch each. */
static double mean(const double *values, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < MICROBATCHES; ++i) {
        const size_t rows = n / MICROBATCHES + (i < n % MICROBATCHES ? 1 : 0);
        sum += values[i] * (double)rows / (double)n;
    }
    return sum;
}

static double run(const float *x, const int64_t *y, size_t n, int training) {
    const tsr_tensor batch = tsr_f32_2d((void *)x, (int64_t)n, PIXELS), targets = tsr_i64_1d((void *)y, (int64_t)n);
    double values[MICROBATCHES];
    CHECK((training ? tsr_pipeline_step : tsr_pipeline_eval)(pipeline, &batch, 1, &targets, 1, NULL, 0, values,
                                                             MICROBATCHES));
    return mean(values, n);
}

double pipeline_step(const float *x, const int64_t *y, size_t n) {
    for (int stage = 0; stage < STAGES; ++stage) {
        if (grad[stage] != NULL) memset(grad[stage], 0, size_of[stage] * sizeof(float));
    }
    const double loss = run(x, y, n, 1);
    CHECK(tsr_ddp_wait(model));
    return loss;
}

int pipeline_logits(const float *x, const int64_t *y, size_t n, float *logits) {
    int32_t slice;
    CHECK(tsr_mesh_dim(same_stage, "tp", NULL, &slice));
    evaluated = logits;
    run(x, y, n, 0);
    return evaluated != logits && slice == 0;
}

void pipeline_destroy(void) {
    tsr_pipeline_destroy(pipeline), tsr_tp_destroy(tp);
    tsr_mesh_destroy(same_stage), tsr_mesh_destroy(mesh);
}
