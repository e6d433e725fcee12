/* Tessera: the distributed-training runtime as one C library. The umbrella of all headers. */
#ifndef TESSERA_TESSERA_H
#define TESSERA_TESSERA_H

#include "checkpoint.h"
#include "comm.h"
#include "data.h"
#include "ddp.h"
#include "engine.h"
#include "error.h"
#include "fsdp.h"
#include "grad_scaler.h"
#include "launch.h"
#include "layout.h"
#include "log.h"
#include "loss_scale.h"
#include "lr_schedule.h"
#include "memory.h"
#include "mesh.h"
#include "metrics.h"
#include "optim.h"
#include "pipeline.h"
#include "plan.h"
#include "random.h"
#include "state.h"
#include "storage.h"
#include "store.h"
#include "tp.h"
#include "turn.h"
#include "types.h"
#include "version.h"

#endif
