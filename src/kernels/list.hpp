// All kernels by name: what cuda/kernels.cu compiles, the core launches and the tests' simulated driver runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/checksums.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/norms.hpp"
#include "kernels/optimizers.hpp"

// (name, type)
#define TSR_KERNELS(X)                            \
    X(adam_f32, AdamUpdate<float>)                \
    X(adam_f64, AdamUpdate<double>)               \
    X(sgd_f32, SgdUpdate<float>)                  \
    X(sgd_f64, SgdUpdate<double>)                 \
    X(convert_f16_f16, Convert<Half, Half>)       \
    X(convert_f16_bf16, Convert<Half, BFloat>)    \
    X(convert_f16_f32, Convert<Half, float>)      \
    X(convert_f16_f64, Convert<Half, double>)     \
    X(convert_bf16_f16, Convert<BFloat, Half>)    \
    X(convert_bf16_bf16, Convert<BFloat, BFloat>) \
    X(convert_bf16_f32, Convert<BFloat, float>)   \
    X(convert_bf16_f64, Convert<BFloat, double>)  \
    X(convert_f32_f16, Convert<float, Half>)      \
    X(convert_f32_bf16, Convert<float, BFloat>)   \
    X(convert_f32_f32, Convert<float, float>)     \
    X(convert_f32_f64, Convert<float, double>)    \
    X(convert_f64_f16, Convert<double, Half>)     \
    X(convert_f64_bf16, Convert<double, BFloat>)  \
    X(convert_f64_f32, Convert<double, float>)    \
    X(convert_f64_f64, Convert<double, double>)   \
    X(scale_f32, Scale<float>)                    \
    X(scale_f64, Scale<double>)                   \
    X(bound_f32, Bound<float>)                    \
    X(bound_f64, Bound<double>)                   \
    X(zero, Zero)                                 \
    X(power_f32, PowerOfChunks<float>)            \
    X(power_f64, PowerOfChunks<double>)           \
    X(power_of_parts, PowerOfParts)               \
    X(checksums, ChecksumOfChunks)

namespace tsr::kernels {

#define TSR_ID(name, ...) name,
enum class KernelId : unsigned { TSR_KERNELS(TSR_ID) };
#undef TSR_ID

template <class K>
inline constexpr KernelId id_of = [] {
    static_assert(sizeof(K) == 0, "not a kernel of TSR_KERNELS");
    return KernelId{};
}();
#define TSR_ID(name, ...) \
    template <>           \
    inline constexpr KernelId id_of<__VA_ARGS__> = KernelId::name;
TSR_KERNELS(TSR_ID)
#undef TSR_ID

// As nvcc's object and the driver know it.
struct KernelInfo {
    const char* symbol;
    size_t size;  // of its arguments
};
#define TSR_INFO(name, ...) KernelInfo{"tessera_" #name, sizeof(__VA_ARGS__)},
inline constexpr std::array kernel_list{TSR_KERNELS(TSR_INFO)};
#undef TSR_INFO

[[nodiscard]] constexpr const KernelInfo& info_of(KernelId id) { return kernel_list[static_cast<size_t>(id)]; }

// Differs where the library and the kernels were built from different lists. FNV-1a of names and sizes.
inline constexpr uint64_t fingerprint = [] {
    uint64_t hash = 14695981039346656037U;
    const auto mix = [&](uint64_t byte) { hash = (hash ^ byte) * 1099511628211U; };
    for (const KernelInfo& kernel : kernel_list) {
        for (const char c : std::string_view(kernel.symbol)) mix(static_cast<unsigned char>(c));
        mix(kernel.size & 255);
        mix(kernel.size >> 8);
    }
    return hash;
}();

}  // namespace tsr::kernels
