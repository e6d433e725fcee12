// Backend strings.
#include "comm/backend.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"

namespace tsr {

namespace {

constexpr const char* known =
    "backends are auto, shm and gloo for tensors on the CPU and nccl for those on CUDA devices, as in "
    "'cpu:auto,cuda:nccl'";

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
    throw Error(Code::invalid_argument, fmt::format("backend '{}': {}; {}", text, why, known));
}

}  // namespace

Backends backends_of(std::string_view text) {
    Backends result;
    if (text.empty()) return result;
    bool has_cpu = false;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        const std::string_view part = text.substr(begin, end - begin);
        begin = end + 1;
        const size_t colon = part.find(':');
        const std::string_view name = colon == std::string_view::npos ? part : part.substr(colon + 1);
        const std::string_view device = colon != std::string_view::npos ? part.substr(0, colon)
                                        : name == "nccl"                ? "cuda"
                                                                        : "cpu";
        if (device != "cpu" && device != "cuda") refuse(text, fmt::format("unknown device '{}'", device));
        const bool for_cpu = name == "auto" || name == "shm" || name == "gloo";
        if (!for_cpu && name != "nccl") refuse(text, fmt::format("unknown backend '{}'", name));
        if (for_cpu != (device == "cpu")) refuse(text, fmt::format("'{}' does not serve device '{}'", name, device));
        if (for_cpu ? has_cpu : result.nccl) refuse(text, "it names two backends for one device");
        if (for_cpu) {
            has_cpu = true;
            result.cpu = name;
        } else {
            result.nccl = true;
        }
    }
    return result;
}

}  // namespace tsr
