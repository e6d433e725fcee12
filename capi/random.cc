// tessera/random.h: random numbers that do not depend on how a tensor is distributed.
#include "tessera/random.h"

#include "handles.hpp"
#include "tensor/layout.hpp"
#include "tensor/random.hpp"

namespace tsr::capi {

namespace {

// Calls `fill(output, part)`.
template <class Fill>
tsr_status guarded(const tsr_tensor* output, uint64_t seed, uint64_t stream, const tsr_layout* layout, int32_t rank,
                   Fill&& fill) {
    return guard([&] {
        const Tensor tensor = tensor_in(output, "output");
        RandomPart part{.seed = seed, .stream = stream, .rank = rank};
        if (layout == nullptr) return fill(tensor, part);
        const std::shared_ptr<const Layout> held = object_of(layout, "layout");
        part.layout = held.get();
        fill(tensor, part);
    });
}

}  // namespace

extern "C" {

tsr_status tsr_random_uniform(const tsr_tensor* output, uint64_t seed, uint64_t stream, double low, double high,
                              const tsr_layout* layout, int32_t rank) {
    return guarded(output, seed, stream, layout, rank,
                   [&](const Tensor& to, const RandomPart& part) { fill_uniform(to, part, low, high); });
}

tsr_status tsr_random_normal(const tsr_tensor* output, uint64_t seed, uint64_t stream, double mean, double deviation,
                             const tsr_layout* layout, int32_t rank) {
    return guarded(output, seed, stream, layout, rank,
                   [&](const Tensor& to, const RandomPart& part) { fill_normal(to, part, mean, deviation); });
}

tsr_status tsr_random_bernoulli(const tsr_tensor* output, uint64_t seed, uint64_t stream, double p,
                                const tsr_layout* layout, int32_t rank) {
    return guarded(output, seed, stream, layout, rank,
                   [&](const Tensor& to, const RandomPart& part) { fill_bernoulli(to, part, p); });
}

}  // extern "C"

}  // namespace tsr::capi
