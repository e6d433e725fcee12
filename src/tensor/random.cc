#include "tensor/random.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "base/error.hpp"
#include "base/function_ref.hpp"
#include "tensor/half.hpp"

namespace tsr {

namespace {

// ---------------------------------------------------------------- 64 bits per element

struct Block {
    uint32_t w0, w1, w2, w3;
};

TSR_INLINE Block philox(Block in, uint32_t key0, uint32_t key1) {
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{in.w0} * 0xd2511f53;
        const uint64_t b = uint64_t{in.w2} * 0xcd9e8d57;
        in = {static_cast<uint32_t>(b >> 32) ^ in.w1 ^ key0, static_cast<uint32_t>(b),
              static_cast<uint32_t>(a >> 32) ^ in.w3 ^ key1, static_cast<uint32_t>(a)};
        key0 += 0x9e3779b9;
        key1 += 0xbb67ae85;
    }
    return in;
}

constexpr uint32_t low_half(uint64_t value) { return static_cast<uint32_t>(value); }
constexpr uint32_t high_half(uint64_t value) { return static_cast<uint32_t>(value >> 32); }

// The bits of the elements [2 * first, 2 * (first + blocks)).
TSR_INLINE void blocks_loop(uint64_t* __restrict out, size_t blocks, uint64_t first, uint64_t seed, uint64_t stream) {
    for (size_t i = 0; i < blocks; ++i) {
        const uint64_t number = first + i;
        const Block block = philox({low_half(number), high_half(number), low_half(stream), high_half(stream)},
                                   low_half(seed), high_half(seed));
        out[2 * i] = uint64_t{block.w1} << 32 | block.w0;
        out[2 * i + 1] = uint64_t{block.w3} << 32 | block.w2;
    }
}

// ---------------------------------------------------------------- arithmetic, the same on every machine

// 53 bits as a number in [0, 1). The conversion by parts is exact, and has vector instructions everywhere.
TSR_INLINE double unit_of(uint64_t bits) {
    const uint64_t upper = bits >> 32;
    const uint64_t lower = bits >> 11 & 0x1fffff;
    const uint64_t two_52 = std::bit_cast<uint64_t>(0x1p52);
    const double high = std::bit_cast<double>(two_52 | upper) - 0x1p52;
    const double low = std::bit_cast<double>(two_52 | lower) - 0x1p52;
    return high * 0x1p-32 + low * 0x1p-53;
}

// The probability of the tail beyond the element's normal number: 52 bits, in the middle of each step, so never 0 and at
// most 0.5 - 2^-54, and exact. The number's sign is another bit.
TSR_INLINE double tail_of(uint64_t bits) {
    const double whole = std::bit_cast<double>(std::bit_cast<uint64_t>(0x1p52) | bits >> 12) - 0x1p52;
    return (whole + 0.5) * 0x1p-53;
}

// The natural logarithm of a normal number above 0, to about 2 units in the last place: that of the C library has other
// bits on other systems. With s = (m - 1) / (m + 1), log m = 2 (s + s^3 / 3 + s^5 / 5 + ...); here |s| < 0.172.
double log_of(double value) {
    uint64_t bits = std::bit_cast<uint64_t>(value);
    int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffff) | std::bit_cast<uint64_t>(1.0);
    double mantissa = std::bit_cast<double>(bits);
    if (mantissa > 1.4142135623730951) {
        mantissa *= 0.5;
        ++exponent;
    }
    const double s = (mantissa - 1) / (mantissa + 1);
    const double square = s * s;
    double sum = 0;
    for (int k = 23; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
    return static_cast<double>(exponent) * 0.6931471805599453 + 2 * s * sum;
}

// AS 241, PPND16: quotients of polynomials, highest powers first.
constexpr std::array<double, 8> central_over{2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4,
                                             4.5921953931549871457e4, 1.3731693765509461125e4, 1.9715909503065514427e3,
                                             1.3314166789178437745e2, 3.3871328727963666080e0};
constexpr std::array<double, 8> central_under{
    5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
    5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0};
constexpr std::array<double, 8> tail_over{
    7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
    3.64784832476320460504e0,  5.76949722146069140550e0,  4.63033784615654529590e0,  1.42343711074968357734e0};
constexpr std::array<double, 8> tail_under{
    1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
    6.89767334985100004550e-1, 1.67638483018380384940e0,  2.05319162663775882187e0,  1.0};
constexpr std::array<double, 8> far_over{
    2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
    2.96560571828504891230e-1, 1.78482653991729133580e0,  5.46378491116411436990e0,  6.65790464350110377720e0};
constexpr std::array<double, 8> far_under{
    2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
    1.48753612908506148525e-2,  1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0};

TSR_INLINE double polynomial(const std::array<double, 8>& c, double x) {
    double value = c[0];
#pragma GCC unroll 7
    for (size_t i = 1; i < 8; ++i) value = value * x + c[i];
    return value;
}

constexpr double central = 0.425;  // the middle 85 % of all numbers

TSR_INLINE double central_quantile(double from_middle) {
    const double r = 0.180625 - from_middle * from_middle;
    return polynomial(central_over, r) * from_middle / polynomial(central_under, r);
}

double tail_quantile(double probability) {
    const double r = std::sqrt(-log_of(probability));
    if (r <= 5) return polynomial(tail_over, r - 1.6) / polynomial(tail_under, r - 1.6);
    return polynomial(far_over, r - 5) / polynomial(far_under, r - 5);
}

// ---------------------------------------------------------------- dtypes

// To f32 so that rounding once more, to f16 or bf16, gives what rounding once would: towards zero, and odd if inexact.
TSR_INLINE float to_odd(double value) {
    const auto nearest = static_cast<float>(value);
    const double back = nearest;
    auto bits = std::bit_cast<uint32_t>(nearest);
    bits -= std::fabs(back) > std::fabs(value) ? 1 : 0;
    return std::bit_cast<float>(bits | (back != value ? 1 : 0));
}

template <class T>
TSR_INLINE T rounded(double value) {
    if constexpr (std::is_same_v<T, Half>) return narrow_half(to_odd(value));
    if constexpr (std::is_same_v<T, BFloat>) return narrow_bfloat(to_odd(value));
    if constexpr (std::is_arithmetic_v<T>) return static_cast<T>(value);
}

double exact(Half value) { return widen(value); }
double exact(BFloat value) { return widen(value); }
double exact(float value) { return value; }
double exact(double value) { return value; }

// The next number above or below a finite one that is not the last.
template <class T>
T next(T value, bool above) {
    if constexpr (std::is_arithmetic_v<T>) {
        const T infinity = std::numeric_limits<T>::infinity();
        return std::nextafter(value, above ? infinity : -infinity);
    } else {
        const int magnitude = value.bits & 0x7fff;
        int place = (value.bits & 0x8000) != 0 ? -magnitude : magnitude;
        place += above ? 1 : -1;
        return {static_cast<uint16_t>(place < 0 ? 0x8000 - place : place)};
    }
}

template <class T>
double largest() {
    if constexpr (std::is_same_v<T, Half>) return 65504;
    if constexpr (std::is_same_v<T, BFloat>) return 0x1.fep127;
    if constexpr (std::is_arithmetic_v<T>) return std::numeric_limits<T>::max();
}

// ---------------------------------------------------------------- distributions

// A batch of numbers from their bits: a loop without branches, then, for the normal distribution, the tails one by one.
constexpr size_t batch = 1024;

struct Uniform {
    double low;
    double width;
    double least;  // of the dtype in the range
    double most;

