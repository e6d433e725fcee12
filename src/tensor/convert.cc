#include "tensor/convert.hpp"

#include <cstring>

#include "base/error.hpp"
#include "tensor/convert_element.hpp"
#include "tensor/half.hpp"

namespace tsr {

namespace {

template <class From, class To>
TSR_INLINE void loop(const std::byte* __restrict from, std::byte* __restrict to, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        From value;
        std::memcpy(&value, from + i * sizeof(From), sizeof value);
        const To out = converted<To>(value);
        std::memcpy(to + i * sizeof(To), &out, sizeof out);
    }
}

template <class From, class To>
void plain_loop(const std::byte* from, std::byte* to, size_t count) {
    loop<From, To>(from, to, count);
}

#if defined(__x86_64__)
template <class From, class To>
[[gnu::target("avx2")]] void avx2_loop(const std::byte* from, std::byte* to, size_t count) {
    loop<From, To>(from, to, count);
}
template <class From, class To>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] void avx512_loop(const std::byte* from,
                                                                                               std::byte* to,
                                                                                               size_t count) {
    loop<From, To>(from, to, count);
}
#endif

template <class From, class To>
void convert(const std::byte* from, std::byte* to, size_t count, [[maybe_unused]] Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return avx512_loop<From, To>(from, to, count);
    if (vectors == Vectors::avx2) return avx2_loop<From, To>(from, to, count);
#endif
    plain_loop<From, To>(from, to, count);
}

template <class From>
void convert_to(const std::byte* from, std::byte* to, DType dtype, size_t count, Vectors vectors) {
    switch (dtype) {
        case DType::f16: return convert<From, Half>(from, to, count, vectors);
        case DType::bf16: return convert<From, BFloat>(from, to, count, vectors);
        case DType::f32: return convert<From, float>(from, to, count, vectors);
        case DType::f64: return convert<From, double>(from, to, count, vectors);
        default: throw Error(Code::internal, "cannot convert to a dtype that is not floating point");
    }
}

}  // namespace

void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count, Vectors vectors) {
    const auto n = static_cast<size_t>(count);
    if (from_dtype == to_dtype) {
        if (n > 0) std::memcpy(to, from, n * size_of(from_dtype));
        return;
    }
    switch (from_dtype) {
        case DType::f16: return convert_to<Half>(from, to, to_dtype, n, vectors);
        case DType::bf16: return convert_to<BFloat>(from, to, to_dtype, n, vectors);
        case DType::f32: return convert_to<float>(from, to, to_dtype, n, vectors);
        case DType::f64: return convert_to<double>(from, to, to_dtype, n, vectors);
        default: throw Error(Code::internal, "cannot convert from a dtype that is not floating point");
    }
}

}  // namespace tsr
