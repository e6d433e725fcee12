//! `tessera/version.h`.

use std::ffi::c_char;

constants! { u32:
    TSR_VERSION_MAJOR = 0;
    TSR_VERSION_MINOR = 1;
    TSR_VERSION_PATCH = 0;
    TSR_ABI_VERSION = 1;
}

functions! { "version":
    fn tsr_abi_version() -> u32;
    fn tsr_version() -> *const c_char;
    fn tsr_library_path() -> *const c_char;
}
