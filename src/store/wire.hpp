// The protocol between client and server after the handshake. A frame is a length (4 bytes, little-endian, excluding
// itself), followed by
//
//   request:  operation (1), length of the key (2), key, and  set: value | add: delta (8) |
//             compare_set: 1 and length (4) and expected, or 0, then desired
//   reply:    outcome (1), and  ok: value or number (8) | failed: code (1), message
//
// A client sends one request and reads its reply before the next. The reply to `wait` may take arbitrarily long;
// `cancel` ends it: there is then exactly one reply, the value or `cancelled`. A late cancel is ignored.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "store/store.hpp"

namespace tsr::wire {

enum class Operation : uint8_t { set = 1, get, wait, add, compare_set, erase, cancel };
enum class Outcome : uint8_t { ok = 1, no, failed, cancelled };

inline constexpr size_t length_size = 4;
// The largest request: a compare_set of two values. Buffers are not allocated by length but grow as bytes arrive.
inline constexpr size_t max_request = 3 + Store::max_key_bytes + 5 + 2 * Store::max_value_bytes;
inline constexpr size_t max_reply = 1 + Store::max_value_bytes;

template <class T>
void append(std::string& out, T number) {
    for (size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(static_cast<uint64_t>(number) >> (8 * i));
}

// Removes a number from the front of `in`; throws CORRUPT if `in` is too short.
template <class T>
[[nodiscard]] T take_number(std::string_view& in) {
    if (in.size() < sizeof(T)) throw Error(Code::corrupt, "a store message is too short");
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{static_cast<uint8_t>(in[i])} << (8 * i);
    in.remove_prefix(sizeof(T));
    return static_cast<T>(value);
}

[[nodiscard]] inline std::string_view take_bytes(std::string_view& in, size_t size) {
    if (in.size() < size) throw Error(Code::corrupt, "a store message is too short");
    const std::string_view part = in.substr(0, size);
    in.remove_prefix(size);
    return part;
}

// Removes a frame from the front of `in` and returns it without its length; nullopt if it has not all arrived. Throws
// CORRUPT if it claims more than `most` bytes.
[[nodiscard]] inline std::optional<std::string_view> take_frame(std::string_view& in, size_t most) {
    if (in.size() < length_size) return std::nullopt;
    std::string_view rest = in;
    const auto length = take_number<uint32_t>(rest);
    if (length > most) {
        throw Error(Code::corrupt, "a store message has " + std::to_string(length) + " bytes; at most " +
                                       std::to_string(most) + " are allowed");
    }
    if (rest.size() < length) return std::nullopt;
    in = rest.substr(length);
    return rest.substr(0, length);
}

// A request without its length prefix; the views live as long as the frame.
struct Request {
    Operation operation = Operation::get;
    std::string_view key;
    std::string_view value;  // set; compare_set: desired
    std::optional<std::string_view> expected;
    int64_t delta = 0;
};

[[nodiscard]] inline std::string encode(const Request& request) {
    std::string out(length_size, '\0');
    append(out, static_cast<uint8_t>(request.operation));
    append(out, static_cast<uint16_t>(request.key.size()));
    out += request.key;
    if (request.operation == Operation::add) append(out, request.delta);
    if (request.operation == Operation::compare_set) {
        append(out, static_cast<uint8_t>(request.expected.has_value()));
        if (request.expected) {
            append(out, static_cast<uint32_t>(request.expected->size()));
            out += *request.expected;
        }
    }
    out += request.value;
    std::string length;
    append(length, static_cast<uint32_t>(out.size() - length_size));
    out.replace(0, length_size, length);
    return out;
}

// Throws CORRUPT for an invalid request; does not yet check keys and values.
[[nodiscard]] inline Request decode(std::string_view frame) {
    Request request;
    const auto operation = take_number<uint8_t>(frame);
    if (operation < 1 || operation > static_cast<uint8_t>(Operation::cancel)) {
        throw Error(Code::corrupt, "a store message has an unknown operation");
    }
    request.operation = static_cast<Operation>(operation);
    request.key = take_bytes(frame, take_number<uint16_t>(frame));
    if (request.operation == Operation::add) request.delta = take_number<int64_t>(frame);
    if (request.operation == Operation::compare_set && take_number<uint8_t>(frame) != 0) {
        request.expected = take_bytes(frame, take_number<uint32_t>(frame));
    }
    if (request.operation == Operation::set || request.operation == Operation::compare_set) {
        request.value = frame;
    } else if (!frame.empty()) {
        throw Error(Code::corrupt, "a store message is too long");
    }
    return request;
}

}  // namespace tsr::wire
