// The client of a StoreServer. A connection carries one call at a time; a call takes an idle connection or opens one,
// so any number of threads may wait at once. After any error a connection is closed and never reused.
#pragma once

#include <memory>

#include "store/address.hpp"
#include "store/channel.hpp"
#include "store/handshake.hpp"
#include "store/store.hpp"

namespace tsr {

// Retries until the store answers or options.timeout passes. Throws TIMEOUT, PERMISSION, VERSION, INTERRUPTED.
[[nodiscard]] std::shared_ptr<Store> open_tcp_store(const Address& address, const StoreOptions& options);

// Makes one attempt, for callers that try several addresses. Also throws IO if nobody listens there.
[[nodiscard]] std::shared_ptr<Store> connect_tcp_store(const Address& address, const StoreOptions& options,
                                                       Deadline deadline);

// One open connection, for other protocols behind the handshake; `party` outlives it. Throws IO, TIMEOUT, PERMISSION,
// VERSION, INTERRUPTED; errors that may pass are marked retriable.
[[nodiscard]] Channel connect_with_handshake(const Address& address, const handshake::Party& party, Deadline deadline);

}  // namespace tsr
