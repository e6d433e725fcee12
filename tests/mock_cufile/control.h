/* A libcufile.so.0 over the simulated devices (simulated_cuda/control.h): what a test sets and asks besides cuFile's own
 * functions. It reads files that are open past the page cache into a device's memory, on a stream of its own, so in the order of
 * no other. Its compatibility mode is not allowed unless a test allows it. */
#ifndef TESSERA_TESTS_MOCK_CUFILE_H
#define TESSERA_TESTS_MOCK_CUFILE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mock_cufile_fault {
    MOCK_CUFILE_SOUND,
    MOCK_CUFILE_NO_DRIVER,   /* the driver cannot be opened */
    MOCK_CUFILE_COMPATIBLE,  /* its compatibility mode is allowed */
    MOCK_CUFILE_FILE_SYSTEM, /* no file can be registered */
    MOCK_CUFILE_SHORT,       /* every second read ends early */
    MOCK_CUFILE_EIO,         /* every second read fails with errno EIO */
    MOCK_CUFILE_POINTER,     /* every read fails with an error of cuFile's: the memory is of no kind that it knows */
    MOCK_CUFILE_WRONG_BYTE   /* every read has one wrong byte in its middle */
} mock_cufile_fault;

/* From now on, with the driver closed and all counts 0. */
void mock_cufile_set(mock_cufile_fault fault);
typedef struct mock_cufile_counts {
    size_t opened;     /* drivers */
    size_t registered; /* files that are registered now */
    size_t reads;      /* with their failures */
    size_t bytes;      /* that are in devices */
} mock_cufile_counts;
void mock_cufile_counted(mock_cufile_counts* counts);

#ifdef __cplusplus
}
#endif

#endif
