// Which vector instructions the kernels may use, detected at run time: one library runs on every processor of an
// architecture.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/host_device.hpp"

// For functions called by kernels: a kernel is compiled once per instruction set, together with everything it calls.
#define TSR_INLINE [[gnu::always_inline]] TSR_HD inline

namespace tsr {

// avx2: includes the f16 conversions (F16C), which every such processor has. avx512: includes the instructions for
// bytes, words and 64-bit products (BW, DQ, VL), as in processors since 2017.
enum class Vectors { plain, avx2, avx512 };

// The widest of this processor.
[[nodiscard]] inline Vectors widest_vectors() {
#if defined(__x86_64__)
    static const Vectors widest = [] {
        // __builtin_cpu_supports knows "f16c" with GCC alone.
        unsigned eax = 0;
        unsigned ebx = 0;
        unsigned ecx = 0;
        unsigned edx = 0;
        const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
        if (__builtin_cpu_supports("avx2") == 0 || !has_f16c) return Vectors::plain;
        const bool wide = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                          __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
        return wide ? Vectors::avx512 : Vectors::avx2;
    }();
    return widest;
#else
    return Vectors::plain;
#endif
}

}  // namespace tsr
