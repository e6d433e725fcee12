#include "simulated_cuda/kernels.hpp"

#include <algorithm>
#include <array>

#include "kernels/list.hpp"

namespace simulated_cuda {

namespace {

using namespace tsr::kernels;
using tsr::AdagradStep;
using tsr::BFloat;
using tsr::Half;
using tsr::LionStep;

constexpr tsr::cuda::Result illegal_address = 700;

template <int phase, class K>
void run_phases(const K& kernel, unsigned block, typename K::Shared& shared) {
    for (unsigned i = K::threads; i-- > 0;) kernel.template run<phase>({block, i, K::threads}, shared);
    if constexpr (phase + 1 < K::phases) run_phases<phase + 1>(kernel, block, shared);
}

template <class K>
tsr::cuda::Result run(void* arguments, unsigned blocks, unsigned threads, BytesOf bytes_of) {
    K& kernel = *static_cast<K*>(arguments);
    if (blocks != kernel.blocks() || threads != K::threads) return tsr::cuda::invalid_value;
    bool legal = true;
    kernel.memory([&](const void*& address, size_t bytes) {
        address = bytes_of(address, bytes);
        legal = legal && address != nullptr;
    });
    if (!legal) return illegal_address;
    for (unsigned block = blocks; block-- > 0;) {
        if constexpr (requires { K::phases; }) {
            typename K::Shared shared;
            run_phases<0>(kernel, block, shared);
        } else {
            for (unsigned i = K::threads; i-- > 0;) kernel({block, i, K::threads});
        }
    }
    return tsr::cuda::success;
}

#define SIMULATED_KERNEL(name, ...) Kernel{"tessera_" #name, sizeof(__VA_ARGS__), run<__VA_ARGS__>},
constexpr std::array all{TSR_KERNELS(SIMULATED_KERNEL)};
#undef SIMULATED_KERNEL

}  // namespace

const Kernel* kernel_of(std::string_view symbol) {
    const auto found = std::ranges::find(all, symbol, &Kernel::symbol);
    return found == all.end() ? nullptr : &*found;
}

}  // namespace simulated_cuda
