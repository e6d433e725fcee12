// All kernels by name: what cuda/kernels.cu compiles, the core launches and the tests' simulated driver runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/checksums.hpp"
#include "kernels/cross_entropy.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/embedding.hpp"
#include "kernels/norms.hpp"
#include "kernels/optimizers.hpp"
#include "kernels/plugin.hpp"
#include "kernels/rows.hpp"

// (name, type)
#define TSR_KERNELS(X)                                           \
    X(adam_f32, AdamUpdate<float>)                               \
    X(adam_f64, AdamUpdate<double>)                              \
    X(sgd_f32, SgdUpdate<float>)                                 \
    X(sgd_f64, SgdUpdate<double>)                                \
    X(adagrad_f32, OneMomentUpdate<float, AdagradStep<float>>)   \
    X(adagrad_f64, OneMomentUpdate<double, AdagradStep<double>>) \
    X(lion_f32, OneMomentUpdate<float, LionStep<float>>)         \
    X(lion_f64, OneMomentUpdate<double, LionStep<double>>)       \
    X(convert_f16_f16, Convert<Half, Half>)                      \
    X(convert_f16_bf16, Convert<Half, BFloat>)                   \
    X(convert_f16_f32, Convert<Half, float>)                     \
    X(convert_f16_f64, Convert<Half, double>)                    \
    X(convert_bf16_f16, Convert<BFloat, Half>)                   \
    X(convert_bf16_bf16, Convert<BFloat, BFloat>)                \
    X(convert_bf16_f32, Convert<BFloat, float>)                  \
    X(convert_bf16_f64, Convert<BFloat, double>)                 \
    X(convert_f32_f16, Convert<float, Half>)                     \
    X(convert_f32_bf16, Convert<float, BFloat>)                  \
    X(convert_f32_f32, Convert<float, float>)                    \
    X(convert_f32_f64, Convert<float, double>)                   \
    X(convert_f64_f16, Convert<double, Half>)                    \
    X(convert_f64_bf16, Convert<double, BFloat>)                 \
    X(convert_f64_f32, Convert<double, float>)                   \
    X(convert_f64_f64, Convert<double, double>)                  \
    X(scale_f32, Scale<float>)                                   \
    X(scale_f64, Scale<double>)                                  \
    X(bound_f32, Bound<float>)                                   \
    X(bound_f64, Bound<double>)                                  \
    X(zero, Zero)                                                \
    X(power_f32, PowerOfChunks<float>)                           \
    X(power_f64, PowerOfChunks<double>)                          \
    X(power_of_parts, PowerOfParts)                              \
    X(checksums, ChecksumOfChunks)                               \
    X(add_row_f16, AddRow<Half>)                                 \
    X(add_row_bf16, AddRow<BFloat>)                              \
    X(add_row_f32, AddRow<float>)                                \
    X(add_row_f64, AddRow<double>)                               \
    X(look_up_2, LookUp<uint16_t>)                               \
    X(look_up_4, LookUp<uint32_t>)                               \
    X(look_up_8, LookUp<uint64_t>)                               \
    X(add_words_f16, AddWords<Half>)                             \
    X(add_words_bf16, AddWords<BFloat>)                          \
    X(add_words_f32, AddWords<float>)                            \
    X(add_words_f64, AddWords<double>)                           \
    X(largest_logits_f16, LargestLogits<Half>)                   \
    X(largest_logits_bf16, LargestLogits<BFloat>)                \
    X(largest_logits_f32, LargestLogits<float>)                  \
    X(largest_logits_f64, LargestLogits<double>)                 \
    X(sums_of_logits_f16, SumsOfLogits<Half>)                    \
    X(sums_of_logits_bf16, SumsOfLogits<BFloat>)                 \
    X(sums_of_logits_f32, SumsOfLogits<float>)                   \
    X(sums_of_logits_f64, SumsOfLogits<double>)                  \
    X(sums_of_weights, SumsOfWeights)                            \
    X(loss_of_rows_f16, LossOfRows<Half>)                        \
    X(loss_of_rows_bf16, LossOfRows<BFloat>)                     \
    X(loss_of_rows_f32, LossOfRows<float>)                       \
    X(loss_of_rows_f64, LossOfRows<double>)                      \
    X(sum_of_losses_f32, SumOfLosses<float>)                     \
    X(sum_of_losses_f64, SumOfLosses<double>)

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

// Differs where the library and the kernels were built from different lists, or lists of different forms. FNV-1a of names and
// sizes.
inline constexpr uint64_t fingerprint = [] {
    uint64_t hash = 14695981039346656037U;
    const auto mix = [&](uint64_t byte) { hash = (hash ^ byte) * 1099511628211U; };
    mix(sizeof(Plugin));
    for (const KernelInfo& kernel : kernel_list) {
        for (const char c : std::string_view(kernel.symbol)) mix(static_cast<unsigned char>(c));
        mix(kernel.size & 255);
        mix(kernel.size >> 8);
    }
    return hash;
}();

}  // namespace tsr::kernels
