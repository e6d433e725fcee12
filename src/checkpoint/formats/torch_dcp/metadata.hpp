// The `.metadata` of PyTorch's Distributed Checkpoint, version 1: the tensors and values, and the file and byte range
// of each part. docs/FORMAT.md says what of it is read and written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/formats/torch_dcp/pickle.hpp"
#include "tensor/layout.hpp"

namespace tsr {

inline constexpr int64_t max_dcp_metadata_bytes = pickle::max_bytes;

// A byte range of a file, which holds a torch.save archive.
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
    std::vector<DcpChunk> chunks;  // disjoint, covering the tensor; none is empty
};

struct DcpMetadata {
    std::vector<std::string> files;  // relative paths that stay inside the directory
    std::map<std::string, DcpTensor, std::less<>> tensors;
    std::map<std::string, DcpItem, std::less<>> values;
    std::map<std::string, std::string, std::less<>> unreadable;  // name -> why

    // CORRUPT if it is malformed; sound entries that cannot be read are listed in `unreadable`.
    [[nodiscard]] static DcpMetadata parse(std::string pickle, const std::string& path);
    // In the form that unmodified PyTorch reads.
    [[nodiscard]] std::string dump() const;
};

}  // namespace tsr
