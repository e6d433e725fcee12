// The seed of a random test: TESSERA_TEST_SEED, or another each time.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

namespace tsr::testing {

// Printed before anything is done with it: a test that hangs or crashes does not come to its end.
class Seed {
   public:
    Seed() {
        const char* given = std::getenv("TESSERA_TEST_SEED");  // NOLINT(concurrency-mt-unsafe): nobody sets it
        value_ = given != nullptr ? static_cast<unsigned>(std::stoul(given)) : std::random_device{}();
        std::fprintf(stderr, "TESSERA_TEST_SEED=%u does it again\n", value_);
    }
    Seed(const Seed&) = delete;
    Seed& operator=(const Seed&) = delete;

    operator unsigned() const { return value_; }  // NOLINT(google-explicit-constructor): it is a number

   private:
    unsigned value_ = 0;
};

}  // namespace tsr::testing
