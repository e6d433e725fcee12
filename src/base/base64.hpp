// Base64 with padding (RFC 4648).
#pragma once

#include <string>
#include <string_view>

namespace tsr {

[[nodiscard]] std::string to_base64(std::string_view bytes);
// Throws CORRUPT if `text` is not base64.
[[nodiscard]] std::string from_base64(std::string_view text);

}  // namespace tsr
