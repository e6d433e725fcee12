// Reads environment variables. An empty variable counts as unset; an invalid one is an error that names it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tsr {

[[nodiscard]] std::optional<std::string> env_text(const char* name);
// Throws INVALID_ARGUMENT unless the value is a decimal number from `least` to `most`.
[[nodiscard]] std::optional<int64_t> env_number(const char* name, int64_t least, int64_t most);
[[nodiscard]] bool env_flag(const char* name);  // 1, true, yes, on; 0, false, no, off; else INVALID_ARGUMENT

}  // namespace tsr
