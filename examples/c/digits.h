/* What the files of the digits trainer share. */
#ifndef DIGITS_H
#define DIGITS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "tessera/tessera.h"

enum { PIXELS = 64, HIDDEN = 128, CLASSES = 10, HELD_OUT = 297 };

#define CHECK(call) ((call) == TSR_OK ? (void)0 : fail(#call))

void fail(const char* call); /* reports the library's last error and exits */
int likeliest(const float* logits);
void softmax(float* logits);

/* digits_pipeline.c */

/* Takes this rank's of the four parameters: those of its stages. `tp_ranks` share each. Returns the ranks that have the same
 * stages and other samples; `ddp` averages their gradients. */
tsr_comm* pipeline_create(tsr_comm* comm, const tsr_param* params, int32_t tp_ranks, tsr_ddp** ddp);
/* The mean loss over n samples, whose gradients are then the average of all replicas. */
double pipeline_step(const float* x, const int64_t* y, size_t n);
/* Writes the logits of n samples. Returns 1 on the rank that has them: of the last stage, the first one. */
int pipeline_logits(const float* x, const int64_t* y, size_t n, float* logits);
void pipeline_destroy(void);

/* digits_evaluation.c */

/* This rank's part of the held-out rows, which are distributed over `others`: their number. A row whose `valid` is 0 fills up
 * the last step and is another rank's. */
size_t held_out_share(tsr_comm* others, int64_t* rows, uint8_t* valid);
/* How well the ranks of `comm` recognise their digits, each of which has n; a digit whose `valid` is 0 is not counted. Returns
 * the part that is recognised. The confusion matrix and the ROC curves go to the line `log`, if there is one. */
double evaluate(tsr_comm* comm, float* logits, int64_t* digits, uint8_t* valid, size_t n, FILE* log);
/* A line of the log begins; NULL if there is no log. It ends with one write: ranks may share the file. */
FILE* log_begin(const char* path, int32_t rank, int32_t world, int64_t step);
void log_end(FILE* log);

#endif
