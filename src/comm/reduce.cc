#include "comm/reduce.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/error.hpp"
#include "tensor/half.hpp"

namespace tsr {

namespace {

// --- what each dtype is accumulated in

template <class T>
struct Element {
    using Accumulator = T;
    TSR_INLINE static T load(T value) { return value; }
    TSR_INLINE static T store(T value) { return value; }
};
template <>
struct Element<Half> {
    using Accumulator = float;
    TSR_INLINE static float load(Half value) { return widen(value); }
    TSR_INLINE static Half store(float value) { return narrow_half(value); }
};
template <>
struct Element<BFloat> {
    using Accumulator = float;
    TSR_INLINE static float load(BFloat value) { return widen(value); }
    TSR_INLINE static BFloat store(float value) { return narrow_bfloat(value); }
};

// The sum of up to 4096 64-bit integers: high * 2^32 + low, in words that vectors have.
struct WideSum {
    int64_t high;
    int64_t low;  // may be more than 32 bits until it is carried

    TSR_INLINE explicit WideSum(int64_t value) : high(value >> 32), low(value & 0xffffffff) {}
    WideSum() = default;
};

// What the sum of an average is kept in: exact for integers and any number of ranks (at most 4096), of bytes up to 128.
constexpr size_t most_bytes_averaged = 128;

template <class T>
struct Wide {
    using Type = typename Element<T>::Accumulator;
};
template <std::integral T>
struct Wide<T> {
    using Type = std::conditional_t<sizeof(T) == 1, int16_t, std::conditional_t<sizeof(T) == 8, WideSum, double>>;
};
template <class T>
using WideOf = typename Wide<T>::Type;

// --- operations on accumulators

struct Sum {
    template <class A>
    TSR_INLINE static A apply(A a, A b) {
        if constexpr (std::is_same_v<A, WideSum>) {
            a.high += b.high;
            a.low += b.low;
            return a;
        } else if constexpr (std::is_floating_point_v<A>) {
            return a + b;
        } else {
            using U = std::make_unsigned_t<A>;  // wraps
            return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
        }
    }
};
struct Prod {
    template <class A>
    TSR_INLINE static A apply(A a, A b) {
        if constexpr (std::is_floating_point_v<A>) {
            return a * b;
        } else {
            using U = std::conditional_t<(sizeof(A) < 4), uint32_t, std::make_unsigned_t<A>>;
            return static_cast<A>(static_cast<U>(a) * static_cast<U>(b));
        }
    }
};
// A NaN wins: from `a` since no comparison with it is true, from `b` by the second test.
struct Min {
    template <class A>
    TSR_INLINE static A apply(A a, A b) {
        if constexpr (std::is_floating_point_v<A>)
            return (b < a) | (b != b) ? b : a;
        else
            return b < a ? b : a;
    }
};
struct Max {
    template <class A>
    TSR_INLINE static A apply(A a, A b) {
        if constexpr (std::is_floating_point_v<A>)
            return (b > a) | (b != b) ? b : a;
        else
            return b > a ? b : a;
    }
};

// --- kernels

using Inputs = std::span<const std::byte* const>;

template <class T>
TSR_INLINE const T* typed(const std::byte* data) {
    return reinterpret_cast<const T*>(data);
}

template <class T, bool average>
using AccumulatorOf = std::conditional_t<average, WideOf<T>, typename Element<T>::Accumulator>;

// A little more than 1 / divisor. An integer of at most 51 bits times this, truncated, is the integer divided by the
// divisor, truncated: an integral quotient is not rounded below itself, and any other is further from the next integer
// than the product is off.
TSR_INLINE double reciprocal_of(size_t divisor) { return std::nextafter(1.0 / static_cast<double>(divisor), 2.0); }

// What the quotient is made of, once for all elements.
template <class T, bool average>
struct Divisor {
    explicit Divisor(size_t) {}
    template <class A>
    TSR_INLINE A of(A sum) const {
        return sum;
    }
};
template <class T>
    requires(!std::integral<T>)
struct Divisor<T, true> {
    using A = WideOf<T>;
    A ranks;
    explicit Divisor(size_t divisor) : ranks(static_cast<A>(divisor)) {}
    TSR_INLINE A of(A sum) const { return sum / ranks; }
};
template <>
struct Divisor<int32_t, true> {
    double reciprocal;
    explicit Divisor(size_t divisor) : reciprocal(reciprocal_of(divisor)) {}
    TSR_INLINE int32_t of(double sum) const { return static_cast<int32_t>(sum * reciprocal); }
};
// The same in integers: of 15 bits, divided by 2 to 2^c, with a reciprocal of 2^(15 + c).
template <std::integral T>
    requires(sizeof(T) == 1)
struct Divisor<T, true> {
    int shift;
    uint32_t reciprocal;
    explicit Divisor(size_t divisor)
        : shift(std::bit_width(divisor - 1) - 1),
          reciprocal(static_cast<uint32_t>(((uint64_t{1} << (16 + shift)) + divisor - 1) / divisor)) {}
    TSR_INLINE T of(int16_t sum) const {
        const auto sign = static_cast<int16_t>(sum >> 15);  // 0 or -1
        const auto magnitude = static_cast<uint16_t>((sum ^ sign) - sign);
        const auto high = static_cast<uint16_t>(magnitude * reciprocal >> 16);
        const auto quotient = static_cast<int16_t>(high >> shift);
        return static_cast<T>((quotient ^ sign) - sign);
    }
};
// Long division in two digits of 32 bits: each dividend has at most 44 bits.
template <>
struct Divisor<int64_t, true> {
    int64_t ranks;
    double reciprocal;
    explicit Divisor(size_t divisor) : ranks(static_cast<int64_t>(divisor)), reciprocal(reciprocal_of(divisor)) {}
    TSR_INLINE int64_t of(WideSum sum) const {
        sum.high += sum.low >> 32;
        sum.low &= 0xffffffff;
        // Of the magnitude, since the quotient is truncated towards zero.
        const int64_t sign = sum.high >> 63;  // 0 or -1
        const int64_t low = ((sum.low ^ sign) - sign) & 0xffffffff;
        const int64_t high = (sum.high ^ sign) - (sign & (low == 0 ? -1 : 0));
        const int64_t first = quotient(high);
        const int64_t second = quotient(((high - first * ranks) << 32) | low);
        const uint64_t magnitude = (static_cast<uint64_t>(first) << 32) + static_cast<uint64_t>(second);
        return static_cast<int64_t>((magnitude ^ static_cast<uint64_t>(sign)) - static_cast<uint64_t>(sign));
    }
    TSR_INLINE int64_t quotient(int64_t value) const {
        return static_cast<int64_t>(static_cast<double>(value) * reciprocal);
    }
};

template <class T, bool average, class A>
TSR_INLINE T finished(A sum, const Divisor<T, average>& divisor) {
    return Element<T>::store(static_cast<typename Element<T>::Accumulator>(divisor.of(sum)));
}

// A fixed number of inputs in one pass, without memory for the accumulators.
template <class T, class Op, bool average, size_t N>
TSR_INLINE void reduce_fixed(T* out, Inputs inputs, size_t count, size_t divisor) {
    using A = AccumulatorOf<T, average>;
    std::array<const T*, N> in{};
    for (size_t k = 0; k < N; ++k) in[k] = typed<T>(inputs[k]);
    const Divisor<T, average> by(divisor);
#pragma GCC ivdep  // `out` may be an input, but then element by element
    for (size_t i = 0; i < count; ++i) {
        A sum = static_cast<A>(Element<T>::load(in[0][i]));
#pragma GCC unroll 8
        for (size_t k = 1; k < N; ++k) sum = Op::apply(sum, static_cast<A>(Element<T>::load(in[k][i])));
        out[i] = finished<T, average>(sum, by);
    }
}

// Adds N more inputs to a block of accumulators.
template <class T, class Op, class A, size_t N>
TSR_INLINE void fold(A* sums, Inputs inputs, size_t begin, size_t count) {
    std::array<const T*, N> in{};
    for (size_t k = 0; k < N; ++k) in[k] = typed<T>(inputs[k]) + begin;
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
        A sum = sums[i];
#pragma GCC unroll 4
        for (size_t k = 0; k < N; ++k) sum = Op::apply(sum, static_cast<A>(Element<T>::load(in[k][i])));
        sums[i] = sum;
    }
}

// Any number of inputs, a block at a time, whose accumulators stay in the first-level cache.
template <class T, class Op, bool average>
TSR_INLINE void reduce_blocks(T* out, Inputs inputs, size_t count, size_t divisor) {
    using A = AccumulatorOf<T, average>;
    constexpr size_t block = 1024;
    alignas(64) std::array<A, block> sums;
    const Divisor<T, average> by(divisor);
    for (size_t begin = 0; begin < count; begin += block) {
        const size_t n = std::min(block, count - begin);
        const T* first = typed<T>(inputs[0]) + begin;
        for (size_t i = 0; i < n; ++i) sums[i] = static_cast<A>(Element<T>::load(first[i]));
        Inputs left = inputs.subspan(1);
        for (; left.size() >= 4; left = left.subspan(4)) fold<T, Op, A, 4>(sums.data(), left, begin, n);
        for (; !left.empty(); left = left.subspan(1)) fold<T, Op, A, 1>(sums.data(), left, begin, n);
        T* to = out + begin;
        for (size_t i = 0; i < n; ++i) to[i] = finished<T, average>(sums[i], by);
    }
}

template <class T, class Op, bool average>
TSR_INLINE void body(std::byte* out_bytes, Inputs inputs, size_t count, size_t divisor) {
    T* out = reinterpret_cast<T*>(out_bytes);
    switch (inputs.size()) {
        case 2: return reduce_fixed<T, Op, average, 2>(out, inputs, count, divisor);
        case 3: return reduce_fixed<T, Op, average, 3>(out, inputs, count, divisor);
        case 4: return reduce_fixed<T, Op, average, 4>(out, inputs, count, divisor);
        case 8: return reduce_fixed<T, Op, average, 8>(out, inputs, count, divisor);
        default: return reduce_blocks<T, Op, average>(out, inputs, count, divisor);
    }
}

// What most_bytes_averaged leaves out.
template <class T>
void average_of_many_bytes(std::byte* out, Inputs inputs, size_t count, size_t divisor) {
    for (size_t i = 0; i < count; ++i) {
        int sum = 0;
        for (const std::byte* input : inputs) sum += typed<T>(input)[i];
        reinterpret_cast<T*>(out)[i] = static_cast<T>(sum / static_cast<int>(divisor));
    }
}

using Kernel = void (*)(std::byte*, Inputs, size_t, size_t);

template <class T, class Op, bool average>
void plain_kernel(std::byte* out, Inputs inputs, size_t count, size_t divisor) {
    body<T, Op, average>(out, inputs, count, divisor);
}

#if defined(__x86_64__)
#define TSR_F16C [[gnu::target("avx2,f16c")]]

TSR_F16C inline __m256 load_halves(const std::byte* data, size_t i) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i * sizeof(Half))));
}

