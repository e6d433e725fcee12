/* A rank that adds a one to those of the others, tells the test what came out, and with an argument goes on until the test
 * makes the file $D/go. */
#include <string.h>
#include <unistd.h>

#include "programs.h"

static float add(tsr_comm *comm, float number) {
    const tsr_tensor tensor = tsr_f32_1d(&number, 1);
    CHECK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, NULL, NULL));
    return number;
}

int main(int argc, char **argv) {
    (void)argv;
    setvbuf(stdout, NULL, _IOLBF, 0);
    tsr_comm *comm;
    CHECK(tsr_comm_from_env(NULL, &comm));
    int32_t rank, world_size;
    CHECK(tsr_comm_rank(comm, &rank));
    CHECK(tsr_comm_world_size(comm, &world_size));
    if (add(comm, 1) != (float)world_size) return 7;
    printf("rank %d of %d, local %s of %s, host %s of %s, epoch %s\n", (int)rank, (int)world_size, getenv("LOCAL_RANK"),
           getenv("LOCAL_WORLD_SIZE"), getenv("GROUP_RANK"), getenv("GROUP_WORLD_SIZE"), getenv("TESSERA_EPOCH"));
    char what[64];
    snprintf(what, sizeof what, "met-%s-of-%d-", getenv("TESSERA_EPOCH"), (int)world_size);
    leave(what, rank, (double)getpid());
    char path[4096];
    snprintf(path, sizeof path, "%s/go", getenv("D"));
    while (argc > 1 && add(comm, access(path, F_OK) == 0 ? 1 : 0) == 0) continue;
    CHECK(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);
    return 0;
}
