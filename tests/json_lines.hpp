// A file of which each line is a JSON value.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include "base/json.hpp"

namespace tsr::testing {

inline std::vector<Json> lines_of(const std::string& path) {
    std::ifstream file(path);
    std::vector<Json> lines;
    for (std::string text; std::getline(file, text);) lines.push_back(Json::parse(text, path));
    return lines;
}

}  // namespace tsr::testing
