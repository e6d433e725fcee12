#include "checkpoint/io/cufile.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <optional>

#include "base/attempt.hpp"
#include "base/env.hpp"
#include "base/error.hpp"
#include "base/log.hpp"

namespace tsr::cufile {

namespace {

constexpr const char* system_name = "libcufile.so.0";

std::optional<Library> load() {
    const auto path = env_text("TESSERA_CUFILE");
    void* handle = path ? nullptr : ::dlopen(system_name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (handle == nullptr) handle = ::dlopen(path ? path->c_str() : system_name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        log::debug("cuFile cannot be loaded: {}", ::dlerror());
        return std::nullopt;
    }
    Library library;
    const char* missing = nullptr;
#define TSR_LOOK_UP(member, symbol, result, parameters)                                    \
    library.member = reinterpret_cast<decltype(library.member)>(::dlsym(handle, #symbol)); \
    if (library.member == nullptr) missing = #symbol;
    TSR_CUFILE(TSR_LOOK_UP)
#undef TSR_LOOK_UP
    if (missing == nullptr) return library;
    log::debug("cuFile is not used: it has no {}", missing);
    return std::nullopt;
}

bool is_usable(const Library& library) {
    // It stays open: another part of the program may use it by then.
    if (library.use_count() == 0) {
        const Status opened = library.driver_open();
        if (opened.error != 0 && opened.error != driver_already_open) {
            log::debug("cuFile is not used: its driver cannot be opened (cuFile error {}, CUDA error {})", opened.error,
                       opened.cuda);
            return false;
        }
    }
    Properties properties;
    if (const Status known = library.properties(&properties); known.error != 0) {
        log::debug("cuFile is not used: cuFileDriverGetProperties failed (cuFile error {})", known.error);
        return false;
    }
    if ((properties.control & 1U << allow_compat_mode) == 0) return true;
    log::debug("cuFile is not used: its compatibility mode is allowed; set CUFILE_ALLOW_COMPAT_MODE=false");
    return false;
}

}  // namespace

const Library* library_for(DeviceApi& device) {
    if (!env_flag("TESSERA_GDS")) return nullptr;
    static const auto& library = *new std::optional<Library>(load());  // threads may use it until the process ends
    if (!library) return nullptr;
    bool usable = false;
    device.in_use([&] { usable = is_usable(*library); });
    return usable ? &*library : nullptr;
}

std::unique_ptr<Registered> Registered::of(int descriptor, DeviceApi& device) {
    const Library* const library = library_for(device);
    if (library == nullptr) return nullptr;
    Description file;
    file.file.descriptor = descriptor;
    Handle handle = nullptr;
    Status status{};
    device.in_use([&] { status = library->handle_register(&handle, &file); });
    if (status.error == 0) return std::unique_ptr<Registered>(new Registered(*library, handle));
    log::debug("cuFile does not read this file: cuFileHandleRegister failed (cuFile error {}, CUDA error {})",
               status.error, status.cuda);
    return nullptr;
}

int64_t Registered::read(DeviceApi& device, std::byte* to, int64_t size, int64_t offset) const {
    int64_t got = 0;
    int error = 0;
    device.in_use([&] {
        got = library_.read(handle_, to, static_cast<size_t>(size), offset, 0);
        error = errno;
    });
    if (got < 0) log::debug("cuFileRead of {} bytes at {} failed: {} (errno {})", size, offset, got, error);
    if (got >= 0) return got;
    return got == -1 ? -int64_t{error} : -int64_t{EIO};
}

}  // namespace tsr::cufile
