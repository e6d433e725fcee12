// Ranks as threads: runs a function once per rank, all over one in-process store, and hands back what each threw.
#pragma once

#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "store/store.hpp"

namespace tsr::testing {

// One entry a rank: the error that its body ended with, if any.
using Outcomes = std::vector<std::optional<Error>>;

inline Outcomes run_threads(int world_size, const std::function<void(int rank)>& body) {
    Outcomes outcomes(static_cast<size_t>(world_size));
    std::vector<std::thread> threads;
    threads.reserve(outcomes.size());
    for (int rank = 0; rank < world_size; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                body(rank);
            } catch (...) {
                outcomes[static_cast<size_t>(rank)] = current_error();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    return outcomes;
}

// The same with a communicator each.
inline Outcomes run_ranks(int world_size, const CommOptions& options,
                          const std::function<void(Communicator& comm)>& body) {
    const auto store = make_memory_store(milliseconds{30000});
    return run_threads(world_size, [&](int rank) {
        const auto comm = Communicator::create(store, rank, world_size, options);
        body(*comm);
    });
}

// The transport that the tests run over: TESSERA_TEST_BACKEND, or auto. Some test programs are run again over gloo.
inline const char* test_backend() {
    const char* backend = std::getenv("TESSERA_TEST_BACKEND");  // NOLINT(concurrency-mt-unsafe): nobody sets it
    return backend != nullptr ? backend : "auto";
}

inline CommOptions test_options(const char* backend = test_backend()) {
    CommOptions options;
    options.timeout = milliseconds{20000};
    options.backend = backend;
    return options;
}

// Rethrows the first error of any rank, so that a test that expects success shows it.
inline void expect_all_well(const Outcomes& outcomes) {
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
        if (outcomes[rank]) {
            throw std::runtime_error("rank " + std::to_string(rank) + ": " + outcomes[rank]->what());
        }
    }
}

}  // namespace tsr::testing