    template <class T>
    TSR_INLINE void operator()(const uint64_t* __restrict bits, T* __restrict out, size_t n) const {
        const Uniform c = *this;  // a local copy: stores cannot change it
        for (size_t i = 0; i < n; ++i) {
            const double value = c.low + unit_of(bits[i]) * c.width;
            const double raised = value < c.least ? c.least : value;
            out[i] = rounded<T>(raised > c.most ? c.most : raised);
        }
    }
};

struct Normal {
    double mean;
    double deviation;

    template <class T>
    TSR_INLINE void operator()(const uint64_t* __restrict bits, T* __restrict out, size_t n) const {
        const Normal c = *this;
        double numbers[batch];
        uint16_t tails[batch + 1];
        size_t in_tails = 0;
        for (size_t i = 0; i < n; ++i) numbers[i] = central_quantile(0.5 - tail_of(bits[i]));
        for (size_t i = 0; i < n; ++i) {
            tails[in_tails] = static_cast<uint16_t>(i);
            in_tails += 0.5 - tail_of(bits[i]) > central ? 1 : 0;
        }
        for (size_t i = 0; i < in_tails; ++i) numbers[tails[i]] = tail_quantile(tail_of(bits[tails[i]]));
        for (size_t i = 0; i < n; ++i) {
            const double number = std::bit_cast<double>(std::bit_cast<uint64_t>(numbers[i]) ^ bits[i] << 63);
            out[i] = rounded<T>(c.mean + c.deviation * number);
        }
    }
};

struct Bernoulli {
    double p;

