// A sample of an enumeration that is too long for each run of the tests. Which part is drawn follows from the seed of the run
// (TESSERA_TEST_SEED, of `./dev test` the commit's id), so that one commit tests the same everywhere, and each commit other
// points. `./dev test --long` (TESSERA_TEST_LONG) takes all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "seed.hpp"

namespace tsr::testing {

inline bool takes_all() {
    static const bool all = std::getenv("TESSERA_TEST_LONG") != nullptr;  // NOLINT(concurrency-mt-unsafe)
    return all;
}

// Takes one of `share` points of an enumeration, by the point's number, and the last one.
class Sample {
   public:
    explicit Sample(unsigned share) : share_(takes_all() ? 1 : std::max(share, 1U)), offset_(seed() % share_) {}
    [[nodiscard]] bool takes(uint64_t point, uint64_t count) const {
        return point % share_ == offset_ || point + 1 == count;
    }

   private:
    static unsigned seed() {
        static const Seed seed;
        return seed;
    }

    unsigned share_;
    unsigned offset_;
};

// `count` of `cases`, in their order.
template <class Case>
std::vector<Case> sample_of(std::vector<Case> cases, size_t count) {
    if (takes_all() || cases.size() <= count) return cases;
    static const Seed seed;
    std::mt19937 random(seed);
    std::vector<Case> taken;
    std::ranges::sample(cases, std::back_inserter(taken), static_cast<std::ptrdiff_t>(count), random);
    return taken;
}

}  // namespace tsr::testing
