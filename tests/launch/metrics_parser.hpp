// A strict reader of Prometheus' text format: every family has HELP and TYPE before its samples, which come together; names
// and labels are well-formed; counters end with _total.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tsr::testing {

// The value of each sample, by its name with labels. Throws std::runtime_error.
inline std::map<std::string, double> parse_metrics(const std::string& text) {
    static const std::regex help(R"(# HELP ([a-z_]+) \S.*)");
    static const std::regex type(R"(# TYPE ([a-z_]+) (counter|gauge))");
    static const std::regex sample(
        R"re((([a-z_]+)(\{[a-z_]+="([^"\\]|\\["\\n])*"(,[a-z_]+="([^"\\]|\\["\\n])*")*\})?) (-?[0-9.e+-]+))re");
    if (text.empty() || text.back() != '\n') throw std::runtime_error("the last line has no end");
    std::map<std::string, double> samples;
    std::set<std::string> families;
    std::string helped;
    std::string current;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
        std::smatch match;
        if (std::regex_match(line, match, help)) {
            helped = match[1];
        } else if (std::regex_match(line, match, type)) {
            current = match[1];
            if (helped != current) throw std::runtime_error("no help before: " + line);
            if (!families.insert(current).second) throw std::runtime_error("a family twice: " + line);
            if ((match[2] == "counter") != current.ends_with("_total")) throw std::runtime_error("its name: " + line);
        } else if (std::regex_match(line, match, sample)) {
            if (match[2] != current) throw std::runtime_error("outside of its family: " + line);
            if (!samples.emplace(match[1], std::stod(match[7])).second) throw std::runtime_error("twice: " + line);
        } else {
            throw std::runtime_error("not a line of metrics: " + line);
        }
    }
    return samples;
}

}  // namespace tsr::testing
