/* Tessera: the distributed-training runtime as one C library. The umbrella of all headers. */
#ifndef TESSERA_TESSERA_H
#define TESSERA_TESSERA_H

#include "types.h"
#include "error.h"
#include "version.h"
#include "log.h"
#include "store.h"
#include "comm.h"
#include "memory.h"
#include "mesh.h"
#include "layout.h"
#include "ddp.h"
#include "optim.h"
#include "data.h"
#include "state.h"
#include "checkpoint.h"
#include "launch.h"

#endif
