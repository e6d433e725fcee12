// What the tests of DDP and FSDP share: a small model, and calls that are wanted to fail.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "parallel/params.hpp"
#include "ranks.hpp"

namespace tsr::testing {

// Parameters of f32 in memory of their own.
struct Model {
    struct Entry {
        std::string name;
        Dims shape;
        std::vector<float> values;
    };
    std::vector<Entry> entries;

    void add(const std::string& name, Dims shape, float value = 0) {
        entries.push_back({name, shape, std::vector<float>(static_cast<size_t>(shape.product()), value)});
    }
    std::vector<NamedTensor> params() {
        std::vector<NamedTensor> out;
        for (Entry& entry : entries) {
            Tensor tensor = tensor_of(std::span<float>(entry.values), DType::f32);
            tensor.shape = entry.shape;
            out.push_back({entry.name, tensor});
        }
        return out;
    }
};

inline Model three_layers(float value = 0) {
    Model model;
    model.add("a", {300}, value);
    model.add("b", {20, 15}, value);
    model.add("c", {7}, value);
    return model;
}

// The test's rank keeps the communicator for longer than any DDP or FSDP object lives.
inline std::shared_ptr<Communicator> shared(Communicator& comm) { return {std::shared_ptr<void>(), &comm}; }

inline Error expect_error(const std::function<void()>& call, Code code) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return Error(Code::ok, "");
}

// That a rank failed with.
inline const Error& only_error(const Outcomes& outcomes, size_t rank) {
    static const Error none(Code::internal, "");
    if (outcomes[rank]) return *outcomes[rank];
    ADD_FAILURE() << "rank " << rank << " has no error";
    return none;
}

}  // namespace tsr::testing
