#include "device/cuda/kernel_module.hpp"

#include <fmt/core.h>

#include "base/error.hpp"
#include "device/cuda/plugin.hpp"

namespace tsr::cuda {

void KernelModule::load() {
    const std::lock_guard lock(mutex_);
    if (module_ != nullptr) return;
    const Result result = functions_.module_load(&module_, plugin().image);
    if (result == no_binary || result == newer_ptx) {
        throw Error(
            Code::unsupported,
            fmt::format("{}: libtessera_cuda.so has no kernels for this device and driver ({}); build it here with "
                        "./dev build --cuda, or update the NVIDIA driver",
                        device_, describe(result)))
            .with_native(NativeDomain::cuda, result);
    }
    check(result, [&] { return device_ + ": loading the kernels"; });
}

Function KernelModule::find(kernels::KernelId kernel) {
    load();
    const char* const symbol = kernels::info_of(kernel).symbol;
    const std::lock_guard lock(mutex_);
    Function found = nullptr;
    check(functions_.module_function(&found, module_, symbol),
          [&] { return fmt::format("{}: looking up the kernel {}", device_, symbol); });
    known_[static_cast<size_t>(kernel)].store(found, std::memory_order_release);
    return found;
}

}  // namespace tsr::cuda
