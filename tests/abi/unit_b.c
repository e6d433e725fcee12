/* The other unit: the same headers in the opposite order, then the umbrella. */
#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/data.h"
#include "tessera/ddp.h"
#include "tessera/error.h"
#include "tessera/launch.h"
#include "tessera/layout.h"
#include "tessera/log.h"
#include "tessera/memory.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"
#include "tessera/random.h"
#include "tessera/state.h"
#include "tessera/store.h"
#include "tessera/tessera.h"
#include "tessera/types.h"
#include "tessera/version.h"

int unit_b(tsr_dtype dtype);

int unit_b(tsr_dtype dtype) { return dtype; }
