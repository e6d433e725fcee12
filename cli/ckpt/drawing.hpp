// Draws tensors cut by rank: one rectangle a tensor, one colour a rank. The file needs nothing beside it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/load/checkpoint.hpp"

namespace tsr::cli {

struct Shard {
    int rank = 0;
    std::string_view file;  // the manifest's
    Box box;
};

struct ShardedTensor {
    std::string name;
    std::string alias_of;  // empty: it is saved under its own name
    DType dtype = DType::f32;
    Dims shape;
    std::vector<Shard> shards;
};

// Of more than `most_drawn` tensors the largest are drawn, and the drawing says so.
inline constexpr size_t most_drawn = 200;

[[nodiscard]] std::string svg_of(const Checkpoint& checkpoint, const std::vector<ShardedTensor>& tensors);
[[nodiscard]] std::string html_of(const Checkpoint& checkpoint, const std::vector<ShardedTensor>& tensors);

// The file is whole or not there.
void write_drawing(const std::string& path, const std::string& text);

}  // namespace tsr::cli
