// Whether the tests run under a sanitizer, where each takes ten times as long and may do a part of its work.
#pragma once

namespace tsr::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

}  // namespace tsr::testing
