/* What the programs that the tests launch share. */
#include <stdio.h>
#include <stdlib.h>

#include "tessera/tessera.h"

#define CHECK(call)                                                                               \
    do {                                                                                          \
        if ((call) != TSR_OK) {                                                                   \
            fprintf(stderr, "%s: %s\n", #call, tsr_error_message(tsr_error_last()));              \
            exit(tsr_record_error(tsr_error_message(tsr_error_last()), #call) == TSR_OK ? 3 : 5); \
        }                                                                                         \
    } while (0)

/* Tells the test a number, by the file $D/WHATRANK. */
static void leave(const char* what, int32_t rank, double number) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s%d", getenv("D"), what, (int)rank);
    FILE* file = fopen(path, "w");
    if (file == NULL) exit(4);
    fprintf(file, "%.9g\n", number);
    fclose(file);
}
