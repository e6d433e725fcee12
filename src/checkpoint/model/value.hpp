// Typed JSON: the values of a state, as docs/FORMAT.md defines them. Plain JSON is null, bool, integers of 64 bits,
// finite doubles (always with '.' or 'e'), strings, lists and maps with string keys. Everything else is a tagged object
// of exactly two members, "~" (the kind) and "v":
//   {"~":"bytes","v":"<base64>"}  {"~":"tuple","v":[...]}  {"~":"map","v":[[key, value], ...]}
//   {"~":"int","v":"<decimal beyond 64 bits>"}  {"~":"double","v":"nan" | "inf" | "-inf"}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "base/json.hpp"

namespace tsr {

inline constexpr int max_value_depth = 64;

using Values = std::map<std::string, Json, std::less<>>;

// Throws INVALID_ARGUMENT unless `json` is typed JSON; the message begins with `what` and names the place ("[3].v").
void check_value(const Json& json, std::string_view what);
[[nodiscard]] Json parse_value(std::string_view text, std::string_view what);

// Whether it is the record of PyTorch's names and dtypes that tessera.torch.checkpoint saves beside a program's values.
[[nodiscard]] bool is_torch_record(std::string_view name, const Json& value);

[[nodiscard]] Json double_value(double value);
// Throws INVALID_ARGUMENT unless the value is a double (NaN and infinities included).
[[nodiscard]] double double_of(const Json& value, std::string_view what);
[[nodiscard]] int64_t int_of(const Json& value, std::string_view what);

}  // namespace tsr