// Op::apply on eight floats at once.
template <class Op>
TSR_F16C inline __m256 apply_8(__m256 a, __m256 b) {
    if constexpr (std::is_same_v<Op, Sum>) return _mm256_add_ps(a, b);
    if constexpr (std::is_same_v<Op, Prod>) return _mm256_mul_ps(a, b);
    const __m256 better = std::is_same_v<Op, Min> ? _mm256_cmp_ps(b, a, _CMP_LT_OQ) : _mm256_cmp_ps(b, a, _CMP_GT_OQ);
    return _mm256_blendv_ps(a, b, _mm256_or_ps(better, _mm256_cmp_ps(b, b, _CMP_UNORD_Q)));
}

// f16 by the conversion instructions, which round as the plain code does.
template <class Op, bool average>
TSR_F16C void f16c_kernel(std::byte* out, Inputs inputs, size_t count, size_t divisor) {
    const __m256 ranks = _mm256_set1_ps(static_cast<float>(divisor));
    const __m256 nan = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());  // narrows to narrow_half's NaN
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 sum = load_halves(inputs[0], i);
        for (size_t k = 1; k < inputs.size(); ++k) sum = apply_8<Op>(sum, load_halves(inputs[k], i));
        if constexpr (average) sum = _mm256_div_ps(sum, ranks);
        sum = _mm256_blendv_ps(sum, nan, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * sizeof(Half)),
                         _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < count; ++i) {
        float sum = widen(typed<Half>(inputs[0])[i]);
        for (size_t k = 1; k < inputs.size(); ++k) sum = Op::apply(sum, widen(typed<Half>(inputs[k])[i]));
        reinterpret_cast<Half*>(out)[i] = finished<Half, average>(sum, Divisor<Half, average>(divisor));
    }
}

