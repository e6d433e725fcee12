// The kernels of the plug-in on one device, loaded when one is first needed. Thread-safe; calls are made with the device's
// context current. Never unloaded.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "device/cuda/driver.hpp"
#include "kernels/list.hpp"

namespace tsr::cuda {

class KernelModule {
   public:
    // `device`: its name, in messages.
    KernelModule(const Driver& functions, std::string device) : functions_(functions), device_(std::move(device)) {}

    // Throws UNSUPPORTED (there is no plug-in, or none for this device) or CUDA.
    void load();
    [[nodiscard]] Function function(kernels::KernelId kernel) {
        const Function known = known_[static_cast<size_t>(kernel)].load(std::memory_order_acquire);
        return known != nullptr ? known : find(kernel);
    }

   private:
    Function find(kernels::KernelId kernel);

    const Driver& functions_;
    const std::string device_;
    std::mutex mutex_;
    Module module_ = nullptr;  // guarded by mutex_
    std::array<std::atomic<Function>, kernels::kernel_list.size()>
        known_{};  // acquire: with what the driver wrote for it
};

}  // namespace tsr::cuda
