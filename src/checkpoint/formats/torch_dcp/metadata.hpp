// The `.metadata` of PyTorch's Distributed Checkpoint, version 1: which tensors and values there are, and which bytes of
// which file hold each part. docs/FORMAT.md says what of it is read and written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/formats/torch_dcp/pickle.hpp"
#include "tensor/layout.hpp"

namespace tsr {

inline constexpr int64_t max_dcp_metadata_bytes = pickle::max_bytes;

// Bytes of a file: a torch.save archive.
struct DcpItem {
    int file = 0;  // into DcpMetadata::files
    int64_t offset = 0;
    int64_t length = 0;
};

struct DcpChunk {
    Box box;
    DcpItem item;
};

struct DcpTensor {
    DType dtype = DType::f32;
    Dims shape;
    std::vector<DcpChunk> chunks;  // disjoint, covering the tensor; none of no elements
};

struct DcpMetadata {
    std::vector<std::string> files;  // relative paths that stay inside the directory
    std::map<std::string, DcpTensor, std::less<>> tensors;
    std::map<std::string, DcpItem, std::less<>> values;
    std::map<std::string, std::string, std::less<>> unreadable;  // name -> why

    // CORRUPT if it is no sound metadata; what is sound but not read is told in `unreadable`.
    [[nodiscard]] static DcpMetadata parse(std::string pickle, const std::string& path);
    // As unmodified PyTorch reads it.
    [[nodiscard]] std::string dump() const;
};

}  // namespace tsr
