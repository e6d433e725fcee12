// Tensors that ranks of a host share: one copy in shared memory, of which each rank modifies a part. The interface
// between the code that modifies them (parallel/) and the code that saves and loads them (checkpoint/); neither depends
// on the other.
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

    // This rank's index among the sharing ranks, and their number.
    [[nodiscard]] virtual int place() const = 0;
    [[nodiscard]] virtual int places() const = 0;

    // Collective over the sharing ranks: zeroed memory, the same for all, aligned to 64. Freed when every rank has
    // dropped its last reference.
    [[nodiscard]] virtual std::shared_ptr<std::byte> allocate(size_t size) = 0;

    // Throws CORRUPT if parts of the copy are of different steps.
    virtual void check_whole() const = 0;

    // Collective over the sharing ranks, before each load: `what` describes what this rank loads. MISMATCH on all of
    // them if it differs: each loads only its rows of a tensor, and the other rows would keep their old values.
    virtual void agree_to_load(uint32_t what) = 0;
    // A load writes into the copy, each rank its own rows. All sharing ranks call both functions; in between, nobody
    // else may read or modify the copy. end_load takes this rank's error and throws if any rank failed.
    virtual void begin_load() = 0;
    virtual void end_load(const std::optional<Error>& error) = 0;
};

// The rows [begin, end) of `rows` that this rank loads; of a few rows, the first ranks get one each.
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
