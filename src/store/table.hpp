// The keys, values and operations of a store, shared by the memory store and the TCP server. Not thread-safe: the owner
// (a mutex, or the server's thread) must serialize access. Contents are bounded, so that a runaway rank gets an error
// instead of filling the agent's memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace tsr {

// Throws INVALID_ARGUMENT for an empty or too long key, or a too long value.
void check_key(std::string_view key);
void check_value(std::string_view key, std::string_view value);

// `current` (nullptr: 0) plus `delta`. Throws INVALID_ARGUMENT if it is not a decimal integer or the sum overflows.
[[nodiscard]] int64_t sum_of(std::string_view key, const std::string* current, int64_t delta);

// Values are immutable and shared, so that a value requested by many ranks is held only once.
using Value = std::shared_ptr<const std::string>;

class Table {
   public:
    struct Limits {
        size_t keys = size_t{1} << 20;
        size_t bytes = size_t{1} << 30;  // of keys and values together
    };

    Table() = default;
    explicit Table(const Limits& limits) : limits_(limits) {}

    [[nodiscard]] Value find(std::string_view key) const;  // nullptr if absent
    void set(std::string_view key, std::string_view value);
    int64_t add(std::string_view key, int64_t delta);
    // expected nullopt: the key must be absent.
    bool compare_set(std::string_view key, std::optional<std::string_view> expected, std::string_view desired);
    bool erase(std::string_view key);

    [[nodiscard]] size_t size() const { return values_.size(); }

   private:
    std::map<std::string, Value, std::less<>> values_;
    size_t total_bytes_ = 0;
    Limits limits_;
};

}  // namespace tsr
