// A stream of a simulated device that waits for the test.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "device/device.hpp"
#include "simulated_cuda/control.h"

namespace tsr::testing {

// Keeps a stream from going on until it is released or destroyed.
class Hold {
   public:
    Hold(DeviceApi& api, StreamHandle stream) {
        const auto wait = [](void* flag) -> int {
            while (!**static_cast<Flag*>(flag)) std::this_thread::yield();
            return 0;
        };
        const auto forget = [](void* flag) { delete static_cast<Flag*>(flag); };
        api.in_use([&] { EXPECT_EQ(simulated_cuda_launch_until(stream, wait, forget, new Flag(go_)), 0); });
    }
    ~Hold() { release(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    void release() const { *go_ = true; }

   private:
    using Flag = std::shared_ptr<std::atomic<bool>>;  // the stream's too
    const Flag go_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace tsr::testing
