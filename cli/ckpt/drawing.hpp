// Draws tensors and their parts by rank: one rectangle per tensor, one colour per rank. The file is self-contained.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/load/checkpoint.hpp"

namespace tsr::cli {

struct Shard {
    int rank = 0;
    std::string_view file;  // name in the manifest
    Box box;
};

struct ShardedTensor {
    std::string name;
    std::string alias_of;  // empty: it is saved under its own name
    DType dtype = DType::f32;
    Dims shape;
    std::vector<Shard> shards;
};

// Of more than `most_drawn` tensors only the largest are drawn, and the drawing says so.
inline constexpr size_t most_drawn = 200;

[[nodiscard]] std::string svg_of(const Checkpoint& checkpoint, const std::vector<ShardedTensor>& tensors);
[[nodiscard]] std::string html_of(const Checkpoint& checkpoint, const std::vector<ShardedTensor>& tensors);

// Writes the file atomically.
void write_drawing(const std::string& path, const std::string& text);

}  // namespace tsr::cli
