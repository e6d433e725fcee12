#include "device/cuda/plugin.hpp"

#include <dlfcn.h>
#include <fmt/core.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string>

#include "base/error.hpp"
#include "device/device.hpp"
#include "kernels/list.hpp"

namespace tsr::cuda {

namespace {

constexpr const char* library_name = "libtessera_cuda.so";
constexpr const char* variable = "TESSERA_CUDA_KERNELS";

Error unusable(const std::string& why) {
    return {Code::unsupported,
            fmt::format("kernels for CUDA devices are missing: {}; build them with ./dev build --cuda, "
                        "or set {} to the path of a {}",
                        why, variable, library_name)};
}

std::string path() {
    if (const char* given = std::getenv(variable); given != nullptr && *given != 0) return given;
    ::Dl_info own{};
    if (::dladdr(reinterpret_cast<const void*>(&plugin), &own) == 0 || own.dli_fname == nullptr) return library_name;
    return (std::filesystem::path(own.dli_fname).parent_path() / library_name).string();
}

const kernels::Plugin& open(const std::string& file) {
    void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw unusable(::dlerror());
    const auto tell = reinterpret_cast<const kernels::Plugin* (*)()>(::dlsym(library, kernels::plugin_symbol));
    if (tell == nullptr) throw unusable(fmt::format("{} has no {}", file, kernels::plugin_symbol));
    const kernels::Plugin& found = *tell();
    if (found.fingerprint != kernels::fingerprint) {
        throw unusable(fmt::format("{} belongs to another version of this library", file));
    }
    return found;
}

}  // namespace

const kernels::Plugin& plugin() {
    static std::mutex& mutex = *new std::mutex;
    static const kernels::Plugin* loaded = nullptr;  // guarded by mutex; a failure may be mended and tried again
    const std::lock_guard lock(mutex);
    if (loaded == nullptr) loaded = &open(path());
    return *loaded;
}

}  // namespace tsr::cuda

namespace tsr {

CudaKernels cuda_kernels() {
    const kernels::Plugin& found = cuda::plugin();
    return {cuda::path(), found.fingerprint, found.devices};
}

}  // namespace tsr
