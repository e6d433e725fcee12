/* Tessera: the version of the library. Bindings compare tsr_abi_version() when they load. */
#ifndef TESSERA_VERSION_H
#define TESSERA_VERSION_H

#include "types.h"

#define TSR_VERSION_MAJOR 0
#define TSR_VERSION_MINOR 1
#define TSR_VERSION_PATCH 0
/** The ABI of these headers: major * 1000 + minor before 1.0. A binding built against another ABI refuses to load. */
#define TSR_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

/** The ABI that the loaded library implements.
 *  @return TSR_ABI_VERSION of the headers it was built with
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 stable */
TSR_API uint32_t tsr_abi_version(void);

/** The library's version, "0.1.0".
 *  @return a static string
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 stable */
TSR_API const char *tsr_version(void);

/** The file that the library was loaded from, for error messages and bug reports.
 *  @return a string that lives as long as the process; "" if unknown
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 stable */
TSR_API const char *tsr_library_path(void);

#ifdef __cplusplus
}
#endif
#endif
