#include "device/cuda/driver.hpp"

#include <dlfcn.h>
#include <fmt/core.h>

#include <mutex>
#include <optional>

#include "base/error.hpp"

namespace tsr::cuda {

namespace {

constexpr const char* library_name = "libcuda.so.1";

struct Loaded {
    Driver functions;
    std::optional<Error> failure;  // why there is no driver
};

Error unusable(const std::string& why) {
    return {Code::unsupported, fmt::format("CUDA devices cannot be used: {}; use tensors on the CPU", why)};
}

// dlerror() of a library that is absent already names it.
Loaded load() {
    Loaded loaded;
    void* library = ::dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        loaded.failure = unusable(fmt::format("there is no NVIDIA driver ({})", ::dlerror()));
        return loaded;
    }
    const char* missing = nullptr;
    Driver& functions = loaded.functions;
#define TSR_LOOK_UP(member, symbol, parameters)                                                 \
    functions.member = reinterpret_cast<decltype(functions.member)>(::dlsym(library, #symbol)); \
    if (functions.member == nullptr) missing = #symbol;
    TSR_CUDA_DRIVER(TSR_LOOK_UP)
#undef TSR_LOOK_UP
    int version = 0;
    if (functions.driver_version != nullptr) functions.driver_version(&version);
    if (missing != nullptr || version < oldest_version) {
        const std::string lack = missing == nullptr ? "" : fmt::format(" and has no {}", missing);
        loaded.failure = unusable(
            fmt::format("{} supports CUDA {}{}, but {} is the oldest that is supported; update the NVIDIA driver",
                        library_name, version_text(version), lack, version_text(oldest_version)));
        return loaded;
    }
    return loaded;
}

const Loaded& library() {
    static const Loaded& loaded = *new Loaded(load());  // threads may use it until the process ends
    return loaded;
}

}  // namespace

const Driver& driver() {
    const Loaded& loaded = library();
    if (loaded.failure) throw Error(*loaded.failure);
    const Driver& functions = loaded.functions;
    // In a forked child of a process that used the driver, init fails; it is quick where it has succeeded.
    const Result result = functions.init(0);
    if (result == success) return functions;
    if (result == not_initialized) {
        throw unusable("the driver was initialised before this process was forked; start it with exec (spawn) instead")
            .with_native(NativeDomain::cuda, result);
    }
    throw unusable(result == no_device ? "the NVIDIA driver finds no device" : describe(result))
        .with_native(NativeDomain::cuda, result);
}

std::string describe(Result result) {
    const Driver& functions = library().functions;
    const char* name = nullptr;
    const char* text = nullptr;
    if (functions.error_name != nullptr) functions.error_name(result, &name);
    if (functions.error_string != nullptr) functions.error_string(result, &text);
    if (name == nullptr) return fmt::format("CUDA error {}", result);
    return fmt::format("{} ({}): {}", name, result, text == nullptr ? "no description" : text);
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

namespace {

// After these every call of the process on the device fails.
bool is_sticky(Result result) {
    switch (result) {
        case 214:  // CUDA_ERROR_ECC_UNCORRECTABLE
        case 700:  // CUDA_ERROR_ILLEGAL_ADDRESS
        case 702:  // CUDA_ERROR_LAUNCH_TIMEOUT
        case 710:  // CUDA_ERROR_ASSERT
        case 714:  // CUDA_ERROR_HARDWARE_STACK_ERROR
        case 715:  // CUDA_ERROR_ILLEGAL_INSTRUCTION
        case 716:  // CUDA_ERROR_MISALIGNED_ADDRESS
        case 717:  // CUDA_ERROR_INVALID_ADDRESS_SPACE
        case 718:  // CUDA_ERROR_INVALID_PC
        case 719:  // CUDA_ERROR_LAUNCH_FAILED
            return true;
        default: return false;
    }
}

}  // namespace

void check(Result result, FunctionRef<std::string()> what) {
    if (result == success) return;
    Error error(result == out_of_memory ? Code::no_memory : Code::cuda,
                fmt::format("{}: {}", what(), describe(result)));
    error = error.with_native(NativeDomain::cuda, result);
    if (is_sticky(result)) {
        throw error.with_advice(
            "this process can no longer use the device: continue on the CPU or restart the process");
    }
    throw error;
}

}  // namespace tsr::cuda
