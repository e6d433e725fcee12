#include "pattern.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace tsr::testing {
namespace {

// A block at a time: a sanitizer then looks once at the memory of a whole block, and at each byte of it.
constexpr int64_t block = 1024;

template <class Element>
using Block = std::array<Element, static_cast<size_t>(block)>;

template <class Element>
void make(Block<Element>& elements, const Pattern& pattern, int64_t place, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        elements[static_cast<size_t>(i)] = static_cast<Element>(pattern.at(place + i));
    }
}

// Calls `visit(elements, first, count)` with each block of them, as elements of that many bytes.
template <class Visit>
void for_blocks(size_t size, int64_t count, Visit&& visit) {
    const auto of = [&]<class Element>(Element) {
        Block<Element> elements;
        for (int64_t first = 0; first < count; first += block) visit(elements, first, std::min(block, count - first));
    };
    switch (size) {
        case 1: return of(uint8_t{});
        case 2: return of(uint16_t{});
        case 4: return of(uint32_t{});
        case 8: return of(uint64_t{});
        default: throw std::logic_error("no element has so many bytes: " + std::to_string(size));
    }
}

}  // namespace

Pattern::Pattern(const std::string& name, uint64_t salt) : of_name_(std::hash<std::string>{}(name)), salt_(salt) {}

uint64_t Pattern::at(int64_t place) const {
    uint64_t x = of_name_ + static_cast<uint64_t>(place) * 0x9e3779b97f4a7c15u;
    x ^= x >> 31;
    x *= 0xbf58476d1ce4e5b9u;
    return (x ^ x >> 29) + salt_;
}

void Pattern::write(std::byte* to, size_t size, int64_t place, int64_t count) const {
    for_blocks(size, count, [&](auto& elements, int64_t first, int64_t n) {
        make(elements, *this, place + first, n);
        std::memcpy(to + static_cast<size_t>(first) * size, elements.data(), static_cast<size_t>(n) * size);
    });
}

int64_t Pattern::differences(const std::byte* from, size_t size, int64_t place, int64_t count) const {
    int64_t found = 0;
    for_blocks(size, count, [&](auto& elements, int64_t first, int64_t n) {
        make(elements, *this, place + first, n);
        const std::byte* begin = from + static_cast<size_t>(first) * size;
        if (std::memcmp(begin, elements.data(), static_cast<size_t>(n) * size) == 0) return;
        for (int64_t i = 0; i < n; ++i) {
            const size_t at = static_cast<size_t>(i) * size;
            found += std::memcmp(begin + at, &elements[static_cast<size_t>(i)], size) != 0 ? 1 : 0;
        }
    });
    return found;
}

}  // namespace tsr::testing
