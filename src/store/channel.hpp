// One end of a connection of the library: first the handshake of handshake.hpp, then bytes, encrypted if the Party says so.
// Nothing here waits. A call does what the socket allows; after one that moved nothing, `wants` says what to poll for.
// The functions below wait with a deadline, for callers with a thread of their own. Not thread-safe.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "store/brief_wait.hpp"
#include "store/handshake.hpp"
#include "store/tls.hpp"

namespace tsr {

class Channel {
   public:
    // `socket` is connected and non-blocking; `party` outlives the channel. `address` is the server's, for messages.
    [[nodiscard]] static Channel to_server(Fd socket, const handshake::Party& party, std::string address);
    [[nodiscard]] static Channel to_client(Fd socket, const handshake::Party& party);
    Channel(Channel&&) noexcept;
    Channel& operator=(Channel&&) noexcept;
    ~Channel();

    [[nodiscard]] int fd() const { return socket_.get(); }
    [[nodiscard]] bool is_open() const { return shaking_ == nullptr; }  // the handshake is complete

    // Continues the handshake; true once it is complete. Throws IO if the peer is gone, and if the sides refuse each other
    // PERMISSION or VERSION; on the server's side MISMATCH for a peer of another job, and CORRUPT for one that does not
    // speak this protocol.
    [[nodiscard]] bool shake();

    // Of an open channel. Bytes moved; 0: none now. Throw IO if the peer is gone, CORRUPT if encrypted bytes were changed.
    [[nodiscard]] size_t read(char* bytes, size_t size);
    [[nodiscard]] size_t write(std::span<const iovec> parts);
    [[nodiscard]] bool has_bytes();  // whether read() would return some, or throw

    [[nodiscard]] short wants() const;  // POLLIN or POLLOUT
    [[nodiscard]] BriefWait& brief_wait() { return brief_wait_; }

   private:
    struct Shaking;
    Channel(Fd socket, std::unique_ptr<Shaking> shaking);
    bool fill(size_t size);
    bool flush();
    bool step_of_server();
    bool step_of_client();
    void start_tls(Tls::End end);

    Fd socket_;
    std::unique_ptr<Shaking> shaking_;
    std::unique_ptr<Tls> tls_;
    short wants_;
    BriefWait brief_wait_;
};

// Completes the handshake. The next four also throw TIMEOUT and INTERRUPTED; `what` is the beginning of their messages.
void open(Channel& channel, Deadline deadline, std::string_view what);
void send_all(Channel& channel, std::string_view bytes, Deadline deadline, std::string_view what);
void receive_all(Channel& channel, char* bytes, size_t size, Deadline deadline, std::string_view what);
// Receives at least `least` bytes and at most `size`; returns how many. For an answer that is due: it looks a few times
// before it sleeps.
[[nodiscard]] size_t receive_some(Channel& channel, char* bytes, size_t least, size_t size, Deadline deadline,
                                  std::string_view what);
// Waits until there are bytes to read; returns false if the deadline passes first.
[[nodiscard]] bool readable(Channel& channel, Deadline deadline);

}  // namespace tsr