    template <class T>
    TSR_INLINE void operator()(const uint64_t* __restrict bits, T* __restrict out, size_t n) const {
        const double limit = p;
        const T one = rounded<T>(1);
        const T zero = rounded<T>(0);
        for (size_t i = 0; i < n; ++i) out[i] = unit_of(bits[i]) < limit ? one : zero;
    }
};

// ---------------------------------------------------------------- one function per instruction set

void blocks_plain(uint64_t* out, size_t blocks, uint64_t first, uint64_t seed, uint64_t stream) {
    blocks_loop(out, blocks, first, seed, stream);
}
template <class T, class Distribution>
void numbers_plain(const uint64_t* bits, T* out, size_t n, const Distribution& distribution) {
    distribution(bits, out, n);
}

#if defined(__x86_64__)
#define TSR_AVX2 [[gnu::target("avx2")]]
#define TSR_AVX512 [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]]
TSR_AVX2 void blocks_avx2(uint64_t* out, size_t blocks, uint64_t first, uint64_t seed, uint64_t stream) {
    blocks_loop(out, blocks, first, seed, stream);
}
TSR_AVX512 void blocks_avx512(uint64_t* out, size_t blocks, uint64_t first, uint64_t seed, uint64_t stream) {
    blocks_loop(out, blocks, first, seed, stream);
}
template <class T, class Distribution>
TSR_AVX2 void numbers_avx2(const uint64_t* bits, T* out, size_t n, const Distribution& distribution) {
    distribution(bits, out, n);
}
template <class T, class Distribution>
TSR_AVX512 void numbers_avx512(const uint64_t* bits, T* out, size_t n, const Distribution& distribution) {
    distribution(bits, out, n);
}
#endif

void blocks(uint64_t* out, size_t count, uint64_t first, const RandomPart& part) {
#if defined(__x86_64__)
    if (part.vectors == Vectors::avx512) return blocks_avx512(out, count, first, part.seed, part.stream);
    if (part.vectors == Vectors::avx2) return blocks_avx2(out, count, first, part.seed, part.stream);
#endif
    blocks_plain(out, count, first, part.seed, part.stream);
}

template <class T, class Distribution>
void numbers(const uint64_t* bits, T* out, size_t n, const Distribution& distribution,
             [[maybe_unused]] Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return numbers_avx512(bits, out, n, distribution);
    if (vectors == Vectors::avx2) return numbers_avx2(bits, out, n, distribution);
#endif
    numbers_plain(bits, out, n, distribution);
}

// ---------------------------------------------------------------- parts of tensors

// Calls `visit` with the elements [begin, begin + count) of the whole tensor that are each contiguous run of the box.
void for_each_run(const Box& box, const Dims& shape, FunctionRef<void(int64_t begin, int64_t count)> visit) {
    if (box.empty()) return;
    int outer = shape.ndim();  // the dimensions before this one count the runs
    int64_t run = 1;
    while (outer > 0) {
        --outer;
        run *= box.sizes[outer];
        if (box.sizes[outer] != shape[outer]) break;
    }
    Dims index = box.offsets;
    while (true) {
        int64_t begin = 0;
        for (int d = 0; d < shape.ndim(); ++d) begin = begin * shape[d] + index[d];
        visit(begin, run);
        int d = outer - 1;
        for (; d >= 0; --d) {
            if (++index[d] < box.offsets[d] + box.sizes[d]) break;
            index[d] = box.offsets[d];
        }
        if (d < 0) return;
    }
}

// The boxes joined along dimension 0, where that is a tensor; the number of elements otherwise.
Dims joined(const std::vector<Box>& boxes, const Dims& whole) {
    int64_t elements = 0;
    for (const Box& box : boxes) elements += box.numel();
    Dims shape = boxes.empty() ? whole : boxes.front().sizes;
    if (boxes.size() == 1) return shape;
    if (shape.ndim() == 0) return Dims{elements};
    shape[0] = 0;
    for (const Box& box : boxes) {
        for (int d = 1; d < shape.ndim(); ++d) {
            if (box.sizes[d] != shape[d]) return Dims{elements};
        }
        shape[0] += box.sizes[0];
    }
    return shape;
}

std::vector<Box> boxes_for(const Tensor& output, const RandomPart& part) {
    if (part.layout == nullptr) return {Box::whole(output.shape)};
    std::vector<Box> boxes = part.layout->boxes_of(part.rank);
    const Dims shape = joined(boxes, part.layout->shape());
    const Dims flat{shape.product()};
    if (output.shape == shape || output.shape == flat || (boxes.empty() && output.numel() == 0)) return boxes;
    throw Error(
        Code::invalid_argument,
        fmt::format("output has shape {}, but rank {} holds {} elements of the tensor of shape {}: output needs "
                    "shape {}{}",
                    output.shape.str(), part.rank, shape.product(), part.layout->shape().str(), shape.str(),
                    shape == flat ? "" : fmt::format(" or {}", flat.str())));
}

// The memory need not be aligned: a batch goes through memory of its own.
template <class T, class Distribution>
void fill(const Tensor& output, const std::vector<Box>& boxes, const RandomPart& part,
          const Distribution& distribution) {
    const Dims& whole = part.layout == nullptr ? output.shape : part.layout->shape();
    alignas(64) uint64_t bits[batch + 2];
    alignas(64) T values[batch];
    size_t filled = 0;
    std::byte* to = output.data;
    const auto flush = [&] {
        if (filled == 0) return;
        numbers(bits, values, filled, distribution, part.vectors);
        std::memcpy(to, values, filled * sizeof(T));
        to += filled * sizeof(T);
        filled = 0;
    };
    for (const Box& box : boxes) {
        for_each_run(box, whole, [&](int64_t first, int64_t count) {
            auto begin = static_cast<uint64_t>(first);
            const uint64_t end = begin + static_cast<uint64_t>(count);
            while (begin < end) {
                if (filled == batch) flush();
                const auto n = static_cast<size_t>(std::min<uint64_t>(end - begin, batch - filled));
                if (begin % 2 != 0) {  // the second half of a block
                    uint64_t two[2];
                    blocks_plain(two, 1, begin / 2, part.seed, part.stream);
                    bits[filled++] = two[1];
                    ++begin;
                    continue;
                }
                blocks(bits + filled, (n + 1) / 2, begin / 2, part);  // may write one more, which has its place
                filled += n;
                begin += n;
            }
        });
    }
    flush();
}

void check_cpu(const Tensor& output) {
    if (output.device.type == DeviceType::cpu) return;
    throw Error(Code::unsupported, "output is not on the CPU; random numbers are made there");
}

void check_finite(double value, const char* name, double limit, DType dtype) {
    if (std::fabs(value) <= limit) return;  // false for NaN
    if (!std::isfinite(value)) {
        throw Error(Code::invalid_argument, fmt::format("{} is {}; it must be a finite number", name, value));
    }
    throw Error(Code::invalid_argument,
                fmt::format("{} is {}; {} has numbers up to {}", name, value, name_of(dtype), limit));
}

// Calls `make` with a value of the dtype's type.
template <class Make>
void with_float(const Tensor& output, Make&& make) {
    check_cpu(output);
    switch (output.dtype) {
        case DType::f16: return make(Half{});
        case DType::bf16: return make(BFloat{});
        case DType::f32: return make(float{});
        case DType::f64: return make(double{});
        default:
            throw Error(
                Code::invalid_argument,
                fmt::format("output has dtype {}; such numbers are f16, bf16, f32 or f64", name_of(output.dtype)));
    }
}

template <class T>
Uniform uniform_of(double low, double high, DType dtype) {
    check_finite(low, "low", largest<T>(), dtype);
    check_finite(high, "high", largest<T>(), dtype);
    if (low > high) {
        throw Error(Code::invalid_argument,
                    fmt::format("low is {} and high is {}; low must not exceed high", low, high));
    }
    if (low == high) {
        const double only = exact(rounded<T>(low));
        return {low, 0, only, only};
    }
    if (!std::isfinite(high - low)) {
        throw Error(Code::invalid_argument,
                    fmt::format("low is {} and high is {}; their difference exceeds an f64", low, high));
    }
    T least = rounded<T>(low);
    if (exact(least) < low) least = next(least, true);
    T most = rounded<T>(high);
    if (exact(most) >= high) most = next(most, false);
    if (exact(least) > exact(most)) {
        throw Error(Code::invalid_argument,
                    fmt::format("low is {} and high is {}; {} has no number from low to below high", low, high,
                                name_of(dtype)));
    }
    return {low, high - low, exact(least), exact(most)};
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    const Block out = philox({counter[0], counter[1], counter[2], counter[3]}, key[0], key[1]);
    return {out.w0, out.w1, out.w2, out.w3};
}

double upper_normal_quantile(double k) {
    const double from_middle = 0.5 - k;
    return from_middle > central ? tail_quantile(k) : central_quantile(from_middle);
}

void fill_uniform(const Tensor& output, const RandomPart& part, double low, double high) {
    with_float(output, [&]<class T>(T) {
        const Uniform uniform = uniform_of<T>(low, high, output.dtype);
        fill<T>(output, boxes_for(output, part), part, uniform);
    });
}

void fill_normal(const Tensor& output, const RandomPart& part, double mean, double deviation) {
    with_float(output, [&]<class T>(T) {
        check_finite(mean, "mean", largest<T>(), output.dtype);
        check_finite(deviation, "deviation", largest<T>(), output.dtype);
        if (deviation < 0) {
            throw Error(Code::invalid_argument, fmt::format("deviation is {}; it must not be negative", deviation));
        }
        fill<T>(output, boxes_for(output, part), part, Normal{mean, deviation});
    });
}

void fill_bernoulli(const Tensor& output, const RandomPart& part, double p) {
    check_cpu(output);
    if (!(p >= 0 && p <= 1)) {
        throw Error(Code::invalid_argument, fmt::format("p is {}; it is a probability, from 0 to 1", p));
    }
    const auto make = [&]<class T>(T) { fill<T>(output, boxes_for(output, part), part, Bernoulli{p}); };
    switch (output.dtype) {
        case DType::f16: return make(Half{});
        case DType::bf16: return make(BFloat{});
        case DType::f32: return make(float{});
        case DType::f64: return make(double{});
        case DType::i8:
        case DType::u8:
        case DType::boolean: return make(uint8_t{});
        case DType::i16:
        case DType::u16: return make(uint16_t{});
        case DType::i32:
        case DType::u32: return make(uint32_t{});
        case DType::i64:
        case DType::u64: return make(uint64_t{});
        default:
            throw Error(
                Code::invalid_argument,
                fmt::format("output has dtype {}; 0 and 1 are written to f16, bf16, f32, f64, integers and bool",
                            name_of(output.dtype)));
    }
}

}  // namespace tsr
