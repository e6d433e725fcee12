// Parts of files that are read straight into the memory of devices (io/cufile.hpp), without a copy on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "checkpoint/formats/contents.hpp"
#include "checkpoint/io/file_system.hpp"
#include "device/copy_streams.hpp"

namespace tsr {

class DeviceReads {
   public:
    // Blocks are verified where they are, which needs the device's kernels.
    explicit DeviceReads(Verify verify) : verify_(verify) {}

    // Finds out about the device of a destination; nullptr is the host.
    void ask(CopyStream* on);
    // Whether files can be read into this device, which was asked about. Any thread.
    [[nodiscard]] bool into(CopyStream* on) const {
        const auto found = devices_.find(on);
        return found != devices_.end() && found->second;
    }

   private:
    const Verify verify_;
    std::map<CopyStream*, bool> devices_;
};

// After what has been put on `on`. False, with undefined bytes at `to`, where it is not possible: then they have to be read to the
// host. Any thread.
[[nodiscard]] bool read_to_device(File& file, int64_t offset, int64_t size, std::byte* to, CopyStream& on);

}  // namespace tsr
