// The client of a StoreServer. A connection carries one call at a time; a call takes an idle connection or makes one,
// so any number of threads may wait at once. A connection on which anything went wrong is closed, never used again.
#pragma once

#include <memory>

#include "store/address.hpp"
#include "store/store.hpp"

namespace tsr {

// Tries until the store answers or options.timeout passes. Throws TIMEOUT, PERMISSION, VERSION, INTERRUPTED.
[[nodiscard]] std::shared_ptr<Store> open_tcp_store(const Address& address, const StoreOptions& options);

// One attempt, for callers that look in several places. Throws also IO when nobody listens there.
[[nodiscard]] std::shared_ptr<Store> connect_tcp_store(const Address& address, const StoreOptions& options,
                                                       Deadline deadline);

}  // namespace tsr
