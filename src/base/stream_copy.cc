#include "base/stream_copy.hpp"

#include <cstdint>
#include <cstring>

#include "base/page_size.hpp"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tsr {

#ifdef __SSE2__

namespace {

constexpr size_t line = 64;
constexpr size_t pages = 4;  // at a time: more streams of memory in flight than one page's

void stream_line(std::byte* to, const std::byte* from) {
    for (size_t at = 0; at < line; at += sizeof(__m128i)) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), part);
    }
}

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, size_t size) {
    const size_t head = (line - reinterpret_cast<uintptr_t>(to) % line) % line;
    if (size < head + pages * page_size) {
        std::memcpy(to, from, size);
        return;
    }
    std::memcpy(to, from, head);
    size_t done = head;
    for (; size - done >= pages * page_size; done += pages * page_size) {
        for (size_t at = done; at < done + page_size; at += line) {
            for (size_t p = 0; p < pages; ++p) stream_line(to + at + p * page_size, from + at + p * page_size);
        }
    }
    _mm_sfence();  // orders streaming stores before later ones
    std::memcpy(to + done, from + done, size - done);
}

#else

void stream_copy(std::byte* to, const std::byte* from, size_t size) { std::memcpy(to, from, size); }

#endif

}  // namespace tsr
