// What the tests of tessera/fsdp.h share: a model of two units, and a backward whose gradients are all one value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "api.hpp"

namespace api {

inline std::span<float> floats(const tsr_tensor& tensor) {
    size_t count = 1;
    for (int32_t d = 0; d < tensor.ndim; ++d) count *= static_cast<size_t>(tensor.shape[d]);
    return {reinterpret_cast<float*>(static_cast<char*>(tensor.data) + tensor.byte_offset), count};
}

inline tsr_fsdp_options defaults() {
    tsr_fsdp_options options;
    EXPECT_OK(tsr_fsdp_options_init(&options, sizeof options));
    return options;
}

// Two units: "fc1" of a weight and a bias, "fc2" of a weight.
struct Model {
    api::Array<float> weight;
    api::Array<float> bias;
    api::Array<float> last;
    std::array<tsr_param, 2> first_params{{{"module.fc1.weight", weight.tensor()}, {"module.fc1.bias", bias.tensor()}}};
    std::array<tsr_param, 1> second_params{{{"fc2.weight", last.tensor()}}};
    std::array<tsr_fsdp_unit, 2> units{
        {{"fc1", first_params.data(), 2, nullptr, 1, {}}, {"fc2", second_params.data(), 1, nullptr, 1, {}}}};

    explicit Model(float value) : weight({5, 2}, value), bias({5}, value), last({2}, value) {}
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    [[nodiscard]] api::Owned<tsr_fsdp> create(tsr_comm* comm, const tsr_fsdp_options* options = nullptr) const {
        api::Owned<tsr_fsdp> fsdp;
        EXPECT_OK(tsr_fsdp_create(comm, units.data(), units.size(), options, fsdp.out()));
        return fsdp;
    }
};

// A backward whose gradients are all `value`.
inline void backward(tsr_fsdp* fsdp, float value) {
    for (const size_t unit : {1, 0}) {
        ASSERT_OK(tsr_fsdp_backward(fsdp, unit));
        for (size_t i = 0; i < 3; ++i) {
            size_t of = 9;
            ASSERT_OK(tsr_fsdp_param(fsdp, i, nullptr, &of, nullptr));
            if (of != unit) continue;
            tsr_tensor grad{};
            ASSERT_OK(tsr_fsdp_grad(fsdp, i, &grad));
            for (float& g : floats(grad)) g = value;
        }
        ASSERT_OK(tsr_fsdp_grads_ready(fsdp, unit));
    }
    ASSERT_OK(tsr_fsdp_wait(fsdp));
}

}  // namespace api
