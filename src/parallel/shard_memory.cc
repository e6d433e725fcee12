#include "parallel/shard_memory.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace tsr {

namespace {

struct Known {
    std::mutex mutex;
    std::map<const std::byte*, size_t> sizes;  // by address
};

Known& known() {
    static auto* const known = new Known;  // never destroyed: models may be, when the program ends
    return *known;
}

void free_shards(std::byte* begin, std::align_val_t alignment) {
    {
        const std::lock_guard lock(known().mutex);
        known().sizes.erase(begin);
    }
    ::operator delete(begin, alignment);
}

}  // namespace

std::shared_ptr<std::byte> allocate_shards(size_t size, size_t alignment) {
    const std::align_val_t aligned{alignment};
    std::shared_ptr<std::byte> memory(static_cast<std::byte*>(::operator new(std::max<size_t>(size, 1), aligned)),
                                      [aligned](std::byte* begin) { free_shards(begin, aligned); });
    std::memset(memory.get(), 0, size);
    const std::lock_guard lock(known().mutex);
    known().sizes[memory.get()] = size;
    return memory;
}

bool is_in_shards(const std::byte* data) {
    const std::lock_guard lock(known().mutex);
    const auto after = known().sizes.upper_bound(data);
    if (after == known().sizes.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return static_cast<size_t>(data - begin) < size;
}

}  // namespace tsr
