/* A trainer whose ranks are replaced when they die: it grows its communicator, makes everything anew in the same process, and
 * loads the last checkpoint. `replaced ROOT [RANK:REPLACEMENT:STEP...]`: that process of the rank kills itself in that step,
 * after it has started the step's reduction; with STEP 0, instead of growing the communicator. The final weights go to
 * $D/weights-RANK. With NO_GROW set, a rank fails instead. */
#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "programs.h"

enum { N = 3000 };

static int is_time(int argc, char **argv, int32_t rank, int64_t step) {
    char now[64];
    const char *replacement = getenv("TESSERA_REPLACEMENT");
    snprintf(now, sizeof now, "%d:%s:%d", (int)rank, replacement == NULL ? "0" : replacement, (int)step);
    for (int i = 2; i < argc; ++i) {
        if (strcmp(argv[i], now) == 0) return 1;
    }
    return 0;
}

/* Without sockets: the client of the store keeps up to four connections, as many as its threads have used at a time. */
static int open_files(void) {
    DIR *directory = opendir("/proc/self/fd");
    if (directory == NULL) exit(4);
    int count = 0;
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        char target[16] = "";
        const ssize_t size = readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1);
        if (size >= 0 && strncmp(target, "socket:", 7) != 0) ++count;
    }
    closedir(directory);
    return count;
}

/* Trains to the end, or until a rank is lost: then the status of the step that failed. */
static tsr_status train(tsr_comm *comm, int argc, char **argv) {
    int32_t rank = 0;
    CHECK(tsr_comm_rank(comm, &rank));
    static float weight[N], bias[N];
    for (int i = 0; i < N; ++i) weight[i] = bias[i] = (float)i / N;
    const tsr_param params[] = {{"weight", tsr_f32_1d(weight, N)}, {"bias", tsr_f32_1d(bias, N)}};
    tsr_ddp_options options;
    CHECK(tsr_ddp_options_init(&options, sizeof options));
    options.bucket_bytes = sizeof weight; /* a bucket each */
    options.first_bucket_bytes = sizeof weight;
    tsr_ddp *ddp;
    tsr_optimizer *optimizer;
    tsr_state *state;
    tsr_saver *saver;
    CHECK(tsr_ddp_create(comm, params, 2, &options, &ddp));
    CHECK(tsr_ddp_adamw(ddp, NULL, &optimizer));
    CHECK(tsr_state_create(&state));
    CHECK(tsr_state_add_ddp(state, "model", ddp));
    CHECK(tsr_state_add_optimizer(state, "optim", optimizer));
    CHECK(tsr_saver_create(comm, argv[1], NULL, &saver));
    int64_t step = 0;
    CHECK(tsr_saver_resume(saver, state, &step));
    tsr_tensor grads[2];
    for (size_t p = 0; p < 2; ++p) CHECK(tsr_ddp_grad(ddp, p, &grads[p]));
    leave("files-", rank, open_files());
    tsr_status status = TSR_OK;
    while (status == TSR_OK && step < 20) {
        for (int i = 0; i < N; ++i) {
            ((float *)grads[0].data)[i] = (weight[i] - 1) * (float)(rank + 1) + 1 / (float)(step + 1);
            ((float *)grads[1].data)[i] = (bias[i] + weight[i]) * (float)(rank + 2);
        }
        CHECK(tsr_ddp_ready(ddp, 1));
        if (is_time(argc, argv, rank, step + 1)) raise(SIGKILL); /* the first bucket is on its way */
        CHECK(tsr_ddp_ready(ddp, 0));
        status = tsr_ddp_wait(ddp);
        if (status != TSR_OK) break;
        CHECK(tsr_optimizer_step(optimizer));
        CHECK(tsr_ddp_zero_grad(ddp));
        status = tsr_saver_save(saver, ++step, state);
    }
    if (status == TSR_OK) {
        char path[4096];
        snprintf(path, sizeof path, "%s/weights-%d", getenv("D"), (int)rank);
        FILE *file = fopen(path, "w");
        if (file == NULL || fwrite(weight, sizeof weight, 1, file) != 1 || fwrite(bias, sizeof bias, 1, file) != 1)
            exit(4);
        fclose(file);
    }
    tsr_saver_destroy(saver), tsr_state_destroy(state);
    tsr_optimizer_destroy(optimizer), tsr_ddp_destroy(ddp);
    return status;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    tsr_comm *comm;
    CHECK(tsr_comm_from_env(NULL, &comm));
    int32_t rank = 0;
    CHECK(tsr_comm_rank(comm, &rank));
    while (train(comm, argc, argv) != TSR_OK) {
        if (getenv("NO_GROW") != NULL) return 3;
        if (is_time(argc, argv, rank, 0)) raise(SIGKILL);
        tsr_comm *grown;
        CHECK(tsr_comm_grow(comm, NULL, &grown));
        tsr_comm_destroy(comm);
        comm = grown;
    }
    CHECK(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);
    return 0;
}
