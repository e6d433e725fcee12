// What libtessera_cuda.so (cuda/plugin.cc) tells the core.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tsr::kernels {

struct Plugin {
    uint64_t fingerprint;  // kernels::fingerprint of its sources
    const void* image;     // for cuModuleLoadData: the kernels for several kinds of devices
    size_t image_bytes;
    const char* devices;  // "compute capability 8.0, 9.0, 10.0 and later ones"
};
inline constexpr const char* plugin_symbol = "tessera_cuda_plugin";  // const Plugin*()

}  // namespace tsr::kernels
