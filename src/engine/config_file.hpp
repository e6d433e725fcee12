// Where a configuration comes from: programs give its text or the path of its file.
#pragma once

#include <string>

namespace tsr {

// What has a brace is the text itself; so are an array and the empty text, which are refused as texts. Anything else is the
// path of a file to read. Throws NOT_FOUND or IO.
[[nodiscard]] std::string config_text_of(const std::string& text_or_path);

}  // namespace tsr
