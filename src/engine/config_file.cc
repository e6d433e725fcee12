#include "engine/config_file.hpp"

#include <fmt/core.h>

#include "base/brief.hpp"
#include "base/error.hpp"
#include "checkpoint/io/file_system.hpp"
#include "engine/config_text.hpp"

namespace tsr {

namespace {

constexpr size_t longest_path = 4096;
constexpr size_t shown_bytes = 100;  // of what is no path

}  // namespace

std::string config_text_of(const std::string& text_or_path) {
    const bool is_text =
        text_or_path.empty() || text_or_path.front() == '[' || text_or_path.find('{') != std::string::npos;
    if (is_text) return text_or_path;
    if (text_or_path.size() > longest_path || text_or_path.find('\n') != std::string::npos) {
        throw Error(Code::invalid_argument,
                    fmt::format("the configuration has no brace and is not a path: '{}'; give the text of a ds_config "
                                "(an object in braces) or the path of its file",
                                brief(readable_utf8(text_or_path), shown_bytes)));
    }
    try {
        return read_text(posix_file_system(), text_or_path, ConfigText::max_bytes);
    } catch (const Error& error) {
        const Code code = error.code() == Code::corrupt ? Code::invalid_argument : error.code();
        throw Error(code, fmt::format("the configuration {} cannot be read: {}; give the path of a ds_config or its "
                                      "text (an object in braces)",
                                      readable_utf8(text_or_path), error.what()));
    }
}

}  // namespace tsr
