#include "parallel/params.hpp"

#include <fmt/core.h>

#include <unordered_set>

#include "base/error.hpp"
#include "tensor/overlap.hpp"

namespace tsr {

std::string without_wrappers(std::string name) {
    for (bool found = true; found;) {
        found = false;
        for (const std::string_view prefix : {"module.", "_orig_mod."}) {
            if (!name.starts_with(prefix)) continue;
            name.erase(0, prefix.size());
            found = true;
        }
    }
    return name;
}

void check_distinct(std::span<const NamedTensor> params) {
    if (params.empty()) throw Error(Code::invalid_argument, "the model has no parameters");
    std::unordered_set<std::string_view> names;
    for (const NamedTensor& param : params) {
        const std::string& name = param.name;
        if (name.empty()) throw Error(Code::invalid_argument, "a parameter's name is empty");
        if (!names.insert(name).second) {
            throw Error(
                Code::invalid_argument,
                fmt::format("two parameters are named \"{0}\"; names must be unique in the model: add a prefix, "
                            "such as \"fc1.{0}\"",
                            name));
        }
    }
    std::vector<Tensor> tensors;
    tensors.reserve(params.size());
    for (const NamedTensor& param : params) tensors.push_back(param.tensor);
    if (const auto shared = find_overlap(tensors)) {
        throw Error(
            Code::invalid_argument,
            fmt::format("parameters \"{}\" and \"{}\" share memory; register memory once, also if the model uses it "
                        "under several names",
                        params[shared->first].name, params[shared->second].name));
    }
}

void check_trained(const NamedTensor& param) {
    if (is_floating(param.tensor.dtype)) return;
    throw Error(Code::invalid_argument, fmt::format("parameter \"{}\" is {}; a parameter with a gradient must be "
                                                    "a floating-point tensor",
                                                    param.name, name_of(param.tensor.dtype)));
}

std::vector<std::string> description(std::span<const NamedTensor> tensors, std::string_view kind) {
    std::vector<std::string> lines;
    lines.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
        const auto& [name, tensor] = tensors[i];
        lines.push_back(fmt::format("{} {} \"{}\" {} {}{}", kind, i, name, name_of(tensor.dtype), tensor.shape.str(),
                                    tensor.device.type == DeviceType::cpu ? "" : " on CUDA"));
    }
    return lines;
}

Error no_such(std::string_view what, size_t index, size_t count) {
    return Error(Code::invalid_argument, fmt::format("{0} {1} does not exist; the model has {2} {0}s (0 to {3})", what,
                                                     index, count, count - 1));
}

}  // namespace tsr
