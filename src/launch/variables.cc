#include "launch/variables.hpp"

#include <fmt/core.h>

#include <string_view>

extern char** environ;

namespace tsr {

Variables::Variables() {
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string_view text = *entry;
        const size_t equals = text.find('=');
        if (equals != std::string_view::npos) values_[std::string(text.substr(0, equals))] = text.substr(equals + 1);
    }
}

std::vector<std::string> Variables::entries() const {
    std::vector<std::string> out;
    for (const auto& [name, value] : values_) out.push_back(fmt::format("{}={}", name, value));
    return out;
}

}  // namespace tsr
