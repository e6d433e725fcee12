// Ranks as threads: runs a function once per rank, all over one in-process store, and hands back what each threw.
#pragma once

#include <atomic>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "patience.hpp"
#include "soon.hpp"
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

// The host that a rank pretends to be on. "even": the first half of the ranks on one, the others on another; "uneven": the
// first rank on one, of more than three the last on another, the rest between them on a third; "round-robin": the even
// ranks on one, the odd on another; "": all on this.
inline std::string pretended_host(std::string_view placement, int rank, int world_size) {
    if (placement.empty()) return {};
    if (placement == "even") return rank < (world_size + 1) / 2 ? "east" : "west";
    if (placement == "round-robin") return rank % 2 == 0 ? "east" : "west";
    if (placement == "uneven") return rank == 0 ? "east" : rank > 2 && rank == world_size - 1 ? "south" : "west";
    throw std::logic_error("no such placement: " + std::string(placement));
}

// Where the tests place their ranks: TESSERA_TEST_HOSTS, or all on one host.
inline std::string test_placement() {
    const char* placement = std::getenv("TESSERA_TEST_HOSTS");  // NOLINT(concurrency-mt-unsafe): nobody sets it
    return placement != nullptr ? placement : "";
}

// Communicator::create for a rank that is a thread of a test.
inline std::shared_ptr<Communicator> join_job(const std::shared_ptr<Store>& store, int rank, int world_size,
                                              CommOptions options, const Departures& departures = {}) {
    if (options.host_id.empty()) options.host_id = pretended_host(test_placement(), rank, world_size);
    return Communicator::create(store, rank, world_size, options, departures);
}

// The same with a communicator each.
inline Outcomes run_ranks(int world_size, const CommOptions& options,
                          const std::function<void(Communicator& comm)>& body) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    return run_threads(world_size, [&](int rank) {
        const auto comm = join_job(store, rank, world_size, options);
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
    options.timeout = patience(milliseconds{20000});
    options.backend = backend;
    return options;
}

// Where all ranks see what the others do.
inline CommOptions on_one_host() {
    CommOptions options = test_options("shm");
    options.host_id = "here";
    return options;
}

// Throws the errors of all ranks, if there are any, so that a test that expects success shows them: the first may be what
// another's led to.
inline void expect_all_well(const Outcomes& outcomes) {
    std::string errors;
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
        if (outcomes[rank]) errors += "\nrank " + std::to_string(rank) + ": " + outcomes[rank]->what();
    }
    if (!errors.empty()) throw std::runtime_error(errors);
}

// While it lives, the calling thread's interrupt callback makes `call`, once, and lets the waiting call go on. `made`
// becomes true then, so that a peer knows that it may come.
class CallInInterrupt {
   public:
    CallInInterrupt(std::function<void()> call, std::atomic<bool>& made) : call_(std::move(call)), made_(made) {
        set_interrupt([](void* self) { return static_cast<CallInInterrupt*>(self)->poll(); }, this);
    }
    ~CallInInterrupt() { set_interrupt(nullptr, nullptr); }
    CallInInterrupt(const CallInInterrupt&) = delete;
    CallInInterrupt& operator=(const CallInInterrupt&) = delete;

    // What the call threw.
    [[nodiscard]] const std::optional<Error>& error() const { return error_; }

   private:
    int32_t poll() {
        const auto call = std::exchange(call_, nullptr);
        if (!call) return 0;
        try {
            call();
        } catch (const Error& error) {
            error_ = error;
        }
        made_ = true;
        return 0;
    }

    std::function<void()> call_;
    std::atomic<bool>& made_;
    std::optional<Error> error_;
};

// For a peer: returns when the callback's call was made.
inline void await_call(const std::atomic<bool>& made) {
    wait_until([&] { return made.load(); }, soon(), "the interrupt callback's call");
}

}  // namespace tsr::testing
