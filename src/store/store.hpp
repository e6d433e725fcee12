// The key-value store through which the ranks of a job find each other: small values, atomic operations, deadlines.
// Implementations: tcp_store (client of server.hpp), file_store, memory_store. All methods are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.hpp"

namespace tsr {

struct StoreOptions {
    milliseconds timeout{60000};
    bool insecure = false;
    std::string token;  // 64 hexadecimal digits; empty: found as tessera/store.h describes
    std::string job_id;
    uint64_t epoch = 0;

    [[nodiscard]] static StoreOptions from_environment();
};

class Store {
   public:
    static constexpr size_t max_key_bytes = 1024;
    static constexpr size_t max_value_bytes = size_t{8} << 20;

    virtual ~Store() = default;

    // "tcp://host:port" or "file:///directory"; throws TIMEOUT, PERMISSION, VERSION, IO, INVALID_ARGUMENT.
    [[nodiscard]] static std::shared_ptr<Store> open(const std::string& uri, const StoreOptions& options);

    virtual void set(std::string_view key, std::string_view value, Deadline deadline) = 0;
    [[nodiscard]] virtual std::optional<std::string> get(std::string_view key, Deadline deadline) = 0;
    // Waits until the key exists; returns its value. Throws TIMEOUT naming the key.
    [[nodiscard]] virtual std::string wait(std::string_view key, Deadline deadline) = 0;
    virtual int64_t add(std::string_view key, int64_t delta, Deadline deadline) = 0;
    // Sets `desired` if the value equals `expected` (nullopt: if the key is absent); returns whether it did.
    [[nodiscard]] virtual bool compare_set(std::string_view key, std::optional<std::string_view> expected,
                                           std::string_view desired, Deadline deadline) = 0;
    virtual bool erase(std::string_view key, Deadline deadline) = 0;

    // The numeric address of this host on the connection to the store; empty for a store without a network.
    [[nodiscard]] virtual std::string local_address() const { return {}; }

    [[nodiscard]] milliseconds timeout() const { return timeout_; }
    [[nodiscard]] Deadline default_deadline() const { return Deadline::in(timeout_); }

   protected:
    explicit Store(milliseconds timeout) : timeout_(timeout) {}

   private:
    milliseconds timeout_;
};

// A view of `store` that prepends `prefix` to every key.
[[nodiscard]] std::shared_ptr<Store> prefixed(std::shared_ptr<Store> store, std::string prefix);

// A store inside this process, for ranks that are threads and for jobs with one rank.
[[nodiscard]] std::shared_ptr<Store> make_memory_store(milliseconds timeout);

}  // namespace tsr
