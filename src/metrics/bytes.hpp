// The state of a metric as bytes, little-endian, for checkpoints.
#pragma once

#include <bit>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.hpp"

namespace tsr::metrics {

static_assert(std::endian::native == std::endian::little);

class ByteWriter {
   public:
    template <class T>
    void list(std::span<const T> values) {
        static_assert(std::is_trivially_copyable_v<T>);
        number(values.size());
        text_.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
    }
    void number(uint64_t value) { text_.append(reinterpret_cast<const char*>(&value), sizeof value); }
    [[nodiscard]] std::string take() { return std::move(text_); }

   private:
    std::string text_;
};

// Throws MISMATCH if the bytes end too early or late.
class ByteReader {
   public:
    explicit ByteReader(std::string_view text) : rest_(text) {}

    template <class T>
    [[nodiscard]] std::vector<T> list() {
        const uint64_t count = number();
        if (count > rest_.size() / sizeof(T)) refuse();
        std::vector<T> values(count);
        if (count > 0) std::memcpy(values.data(), take(count * sizeof(T)).data(), count * sizeof(T));
        return values;
    }
    [[nodiscard]] uint64_t number() {
        uint64_t value = 0;
        if (rest_.size() < sizeof value) refuse();
        std::memcpy(&value, take(sizeof value).data(), sizeof value);
        return value;
    }
    void end() const {
        if (!rest_.empty()) refuse();
    }
    [[noreturn]] static void refuse() { throw Error(Code::mismatch, "the saved state of the metric is damaged"); }

   private:
    std::string_view take(size_t size) {
        const std::string_view taken = rest_.substr(0, size);
        rest_.remove_prefix(size);
        return taken;
    }
    std::string_view rest_;
};

}  // namespace tsr::metrics
