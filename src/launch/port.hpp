// A TCP port for MASTER_PORT, which a rank will listen on later. It was free when it was chosen, lies below the range from
// which the kernel takes ports by itself, and no other agent of this machine chooses it while this object lives: each
// reservation holds a local socket whose name carries the number.
#pragma once

#include <cstdint>

#include "base/fd.hpp"

namespace tsr {

class PortReservation {
   public:
    // Throws IO if there is none.
    PortReservation();
    [[nodiscard]] uint16_t port() const { return port_; }

   private:
    Fd claim_;
    uint16_t port_ = 0;
};

}  // namespace tsr
