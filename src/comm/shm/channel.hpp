// Point-to-point messages: a byte ring from each rank to every other. A message is a header and its bytes, streamed in
// pieces as the ring has room. Messages with the same pair and tag arrive in the order sent; when the next message in
// the ring has a tag without a receive while another tag has one, the receiver buffers it aside in its own memory.
// Everything belongs to the issuing thread, except the ring's two counters.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "comm/shm/layout.hpp"
#include "comm/transport.hpp"

namespace tsr::shm {

class ShmTransport;
class ShmTransfer;

// A ring as one of its two ends sees it.
struct ChannelEnd {
    Channel* counters = nullptr;
    std::byte* ring = nullptr;
    size_t size = 0;

    // Bytes available to the receiver, not yet read from the sender's view. Throws CORRUPT if the counters are invalid.
    [[nodiscard]] size_t filled() const;
    void copy_in(uint64_t at, const std::byte* from, size_t n) const;
    void copy_out(uint64_t at, std::byte* to, size_t n) const;
};

struct MessageHeader {
    static constexpr uint64_t current_magic = 0x4547'4153'5345'4d54;
    uint64_t magic;
    int32_t tag;
    int32_t dtype;
    uint64_t count;
    uint64_t size;
};

struct Outbox {
    std::deque<ShmTransfer*> queue;  // only the front one writes
};

struct Inbox {
    // Upper limit, so that a sender without matching receives cannot fill the memory.
    static constexpr size_t max_aside_bytes = size_t{64} << 20;
    // A message being received, into the tensor of `sink` or aside into `bytes`.
    struct Message {
        MessageHeader header{};
        size_t received = 0;
        ShmTransfer* sink = nullptr;
        std::vector<std::byte> bytes;
        bool aside = false;
    };
    std::optional<Message> current;
    std::list<Message> aside;           // complete messages without a receive yet, in order
    size_t aside_bytes = 0;             // of those, and of a current one going there
    std::list<ShmTransfer*> receivers;  // waiting, in order
};

class ShmTransfer final : public Transfer {
   public:
    ShmTransfer(ShmTransport& transport, const Request& request, uint64_t sequence, Deadline deadline);
    ~ShmTransfer() override;
    Progress advance() override;

    // Whether advance() could make progress.
    [[nodiscard]] bool may_move() const;
    [[nodiscard]] int peer() const { return operation_.peer; }
    [[nodiscard]] size_t other() const { return other_; }  // the peer's index
    [[nodiscard]] std::string headline() const { return tsr::headline(operation_, sequence_); }
    [[nodiscard]] const Operation& operation() const { return operation_; }
    [[nodiscard]] uint64_t sequence() const { return sequence_; }

   private:
    [[nodiscard]] bool sending() const { return operation_.collective == Collective::send; }
    bool push();
    bool pull();
    bool take_header(Inbox& inbox);
    void accept(Inbox::Message& message);
    [[nodiscard]] Error too_much_aside(const Inbox& inbox, const Inbox::Message& message) const;

    ShmTransport& transport_;
    Operation operation_;
    uint64_t sequence_;
    size_t other_;
    Deadline deadline_;
    milliseconds patience_;
    std::byte* data_;
    size_t size_;
    size_t moved_ = 0;
    bool header_sent_ = false;
    bool done_ = false;
};

}  // namespace tsr::shm
