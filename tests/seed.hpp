// The seed of a random test: TESSERA_TEST_SEED, or another each time.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>

namespace tsr::testing {

// A test that fails tells its seed when it ends, on whichever thread it failed.
class Seed {
   public:
    Seed() {
        const char* given = std::getenv("TESSERA_TEST_SEED");  // NOLINT(concurrency-mt-unsafe): nobody sets it
        value_ = given != nullptr ? static_cast<unsigned>(std::stoul(given)) : std::random_device{}();
    }
    ~Seed() {
        if (!::testing::Test::HasFailure() && std::uncaught_exceptions() == 0) return;
        std::fprintf(stderr, "TESSERA_TEST_SEED=%u does it again\n", value_);
    }
    Seed(const Seed&) = delete;
    Seed& operator=(const Seed&) = delete;

    operator unsigned() const { return value_; }  // NOLINT(google-explicit-constructor): it is a number

   private:
    unsigned value_ = 0;
};

}  // namespace tsr::testing
