// What a checkpoint's format has to do for it: move parts of saved tensors into memory, and check its files. What is
// saved, the manifest tells, which every format makes or reads when it is opened. Methods may be called from many threads.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/io/progress.hpp"
#include "checkpoint/model/manifest.hpp"
#include "tensor/layout.hpp"

namespace tsr {

class HostReads;

enum class Verify { blocks, none };

// A box of a saved tensor, and where it shall stand: row-major, of a dtype that may differ among floating-point types.
// What is pointed to is the caller's, for the call.
struct Wanted {
    const std::string* name = nullptr;  // under which it is saved
    const SavedTensor* tensor = nullptr;
    const Box* box = nullptr;
    DType dtype = DType::f32;
    std::byte* memory = nullptr;
};

struct ReadOptions {
    Verify verify = Verify::blocks;
    int threads = 4;
    ProgressFn progress;        // told on the calling thread
    HostReads* host = nullptr;  // with whom; nullptr: alone
};

enum class Depth { headers, everything };

inline constexpr int verify_threads = 4;

class Contents {
   public:
    virtual ~Contents() = default;
    // Whether checksums have shown that all of it is sound. CORRUPT names file, byte range and tensor of the first fault.
    virtual bool read(std::span<const Wanted> wanted, const ReadOptions& options) const = 0;
    // A message for every fault found; none means sound. Throws only what stops the check itself. `progress`, if there
    // is one, is told the bytes of data that were checked, from several threads; `poll` is called by the calling thread
    // meanwhile.
    [[nodiscard]] virtual std::vector<std::string> verify(Depth depth, const ByteProgress& progress,
                                                          const std::function<void()>& poll) const = 0;
    // Whether damage within the data can be seen at all: of what was read and verified until now, where it depends on that.
    [[nodiscard]] virtual bool has_checksums() const { return true; }
};

}  // namespace tsr
