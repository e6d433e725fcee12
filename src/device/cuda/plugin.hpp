// The library of kernels, libtessera_cuda.so (cuda/). It is looked up when a program first needs a kernel: at the path in
// TESSERA_CUDA_KERNELS, else beside this library.
#pragma once

#include "kernels/plugin.hpp"

namespace tsr::cuda {

// Any thread. Throws UNSUPPORTED, saying what is missing and how to get it.
[[nodiscard]] const kernels::Plugin& plugin();

}  // namespace tsr::cuda
