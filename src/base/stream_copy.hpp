// memcpy to memory that nobody reads soon: the stores go past the caches, which saves reading what they overwrite and
// leaves in the caches what was there.
#pragma once

#include <cstddef>

namespace tsr {

// The memories do not overlap. What is copied is visible to whoever learns of it, as after memcpy.
void stream_copy(std::byte* to, const std::byte* from, size_t size);

}  // namespace tsr
