// What the tests of FSDP share: models, the ways to cut them into units, and the world sizes that tests run at.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "mlp.hpp"
#include "optim/optimizer.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "tensor/layout.hpp"

namespace tsr::testing {

class FsdpOverWorlds : public ::testing::TestWithParam<int> {};

// Of every kind of rows: more than ranks, as many as some worlds have, fewer, none.
inline Model odd_shapes(int rank) {
    Model model;
    for (const Dims& shape : {Dims{7, 3}, Dims{4}, Dims{1, 5}, Dims{2, 2, 2}, Dims{0, 4}, Dims{30}}) {
        model.add(fmt::format("p{}", model.entries.size()), shape);
        float value = static_cast<float>(1000 * rank + 100 * static_cast<int>(model.entries.size()));
        for (float& v : model.entries.back().values) v = value++;
    }
    return model;
}

inline std::vector<FsdpUnit> two_units(Model& model) {
    auto params = model.params();
    std::vector<FsdpUnit> units(2);
    units[0].name = "first";
    units[1].name = "second";
    for (size_t i = 0; i < params.size(); ++i) units[i % 2].params.push_back(params[i]);
    return units;
}

// The ways in which units are cut.
struct Cut {
    const char* name;
    int row_block;
    bool flat;
};
inline constexpr std::array cuts{Cut{"by rows", 0, false}, Cut{"by blocks of 2 rows", 2, false},
                                 Cut{"by blocks of 4 rows", 4, false}, Cut{"flat", 0, true}};

inline std::vector<FsdpUnit> cut_by(const Cut& cut, std::vector<FsdpUnit> units) {
    for (FsdpUnit& unit : units) {
        unit.row_block = cut.row_block;
        unit.flat = cut.flat;
    }
    return units;
}

// The elements of a whole tensor, counted row-major, that a rank has of it, one after the other.
inline std::vector<size_t> elements_of(const Layout& layout, int rank) {
    std::vector<size_t> elements;
    const Dims& shape = layout.shape();
    for (const Box& box : layout.boxes_of(rank)) {
        for (int64_t i = 0; i < box.numel(); ++i) {
            int64_t rest = i;
            int64_t element = 0;
            int64_t stride = 1;
            for (int d = shape.ndim() - 1; d >= 0; --d) {
                element += (box.offsets[d] + rest % box.sizes[d]) * stride;
                rest /= box.sizes[d];
                stride *= shape[d];
            }
            elements.push_back(static_cast<size_t>(element));
        }
    }
    return elements;
}

inline std::vector<FsdpUnit> a_unit_a_layer(Model& model) {
    auto params = model.params();
    std::vector<FsdpUnit> units;
    for (size_t l = 0; l < Mlp::layers; ++l) {
        units.push_back({fmt::format("fc{}", l), {params[2 * l], params[2 * l + 1]}, {}, 1});
    }
    return units;
}

// Parameters of one shape, each a unit; their values are their numbers.
inline Model equal_layers(size_t count, Dims shape = {12, 4}) {
    Model model;
    for (size_t l = 0; l < count; ++l) model.add(fmt::format("w{}", l), shape, static_cast<float>(l));
    return model;
}

inline std::vector<FsdpUnit> a_unit_each(Model& model, int reshard_after_forward = 1) {
    std::vector<FsdpUnit> units;
    for (const NamedTensor& param : model.params()) {
        units.push_back({.name = "u" + param.name, .params = {param}, .reshard_after_forward = reshard_after_forward});
    }
    return units;
}

inline std::vector<OptimizerParam> sharded(const Fsdp& fsdp) {
    std::vector<OptimizerParam> out;
    for (size_t i = 0; i < fsdp.params(); ++i) {
        out.push_back({fsdp.param(i).name, fsdp.shard(i), fsdp.shard_grad(i)});
    }
    return out;
}

}  // namespace tsr::testing
