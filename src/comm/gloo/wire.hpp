// The messages of the Gloo transport besides data. All have a fixed size: Gloo ends the process if a message is longer
// than the buffer posted for it, so every length must be known in advance.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "comm/request.hpp"

namespace tsr::gloo_transport {

// Slots identify streams of messages between two ranks; a stream keeps its order.
namespace slot {
inline constexpr uint64_t enters = uint64_t{1} << 56;
inline constexpr uint64_t farewell = uint64_t{5} << 56;
[[nodiscard]] constexpr uint64_t collective(uint64_t sequence, uint64_t phase) {
    return uint64_t{2} << 56 | (sequence & 0xffffffffffff) << 4 | phase;
}
[[nodiscard]] constexpr uint64_t header(int32_t tag) { return uint64_t{3} << 56 | static_cast<uint32_t>(tag); }
[[nodiscard]] constexpr uint64_t message(uint64_t number) { return uint64_t{4} << 56 | number; }
}  // namespace slot

// What a rank sends to every other: at the beginning of a collective ("enters"), so that all know before data moves
// that they issued the same operation; and once, on a separate stream, when it fails or leaves. Carries the data of a
// small collective.
struct Notice {
    enum class Kind : uint32_t { enters = 1, failed = 2, left = 3 };
    static constexpr uint64_t current_magic = 0x3130'4f4f'4c47'5354;  // "TSGLOO01"
    static constexpr size_t inline_size = 768;

    uint64_t magic = current_magic;
    Kind kind = Kind::enters;
    int32_t code = 0;  // failed: the error's code and, if known, peer; its text is in `bytes`
    int32_t peer = -1;
    uint64_t sequence = 0;  // left: of the last collective on a device
    Operation operation;
    alignas(64) std::array<std::byte, inline_size> bytes{};
};

// Before each message of a send.
struct MessageHeader {
    static constexpr uint64_t current_magic = 0x4547'4153'5345'4d54;
    uint64_t magic = current_magic;
    int32_t dtype = 0;
    int32_t tag = 0;
    uint64_t count = 0;
    uint64_t size = 0;
    uint64_t number = 0;  // counts messages between these two ranks; selects the slot of the data
};

}  // namespace tsr::gloo_transport
