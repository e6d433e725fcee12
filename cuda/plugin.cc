// libtessera_cuda.so: carries what nvcc made of kernels.cu as data, so that it needs neither the driver nor the CUDA runtime.
#include "kernels/plugin.hpp"

#include "kernels/list.hpp"

asm(".section .rodata, \"a\"\n"
    ".balign 64\n"
    "tessera_cuda_image:\n"
    ".incbin \"" TESSERA_CUDA_IMAGE
    "\"\n"
    "tessera_cuda_image_end:\n"
    ".byte 0\n"
    ".previous\n");

extern "C" {
extern const char tessera_cuda_image[] __attribute__((visibility("hidden")));
extern const char tessera_cuda_image_end[] __attribute__((visibility("hidden")));

__attribute__((visibility("default"))) const tsr::kernels::Plugin* tessera_cuda_plugin() {
    static const tsr::kernels::Plugin plugin{tsr::kernels::fingerprint, tessera_cuda_image,
                                             static_cast<size_t>(tessera_cuda_image_end - tessera_cuda_image),
                                             TESSERA_CUDA_DEVICES};
    return &plugin;
}
}
