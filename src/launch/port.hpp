// A TCP port for MASTER_PORT, on which a rank will listen later. It was free when it was chosen, is below the kernel's
// range of ephemeral ports, and no other agent on this machine chooses it while this object exists: each reservation
// holds a local socket whose name contains the port.
#pragma once

#include <cstdint>

#include "base/fd.hpp"

namespace tsr {

class PortReservation {
   public:
    // Throws IO if no port is free.
    PortReservation();
    [[nodiscard]] uint16_t port() const { return port_; }

   private:
    Fd claim_;
    uint16_t port_ = 0;
};

}  // namespace tsr
