// tessera/version.h: the version and path of the library.
#include "tessera/version.h"

#include <dlfcn.h>

namespace tsr::capi {

#define TSR_STRINGIFY(x) #x
#define TSR_TEXT(x) TSR_STRINGIFY(x)

extern "C" {

uint32_t tsr_abi_version(void) { return TSR_ABI_VERSION; }

const char* tsr_version(void) {
    return TSR_TEXT(TSR_VERSION_MAJOR) "." TSR_TEXT(TSR_VERSION_MINOR) "." TSR_TEXT(TSR_VERSION_PATCH);
}

const char* tsr_library_path(void) {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(&tsr_library_path), &info) == 0 || info.dli_fname == nullptr) return "";
    return info.dli_fname;
}

}  // extern "C"

}  // namespace tsr::capi
