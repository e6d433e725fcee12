// Waits until the bytes written to Gloo's connections have arrived. If a peer sends to a closed connection, the kernel
// drops whatever it has not yet sent, so a rank that ends while its peers still write to it waits until they have its
// last notice.
#pragma once

#include <gloo/transport/context.h>

#include "base/clock.hpp"

namespace tsr::gloo_transport {

// Returns when the kernels of all peers have acknowledged everything, or at `until`. Ignores broken connections.
void await_arrival(::gloo::transport::Context& context, Clock::time_point until) noexcept;

}  // namespace tsr::gloo_transport
