// Backend strings.
#include "comm/backend.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"

namespace tsr {

namespace {

constexpr const char* known = "backends are auto, shm and gloo, each optionally prefixed with cpu:";

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
    throw Error(Code::invalid_argument, fmt::format("backend '{}': {}; {}", text, why, known));
}

}  // namespace

std::string cpu_backend(std::string_view text) {
    if (text.empty()) return "auto";
    std::string chosen;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        const std::string_view part = text.substr(begin, end - begin);
        begin = end + 1;
        const size_t colon = part.find(':');
        const std::string_view device = colon == std::string_view::npos ? "cpu" : part.substr(0, colon);
        const std::string_view name = colon == std::string_view::npos ? part : part.substr(colon + 1);
        if (device == "cuda" || name == "nccl") {
            throw Error(Code::unsupported,
                        fmt::format("backend '{}': '{}' is for GPUs, but this version of Tessera has no transport "
                                    "between GPUs; {}",
                                    text, part, known));
        }
        if (device != "cpu") refuse(text, fmt::format("unknown device '{}'", device));
        if (name != "auto" && name != "shm" && name != "gloo") refuse(text, fmt::format("unknown backend '{}'", name));
        if (!chosen.empty()) refuse(text, "it names two backends for one device");
        chosen = name;
    }
    return chosen;
}

}  // namespace tsr