template <class T, class Op, bool average>
[[gnu::target("avx2")]] void avx2_kernel(std::byte* out, Inputs inputs, size_t count, size_t divisor) {
    body<T, Op, average>(out, inputs, count, divisor);
}

template <class T, class Op, bool average>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] void avx512_kernel(std::byte* out,
                                                                                                 Inputs inputs,
                                                                                                 size_t count,
                                                                                                 size_t divisor) {
    body<T, Op, average>(out, inputs, count, divisor);
}
#endif

template <class T, class Op, bool average = false>
Kernel kernel_for([[maybe_unused]] Vectors vectors) {
#if defined(__x86_64__)
    if constexpr (std::is_same_v<T, Half>) {
        if (vectors != Vectors::plain) return f16c_kernel<Op, average>;
    }
    // Products of bytes are slower in the widest vectors (docs/PERFORMANCE.md).
    if constexpr (sizeof(T) > 1 || !std::is_same_v<Op, Prod>) {
        if (vectors == Vectors::avx512) return avx512_kernel<T, Op, average>;
    }
    if (vectors != Vectors::plain) return avx2_kernel<T, Op, average>;
#endif
    return plain_kernel<T, Op, average>;
}

template <class T>
Kernel kernel_of(ReduceOp op, Vectors vectors) {
    switch (op) {
        case ReduceOp::sum: return kernel_for<T, Sum>(vectors);
        case ReduceOp::avg: return kernel_for<T, Sum, true>(vectors);
        case ReduceOp::min: return kernel_for<T, Min>(vectors);
        case ReduceOp::max: return kernel_for<T, Max>(vectors);
        case ReduceOp::prod: return kernel_for<T, Prod>(vectors);
        case ReduceOp::none: break;
    }
    throw Error(Code::internal, "unknown reduction");
}

