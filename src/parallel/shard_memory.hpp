// The memory in which the FSDP models of this process hold their shards. A shard looks like a parameter; this tells that
// it is only a part of one.
#pragma once

#include <cstddef>
#include <memory>

namespace tsr {

// Zeros, aligned to `alignment`. Never null.
[[nodiscard]] std::shared_ptr<std::byte> allocate_shards(size_t size, size_t alignment);

// Whether there are shards at this address.
[[nodiscard]] bool is_in_shards(const std::byte* data);

}  // namespace tsr
