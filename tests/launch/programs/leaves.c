/* A trainer that ends with a save in flight, in the way that its first argument names; its second is the saver's root. The
 * save takes half a second at least. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "programs.h"

static void progress(int32_t phase, int64_t done, int64_t total, void *user_data) {
    (void)phase, (void)done, (void)total, (void)user_data;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const char *way = argv[1];
    const int64_t shape[] = {4 << 20};
    float *weight = calloc((size_t)shape[0], sizeof *weight);
    const tsr_tensor tensor = {
        .data = weight, .shape = shape, .ndim = 1, .dtype = TSR_DTYPE_F32, .device_type = TSR_DEVICE_CPU};
    tsr_comm *comm;
    CHECK(tsr_comm_from_env(NULL, &comm));
    tsr_state *state;
    CHECK(tsr_state_create(&state));
    CHECK(tsr_state_add_tensor(state, "weight", &tensor));
    tsr_saver_options options;
    CHECK(tsr_saver_options_init(&options, sizeof options));
    options.write_bytes_per_s = 32 << 20;
    if (strcmp(way, "progress") == 0) options.progress = progress;
    if (strcmp(way, "late") == 0) {
        options.write_bytes_per_s = 1 << 20;
        options.timeout_ms = 200;
    }
    tsr_saver *saver;
    CHECK(tsr_saver_create(comm, argv[2], &options, &saver));
    tsr_work *work;
    CHECK(tsr_saver_save_async(saver, 7, state, &work));
    if (strcmp(way, "destroy") == 0) tsr_saver_destroy(saver);
    if (strcmp(way, "work") == 0) {
        tsr_work_destroy(work);
        tsr_state_destroy(state);
        tsr_comm_destroy(comm);
        free(weight);
    }
    if (strcmp(way, "exit") == 0) exit(0);
    if (strcmp(way, "fork") == 0) {
        const pid_t child = fork();
        if (child == 0) exit(5); /* it has no thread that saves */
        int status = 0;
        if (waitpid(child, &status, 0) != child || WEXITSTATUS(status) != 5) return 6;
    }
    return 0;
}
