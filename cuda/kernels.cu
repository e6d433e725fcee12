// The kernels of src/kernels for devices: one function for each of the list, that runs its body by thread.
#include "kernels/list.hpp"

namespace tsr::kernels {
namespace {

template <int phase, class K>
__device__ void run_phases(const K& kernel, const Thread& thread, typename K::Shared& shared) {
    kernel.template run<phase>(thread, shared);
    if constexpr (phase + 1 < K::phases) {
        __syncthreads();
        run_phases<phase + 1>(kernel, thread, shared);
    }
}

template <class K>
__device__ void run(const K& kernel) {
    const Thread thread{blockIdx.x, threadIdx.x, K::threads};
    if constexpr (requires { K::phases; }) {
        __shared__ typename K::Shared shared;
        run_phases<0>(kernel, thread, shared);
    } else {
        kernel(thread);
    }
}

}  // namespace

// __grid_constant__: the body reads its arguments where the driver has put them, without a copy for each thread.
#define TSR_GLOBAL(name, ...)                                          \
    static_assert(sizeof(__VA_ARGS__) <= most_parameter_bytes);        \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::threads) \
        tessera_##name(const __grid_constant__ __VA_ARGS__ kernel) {   \
        run(kernel);                                                   \
    }
TSR_KERNELS(TSR_GLOBAL)

}  // namespace tsr::kernels
