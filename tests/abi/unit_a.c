/* Every public header in one of two translation units that are linked together: what a header defines, it must define
 * for each unit alone. */
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
#include "tessera/types.h"
#include "tessera/version.h"

int unit_b(tsr_dtype dtype);

int main(void) {
    tsr_tensor tensor = tsr_f32_2d(NULL, 0, 3);
    return unit_b(tensor.dtype) == TSR_DTYPE_F32 && tsr_abi_version() == TSR_ABI_VERSION ? 0 : 1;
}
