/* What digits.c and digits_pipeline.c share. */
#ifndef DIGITS_PIPELINE_H
#define DIGITS_PIPELINE_H

#include <stddef.h>
#include <stdint.h>

#include "tessera/tessera.h"

enum { PIXELS = 64, HIDDEN = 128, CLASSES = 10 };

#define CHECK(call) ((call) == TSR_OK ? (void)0 : fail(#call))

void fail(const char* call); /* reports the library's last error and exits */
int likeliest(const float* logits);
void softmax(float* logits);

/* Takes this rank's of the four parameters: those of its stages. `tp_ranks` share each. Returns the ranks that have the same
 * stages and other samples; `ddp` averages their gradients. */
tsr_comm* pipeline_create(tsr_comm* comm, const tsr_param* params, int32_t tp_ranks, tsr_ddp** ddp);
/* The mean loss over n samples, whose gradients are then the average of all replicas. */
double pipeline_step(const float* x, const int64_t* y, size_t n);
/* The part of n samples that are recognised. */
double pipeline_accuracy(const float* x, const int64_t* y, size_t n);
void pipeline_destroy(void);

#endif
