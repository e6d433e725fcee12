// Whether the tests run under a sanitizer, where each takes ten times as long and may do a part of its work.
#pragma once

namespace tsr::testing {

#if defined(TESSERA_SANITIZED)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

}  // namespace tsr::testing
