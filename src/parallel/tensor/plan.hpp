// Which part of each parameter a rank of a tensor-parallel group holds: pure arithmetic, the same on every rank. A
// parameter is cut along one dimension or held by every rank ("replicated"). Immutable values.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/params.hpp"
#include "tensor/layout.hpp"

namespace tsr {

// What a rule does with the parameters that it matches. Weights are [outputs, inputs, ...], as in PyTorch.
enum class TpStyle : int32_t {
    replicate = 1,   // every rank holds it
    column = 2,      // cut along dimension 0, weights and biases: each rank computes some of the outputs
    row = 3,         // weights cut along dimension 1: each rank takes some of the inputs; biases are replicated
    vocabulary = 4,  // an embedding's weight [words, features], cut along dimension 0
    sequence = 5,    // replicated, used where each rank has a part of the sequence: its gradient is summed over ranks
    shard = 6,       // cut along the rule's dimension
    layout = 7,      // as the rule's layout says
};
[[nodiscard]] std::string_view name_of(TpStyle style);

// The pattern has a shell pattern for each dotted part of a name (base/wildcard.hpp), so that '*' stays within a part.
// It matches a parameter, or all parameters of a module: "layers.*.attn.w[qkv]" matches "layers.0.attn.wq.weight".
struct TpRule {
    std::string pattern;
    TpStyle style = TpStyle::replicate;
    int dim = 0;                   // of shard
    std::optional<Layout> layout;  // of layout: over the ranks of the group
    int heads = 0;  // not 0: the dimension that is cut is so many heads, of which each rank gets the same number
};

struct TpParam {
    std::string name;
    Dims shape;  // of the whole parameter
    DType dtype = DType::f32;
    TpStyle style = TpStyle::replicate;
    bool sums_grad = false;  // ranks have parts of its gradient, whose sum is the gradient
    int ranks = 1;
    int cut = -1;                  // the dimension along which it is cut; -1: replicated
    std::optional<Layout> layout;  // of the style `layout`; others are cut like torch.chunk

    // What a rank holds along `cut`, one range after another in its slice.
    [[nodiscard]] std::vector<Range> ranges(int rank) const;
    [[nodiscard]] Dims slice_shape(int rank) const;
    [[nodiscard]] std::vector<Box> boxes(int rank) const;  // without empty ones
    // Appends the boxes of the whole parameter that `part`, a box of a rank's slice, is.
    void append_whole(std::vector<Box>& boxes, int rank, const Box& part) const;
    // The index of `rank` among the ranks that hold the same slice.
    [[nodiscard]] int replica(int rank) const;
};

// Applies each rule to the parameters that it matches; the others are replicated. `sums_row_bias`: activations between
// regions are cut along the sequence, so biases of rows are used like parameters of the style `sequence`.
// Throws INVALID_ARGUMENT listing all patterns that match nothing and all parameters that several rules match, or naming
// a parameter that cannot have its style.
[[nodiscard]] std::vector<TpParam> plan_slices(std::span<const NamedTensor> params, std::span<const TpRule> rules,
                                               int ranks, bool sums_row_bias);

// One line for each parameter, to compare plans between ranks.
[[nodiscard]] std::vector<std::string> description(std::span<const TpParam> params);

}  // namespace tsr
