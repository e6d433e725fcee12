// The kernels of src/kernels on the host: what stands for the plug-in's code where devices are simulated.
#pragma once

#include <cstddef>
#include <string_view>

#include "base/function_ref.hpp"
#include "device/cuda/driver.hpp"

namespace simulated_cuda {

// Where the bytes of a device's address are; null if they are not all allocated.
using BytesOf = tsr::FunctionRef<void*(const void* address, size_t bytes)>;

struct Kernel {
    std::string_view symbol;
    size_t size;  // of its arguments
    // Runs a grid on this thread, the last block and thread first. Changes the arguments. Returns an error of the driver, or 0.
    tsr::cuda::Result (*run)(void* arguments, unsigned blocks, unsigned threads, BytesOf bytes_of);
};

[[nodiscard]] const Kernel* kernel_of(std::string_view symbol);

}  // namespace simulated_cuda
