/* How well all ranks together recognise held-out digits, by the library's metrics; and the log, which has it. */
#define _POSIX_C_SOURCE 200809L
#include <time.h>

#include "digits.h"

FILE *log_begin(const char *path, int32_t rank, int32_t world, int64_t step) {
    static char line[1 << 16];
    struct timespec now;
    FILE *file = clock_gettime(CLOCK_REALTIME, &now) == 0 && *path != '\0' ? fopen(path, "a") : NULL;
    if (file == NULL) return NULL;
    setvbuf(file, line, _IOFBF, sizeof line);
    fprintf(file, "{\"time\":%.3f,\"rank\":%d,\"world\":%d,\"step\":%lld",
            (double)now.tv_sec + (double)now.tv_nsec * 1e-9, (int)rank, (int)world, (long long)step);
    return file;
}

void log_end(FILE *log) {
    if (log != NULL) fputs(",\"lang\":\"c\"}\n", log), fclose(log);
}

size_t held_out_share(tsr_comm *others, int64_t *rows, uint8_t *valid) {
    const tsr_sampler_options in_order = {.struct_size = sizeof in_order};
    tsr_sampler *sampler;
    size_t n;
    CHECK(tsr_sampler_create(others, HELD_OUT, &in_order, &sampler));
    CHECK(tsr_sampler_next(sampler, rows, HELD_OUT, &n));
    CHECK(tsr_sampler_valid(sampler, valid, n));
    tsr_sampler_destroy(sampler);
    return n;
}

/* The numbers of an array of a metric, row by row. */
static void print_array(FILE *log, const tsr_metric *metric, const char *name) {
    tsr_tensor array;
    CHECK(tsr_metric_result(metric, name, &array));
    const int64_t n = array.shape[0] * (array.ndim > 1 ? array.shape[1] : 1);
    fprintf(log, ",\"%s\":[", name);
    for (int64_t i = 0; i < n; ++i) {
        const char *separator = i + 1 < n ? "," : "]";
        if (array.dtype == TSR_DTYPE_I64)
            fprintf(log, "%lld%s", (long long)((const int64_t *)array.data)[i], separator);
        else
            fprintf(log, "%.6f%s", ((const double *)array.data)[i], separator);
    }
}

double evaluate(tsr_comm *comm, float *logits, int64_t *digits, uint8_t *valid, size_t n, FILE *log) {
    tsr_metric *confusion, *roc, *auroc;
    tsr_metric_options options;
    CHECK(tsr_metric_options_init(&options, sizeof options));
    options.classes = CLASSES;
    CHECK(tsr_metric_create(TSR_METRIC_CONFUSION_MATRIX, &options, &confusion));
    options.task = TSR_TASK_MULTICLASS; /* a curve of each digit against the rest */
    CHECK(tsr_metric_create(TSR_METRIC_ROC_CURVE, &options, &roc));
    CHECK(tsr_metric_create(TSR_METRIC_AUROC, &options, &auroc));

    if (n > 0) { /* this rank's samples */
        int64_t recognised[HELD_OUT];
        for (size_t i = 0; i < n; ++i) recognised[i] = likeliest(logits + CLASSES * i);
        const int64_t rows = (int64_t)n;
        const tsr_tensor scores = tsr_f32_2d(logits, rows, CLASSES), labels = tsr_i64_1d(digits, rows);
        const tsr_tensor predictions = tsr_i64_1d(recognised, rows);
        const tsr_tensor mask = tsr_u8_1d(valid, rows);
        CHECK(tsr_metric_update(confusion, &predictions, &labels, NULL, &mask));
        CHECK(tsr_metric_update(roc, &scores, &labels, NULL, &mask));
        CHECK(tsr_metric_update(auroc, &scores, &labels, NULL, &mask));
    }
    double area, none;                                 /* what has arrays has no number */
    CHECK(tsr_metric_compute(confusion, comm, &none)); /* of all ranks' samples, and the same on every rank */
    CHECK(tsr_metric_compute(roc, comm, &none));
    CHECK(tsr_metric_compute(auroc, comm, &area));

    tsr_tensor matrix;
    CHECK(tsr_metric_result(confusion, "matrix", &matrix));
    const int64_t *count = matrix.data;
    int64_t right = 0, all = 0;
    for (int i = 0; i < CLASSES * CLASSES; ++i) all += count[i], right += i % (CLASSES + 1) == 0 ? count[i] : 0;
    const double accuracy = (double)right / (double)all;
    if (log != NULL) {
        fprintf(log, ",\"accuracy\":%.6f,\"auroc\":%.6f", accuracy, area);
        print_array(log, confusion, "matrix");
        for (int i = 0; i < CLASSES; ++i) {
            const char fpr[] = {'f', 'p', 'r', '.', (char)('0' + i), '\0'}, tpr[] = {'t', 'p', 'r', '.', fpr[4], '\0'};
            print_array(log, roc, fpr), print_array(log, roc, tpr);
        }
    }
    tsr_metric_destroy(confusion), tsr_metric_destroy(roc), tsr_metric_destroy(auroc);
    return accuracy;
}
