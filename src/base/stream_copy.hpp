// memcpy for a destination that is not read soon: the stores bypass the caches, which avoids reading the overwritten
// lines and keeps the contents of the caches.
#pragma once

#include <cstddef>

namespace tsr {

// The ranges must not overlap. Visibility to other threads is as after memcpy.
void stream_copy(std::byte* to, const std::byte* from, size_t size);

}  // namespace tsr
