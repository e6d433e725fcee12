#include "store/table.hpp"

#include <fmt/core.h>

#include <charconv>

#include "base/error.hpp"
#include "store/store.hpp"

namespace tsr {

void check_key(std::string_view key) {
    if (key.empty()) throw Error(Code::invalid_argument, "a store key must not be empty");
    if (key.size() > Store::max_key_bytes) {
        throw Error(Code::invalid_argument, fmt::format("key '{}...' has {} bytes; at most {} are allowed",
                                                        key.substr(0, 32), key.size(), Store::max_key_bytes));
    }
}

void check_value(std::string_view key, std::string_view value) {
    if (value.size() > Store::max_value_bytes) {
        throw Error(Code::invalid_argument,
                    fmt::format("the value of '{}' has {} bytes; at most {} are allowed. Stores are for small values; "
                                "send tensors through a communicator",
                                key, value.size(), Store::max_value_bytes));
    }
}

int64_t sum_of(std::string_view key, const std::string* current, int64_t delta) {
    int64_t number = 0;
    if (current != nullptr) {
        const char* end = current->data() + current->size();
        const auto [rest, failure] = std::from_chars(current->data(), end, number);
        if (failure != std::errc{} || rest != end) {
            throw Error(Code::invalid_argument,
                        fmt::format("add to '{}': its value of {} bytes is not an integer", key, current->size()));
        }
    }
    int64_t sum = 0;
    if (__builtin_add_overflow(number, delta, &sum)) {
        throw Error(Code::invalid_argument, fmt::format("add to '{}': {} + {} overflows 64 bits", key, number, delta));
    }
    return sum;
}

Value Table::find(std::string_view key) const {
    const auto at = values_.find(key);
    return at == values_.end() ? nullptr : at->second;
}

void Table::set(std::string_view key, std::string_view value) {
    check_key(key);
    check_value(key, value);
    const auto at = values_.find(key);
    const size_t freed = at == values_.end() ? 0 : at->second->size();
    const size_t needed = value.size() + (at == values_.end() ? key.size() : 0);
    if (at == values_.end() && values_.size() >= limits_.keys) {
        throw Error(Code::no_memory,
                    fmt::format("set '{}': the store has reached its limit of {} keys", key, limits_.keys));
    }
    if (total_bytes_ - freed + needed > limits_.bytes) {
        throw Error(Code::no_memory, fmt::format("set '{}' ({} bytes): the store holds {} of at most {} bytes", key,
                                                 value.size(), total_bytes_, limits_.bytes));
    }
    auto shared = std::make_shared<const std::string>(value);
    if (at == values_.end()) {
        values_.emplace(key, std::move(shared));
    } else {
        at->second = std::move(shared);
    }
    total_bytes_ = total_bytes_ - freed + needed;
}

int64_t Table::add(std::string_view key, int64_t delta) {
    const int64_t sum = sum_of(key, find(key).get(), delta);
    set(key, std::to_string(sum));
    return sum;
}

bool Table::compare_set(std::string_view key, std::optional<std::string_view> expected, std::string_view desired) {
    check_key(key);
    const Value current = find(key);
    const bool as_expected = expected ? current != nullptr && *current == *expected : current == nullptr;
    if (as_expected) set(key, desired);
    return as_expected;
}

bool Table::erase(std::string_view key) {
    const auto at = values_.find(key);
    if (at == values_.end()) return false;
    total_bytes_ -= at->first.size() + at->second->size();
    values_.erase(at);
    return true;
}

}  // namespace tsr
