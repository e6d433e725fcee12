// The text of a DeepSpeed configuration as a JSON document that knows the lines of its keys. Beyond JSON it allows
// comments (#, //, /* */) and trailing commas. Duplicate keys are refused; size and depth are bounded. Immutable.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.hpp"

namespace tsr {

class ConfigText {
   public:
    static constexpr size_t max_bytes = size_t{256} << 10;
    static constexpr int max_depth = 32;

    // Throws INVALID_ARGUMENT that names the line and the column.
    explicit ConfigText(std::string_view text);
    ConfigText(const ConfigText&) = delete;
    ConfigText& operator=(const ConfigText&) = delete;

    [[nodiscard]] const Json& root() const { return root_; }  // an object
    // "line 3, column 5": the place of the key whose value in root() this is.
    [[nodiscard]] std::string place_of(const Json& value) const;

   private:
    // Text without comments and trailing commas, of the same length.
    struct Plain {
        std::string text;
        std::vector<size_t> keys;  // where they begin, in the order of the text
    };
    class Scanner;

    void parse(const Plain& plain, const std::vector<std::string_view>& scalars);
    void find_places(const Json& value, const std::vector<size_t>& keys, size_t& next);
    [[nodiscard]] std::string place_at(size_t at) const;
    [[noreturn]] void fail(size_t at, const std::string& why) const;

    std::string text_;
    Json root_;
    std::unordered_map<const Json*, size_t> places_;  // where the keys of these values begin
};

}  // namespace tsr
