// Waits until what was written to Gloo's connections has arrived. A message to a connection that is closed makes the kernel
// drop what it has not yet sent, so a rank that ends while its peers still write to it stays until its last words are theirs.
#pragma once

#include <gloo/transport/context.h>

#include "base/clock.hpp"

namespace tsr::gloo_transport {

// Until the kernels of all peers have taken everything, or `until`. A connection that is broken is not waited for.
void await_arrival(::gloo::transport::Context& context, Clock::time_point until) noexcept;

}  // namespace tsr::gloo_transport
