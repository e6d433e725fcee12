// Memory of activations and gradients: resident before it is used, and used again for later micro-batches and steps, so
// that a step like the one before allocates nothing. Memory of a device returns while the device still uses it: whoever
// takes it again gets the events to wait for. Thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device/device.hpp"

namespace tsr::pipeline {

using EventPtr = std::shared_ptr<const DeviceEvent>;

class Pool : public std::enable_shared_from_this<Pool> {
   public:
    // `device` lives as long as the program.
    explicit Pool(DeviceApi& device) : device_(device) {}

    // Memory with undefined content, aligned to 4096 bytes. It returns to the pool with its last reference and may
    // outlive the pool's owner.
    [[nodiscard]] std::shared_ptr<std::byte> take(size_t size);

    // Of memory that is taken: something on the device uses it until then.
    void add_use(const std::byte* memory, EventPtr until);
    // Of memory that has just been taken: what must be over before it is written.
    [[nodiscard]] std::vector<EventPtr> former_uses(const std::byte* memory);

    // The largest number of bytes in use at once since the last begin_step().
    [[nodiscard]] size_t peak_bytes() const;
    // Also frees what none of the last few steps has used.
    void begin_step();

   private:
    struct Block {
        std::shared_ptr<std::byte> memory;
        size_t size = 0;
        uint64_t used_in = 0;  // the last step that used it
        std::vector<EventPtr> uses;
    };
    [[nodiscard]] static bool is_used(const Block& block);
    void put_back(Block block);

    DeviceApi& device_;
    mutable std::mutex mutex_;  // guards all below
    std::vector<Block> free_;
    std::map<const std::byte*, std::vector<EventPtr>> uses_;  // of memory that is taken
    uint64_t step_ = 0;
    size_t blocks_ = 0;  // in use or free
    size_t in_use_ = 0;
    size_t peak_ = 0;
};

}  // namespace tsr::pipeline