Kernel kernel_of(DType dtype, ReduceOp op, Vectors vectors) {
    switch (dtype) {
        case DType::f16: return kernel_of<Half>(op, vectors);
        case DType::bf16: return kernel_of<BFloat>(op, vectors);
        case DType::f32: return kernel_of<float>(op, vectors);
        case DType::f64: return kernel_of<double>(op, vectors);
        case DType::i8: return kernel_of<int8_t>(op, vectors);
        case DType::u8: return kernel_of<uint8_t>(op, vectors);
        case DType::i32: return kernel_of<int32_t>(op, vectors);
        case DType::i64: return kernel_of<int64_t>(op, vectors);
        default: break;
    }
    throw Error(Code::internal, "this dtype cannot be reduced");
}

}  // namespace

void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, DType dtype, ReduceOp op,
            size_t divisor, Vectors vectors) {
    if (count == 0) return;
    if (inputs.size() == 1 && (op != ReduceOp::avg || divisor == 1)) {
        if (out != inputs[0]) std::memcpy(out, inputs[0], count * size_of(dtype));
        return;
    }
    if (op == ReduceOp::avg && size_of(dtype) == 1 && (inputs.size() > most_bytes_averaged || divisor == 1)) {
        return dtype == DType::i8 ? average_of_many_bytes<int8_t>(out, inputs, count, divisor)
                                  : average_of_many_bytes<uint8_t>(out, inputs, count, divisor);
    }
    kernel_of(dtype, op, vectors)(out, inputs, count, divisor);
}

}  // namespace tsr
