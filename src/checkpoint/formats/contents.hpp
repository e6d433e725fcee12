// The interface of a checkpoint's format: move parts of saved tensors into memory, and check the files. The manifest,
// which every format reads or makes when it is opened, says what is saved. Thread-safe.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/io/progress.hpp"
#include "checkpoint/model/manifest.hpp"
#include "device/copy_streams.hpp"
#include "tensor/layout.hpp"

namespace tsr {

class HostReads;

enum class Verify { blocks, none };

// A box of a saved tensor and its destination: row-major, possibly of another floating-point dtype. The pointers are
// borrowed for the call.
struct Wanted {
    const std::string* name = nullptr;  // saved name
    const SavedTensor* tensor = nullptr;
    const Box* box = nullptr;
    DType dtype = DType::f32;
    std::byte* memory = nullptr;
    Device device{};           // of the memory
    CopyStream* on = nullptr;  // its copies; nullptr: of the host
};

struct ReadOptions {
    Verify verify = Verify::blocks;
    int threads = 4;
    ProgressFn progress;        // called on the calling thread
    HostReads* host = nullptr;  // the ranks to read together with; nullptr: this rank alone
};

enum class Depth { headers, everything };

inline constexpr int verify_threads = 4;

class Contents {
   public:
    virtual ~Contents() = default;
    // True if checksums have verified all data. CORRUPT names file, byte range and tensor of the first fault.
    virtual bool read(std::span<const Wanted> wanted, const ReadOptions& options) const = 0;
    // One message per fault; empty means sound. Throws only errors that stop the check itself. `progress`, if given, is
    // called with the number of data bytes checked, from several threads; `poll` is called on the calling thread
    // meanwhile.
    [[nodiscard]] virtual std::vector<std::string> verify(Depth depth, const ByteProgress& progress,
                                                          const std::function<void()>& poll) const = 0;
    // Whether damage within the data can be detected; may depend on what was read and verified so far.
    [[nodiscard]] virtual bool has_checksums() const { return true; }
};

}  // namespace tsr
