// Tensors that ranks of a host have in common: one copy in shared memory, of which each rank changes a part. Where who
// changes them (parallel/) meets who saves and loads them (checkpoint/); neither knows the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/error.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

class SharedCopy {
   public:
    virtual ~SharedCopy() = default;

    // This rank among those that share, and how many they are.
    [[nodiscard]] virtual int place() const = 0;
    [[nodiscard]] virtual int places() const = 0;

    // Collective over those that share: zeroed memory, the same for all, aligned to 64. Freed when the last holder on each
    // lets go.
    [[nodiscard]] virtual std::shared_ptr<std::byte> allocate(size_t size) = 0;

    // Throws CORRUPT if parts of the copy are of different steps.
    virtual void check_whole() const = 0;

    // Collective over those that share, before each load: `what` tells what this rank loads of it. MISMATCH on all of them
    // if it is not the same everywhere: each loads its rows of a tensor, and others would stay as they were.
    virtual void agree_to_load(uint32_t what) = 0;
    // A load writes into the copy, each rank the rows that are its own: between these two, which all ranks that share
    // call, nobody reads or changes it otherwise. The second takes what failed here and throws if anything failed
    // anywhere.
    virtual void begin_load() = 0;
    virtual void end_load(const std::optional<Error>& error) = 0;
};

// The rows of `rows` that the rank at its place loads, [begin, end): of a few, the first ranks have one each.
struct Rows {
    int64_t begin = 0;
    int64_t end = 0;
};
[[nodiscard]] inline Rows own_rows(int64_t rows, const SharedCopy& copy) {
    const int64_t each = rows / copy.places() + (rows % copy.places() != 0 ? 1 : 0);
    const int64_t begin = std::min(rows, each * copy.place());
    return {begin, std::min(rows, begin + each)};
}

}  // namespace tsr
