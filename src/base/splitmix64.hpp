// SplitMix64: the 64-bit generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA
// 2014), with the output mix that its authors chose. Chosen because it is six lines in any language: a trainer can
// compute the same order or the same initial weights without this library. Not for secrets.
#pragma once

#include <cstdint>

namespace tsr {

class SplitMix64 {
   public:
    explicit SplitMix64(uint64_t state) : state_(state) {}

    // The output function: a bijection of 64 bits that scatters nearby numbers.
    [[nodiscard]] static constexpr uint64_t mix(uint64_t z) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }

    uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15); }

    // Uniform in 0 .. bound - 1 without bias (bound > 0): Lemire, "Fast random integer generation in an interval"
    // (2019). The high half of a 128-bit product is the number; draws whose low half falls into the few values that
    // would make some numbers likelier are thrown away.
    uint64_t below(uint64_t bound) {
        __extension__ using Wide = unsigned __int128;
        Wide product = Wide{next()} * bound;
        if (static_cast<uint64_t>(product) < bound) {
            const uint64_t unfair = (0 - bound) % bound;
            while (static_cast<uint64_t>(product) < unfair) product = Wide{next()} * bound;
        }
        return static_cast<uint64_t>(product >> 64);
    }

   private:
    uint64_t state_;
};

}  // namespace tsr
